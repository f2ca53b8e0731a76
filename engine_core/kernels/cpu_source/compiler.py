"""Compiles kernels with numba, and what all of them use."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba
from numba import types
from numba.extending import intrinsic

KERNEL_SIGNATURE = types.void(types.CPointer(types.int64))
_BACK, _ENTERED = 1 << 24, 1 << 48  # what is added to a counter of tasks
# Names of numba's runtime, and of Python's for its exceptions: code that has them would need numba at every start.
SYMBOL = re.compile(rb"\0(NRT_\w+|numba_\w+|PyErr_\w+)")


def compile_kernel(kernel: Callable[[Any], None], machine: Any) -> tuple[str, bytes]:
    """The symbol and the object code of `kernel` for a target machine of LLVM."""
    compiled = numba.cfunc(KERNEL_SIGNATURE, error_model="numpy")(kernel)
    code = machine.emit_object(llvm.parse_assembly(compiled.inspect_llvm()))
    symbols = set(SYMBOL.findall(code))
    if foreign := sorted(symbol.decode() for symbol in symbols):
        raise RuntimeError(f"kernel {kernel.__qualname__} needs {', '.join(foreign)}, which only numba has")
    return compiled.native_name, code


@intrinsic  # type: ignore[untyped-decorator]
def _fetch_add(typing_context: Any, args: Any, value: Any) -> Any:
    """What the counter in `args[0]` was before `value` was added (atomic)."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", values[0], values[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@numba.njit(inline="always")
def choose_side(args):  # type: ignore[no-untyped-def]
    """From which side of the tasks this thread draws: the first thread to come from the front, the next from the back.

    So neighbours, and what the same numbers stand for in the next kernel, mostly stay in one core's cache.
    """
    return _fetch_add(args, _ENTERED) // _ENTERED % 2


@numba.njit(inline="always")
def next_task(args, side, tasks):  # type: ignore[no-untyped-def]
    """Draw the next of the tasks from 0 to `tasks`, which itself is what comes when none is left.

    The counter has how many were drawn at the front, at the back, and how many threads have come.
    """
    drawn = _fetch_add(args, _BACK if side else 1)
    front, back = drawn % _BACK, drawn % _ENTERED // _BACK
    if front + back >= tasks:
        return tasks
    return tasks - 1 - back if side else front


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
int16s = pointer_view(types.int16)
int32s = pointer_view(types.int32)
int64s = pointer_view(types.int64)


@numba.njit(inline="always")
def smaller(x, y):  # type: ignore[no-untyped-def]
    """Like `min`, which would bring numba's exceptions along."""
    return x if x < y else y


@numba.njit(inline="always")
def larger(x, y):  # type: ignore[no-untyped-def]
    return x if x > y else y


@intrinsic  # type: ignore[untyped-decorator]
def stack(typing_context: Any, size: Any) -> Any:
    """The address of `size` bytes that each thread has to itself until its kernel returns. Not to be used in a loop."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        memory = builder.alloca(ir.IntType(8), values[0])
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(types.int64), codegen
