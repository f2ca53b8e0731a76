"""Compiles the CPU kernels with numba and keeps the machine code on disk.

A kernel is a C function `void kernel(int64_t *args)`. Every thread of a team (`cpu_team`) calls it with the same
arguments; they share the work by drawing task numbers from `args[0]`, a counter that starts at 0, until none are left.
Which thread computes a value never changes how it is computed, so results do not depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba
from numba import types
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.extending import intrinsic

KERNEL_SIGNATURE = types.void(types.CPointer(types.int64))
_DIGEST_BYTES = 32


def cache_directory() -> Path:
    """Where machine code is kept: in the user's cache, one folder per processor and version of these sources."""
    digest = hashlib.sha256(f"{numba.__version__} {_processor()}".encode())
    for source in sorted(Path(__file__).parent.glob("cpu_*.py")):
        digest.update(source.read_bytes())
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "gapless" / "kernels" / digest.hexdigest()[:16]


def compile_kernel(name: str, make: Callable[[], Callable[[Any], None]]) -> int:
    """The address of the code of kernel `make()`, compiled or taken from the cache, where it is called `name`.

    Numba's own cache is no help: it takes vector intrinsics for new ones in every process. Without a writable cache
    folder a kernel is compiled again at every start.
    """
    path = cache_directory() / f"{name}.o"
    engines = _engines()
    content = _stored(path)
    if content is None:
        compiled = numba.cfunc(KERNEL_SIGNATURE, error_model="numpy")(make())
        object_code = _target_machine().emit_object(llvm.parse_assembly(compiled.inspect_llvm()))
        content = compiled.native_name.encode() + b"\n" + object_code
        _store(path, content)
    symbol, _, code = content.partition(b"\n")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    engines.append(engine)
    return int(engine.get_function_address(symbol.decode()))


def _stored(path: Path) -> bytes | None:
    """What `_store` wrote, or None. LLVM would crash on a file that a power cut has left half written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == data[:_DIGEST_BYTES] else None


def _store(path: Path, content: bytes) -> None:
    """Write the file in one step: other processes may be starting too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(content).digest() + content)
                file.flush()
                os.replace(file.name, path)
            except OSError:  # the disk is full
                os.unlink(file.name)
                raise
    except OSError:
        logging.getLogger(__name__).warning("cannot keep compiled kernels in %s", path.parent)


def _processor() -> tuple[str, str]:
    """Name and features of this processor, as LLVM calls them."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _target_machine() -> Any:
    cpu, features = _processor()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )


@cache
def _engines() -> list[Any]:
    """What holds the code in memory, for as long as the process lives. The first call makes numba's runtime ready."""
    cpu_target.target_context.codegen()
    llvm.initialize_native_asmparser()  # for the one inline instruction in spin loops
    rtsys.initialize(cpu_target.target_context)
    return []


@intrinsic  # type: ignore[untyped-decorator]
def next_task(typing_context: Any, args: Any) -> Any:
    """Draw the next task number from the counter in `args[0]` (atomic)."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", values[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


def pointer_view(element: types.Type) -> Any:
    """An intrinsic `view(address)` that turns an integer address into a pointer to `element`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def view(typing_context: Any, address: Any) -> Any:
        result = types.CPointer(element)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(result))

        return result(types.int64), codegen

    return view


floats = pointer_view(types.float32)
halves = pointer_view(types.float16)
int32s = pointer_view(types.int32)
int64s = pointer_view(types.int64)
