"""The machine code of the CPU kernels, kept on disk: a start that finds it there imports no compiler.

A kernel is a C function `void kernel(int64_t *args)`. Every thread of a team (`cpu_team`) calls it with the same
arguments; they share the work by drawing task numbers until none are left, by a counter in `args[0]` that starts at 0.
Which thread computes a value never changes how it is computed, so results do not depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

SOURCES = "engine_core.kernels.cpu_source"
_DIGEST_BYTES = 32


def cache_directory() -> Path:
    """Where machine code is kept: in the user's cache, one folder per processor and version of the sources."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "gapless" / "kernels" / _version()


def has_kernels() -> bool:
    """Whether there is machine code in the cache. If not, this start compiles it."""
    return any(cache_directory().glob("*.o"))


@cache
def kernel(source: str, *parameters: int) -> int:
    """The address of a kernel, compiled or taken from the cache.

    `source` is "module:function", the module one of `cpu_source` or a full name; the function makes the kernel from
    `parameters`. Without a writable cache folder it is compiled again at every start.
    """
    return load_kernel(source, *parameters)


def load_kernel(source: str, *parameters: int) -> int:
    """`kernel` without its memory of earlier calls."""
    path = cache_directory() / ("-".join([source.replace(":", "."), *map(str, parameters)]) + ".o")
    content = _stored(path)
    if content is None:
        symbol, object_code = _compile(source, *parameters)
        content = symbol.encode() + b"\n" + object_code
        _store(path, content)
    name, _, code = content.partition(b"\n")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines().append(engine)
    return int(engine.get_function_address(name.decode()))


@cache
def dot_width() -> int:
    """Bits of this processor's instruction for sums of four products of bytes; 0 if it has none."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512vnni"):
        return 512
    return 256 if features.get("avxvnni") else 0


@cache
def tile_vectors() -> int:
    """Vectors of 16 floats in a row of a tile: six rows of them stay in this processor's registers."""
    return 4 if llvm.get_host_cpu_features().get("avx512f") else 1


def _compile(source: str, *parameters: int) -> tuple[str, bytes]:
    """Numba's own cache is no help: it takes vector intrinsics for new ones in every process."""
    compiler = importlib.import_module(f"{SOURCES}.compiler")
    module, _, function = source.partition(":")
    make = getattr(importlib.import_module(module if "." in module else f"{SOURCES}.{module}"), function)
    symbol, code = compiler.compile_kernel(make(*parameters), _target_machine())
    return symbol, code


@cache
def _version() -> str:
    digest = hashlib.sha256(f"{version('numba')} {version('llvmlite')} {_processor()}".encode())
    folder = Path(__file__).parent
    for source in sorted([*folder.glob("cpu_*.py"), *folder.glob("cpu_source/*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


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


@cache
def _processor() -> tuple[str, str]:
    """Name and features of this processor, as LLVM calls them."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _target_machine() -> Any:
    _engines()
    cpu, features = _processor()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )


@cache
def _engines() -> list[Any]:
    """What holds the code in memory, for as long as the process lives. The first call makes LLVM ready."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # for the one inline instruction in spin loops
    return []
