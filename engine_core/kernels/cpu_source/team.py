"""The loops of a team's threads; see `cpu_team`."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import (
    ARGS,
    COUNT,
    FUTEX,
    FUTEX_WAIT,
    FUTEX_WAKE,
    GENERATION,
    INSIDE,
    KERNEL,
    LAUNCH_BYTES,
    LAUNCHES,
    OPEN,
    SLEEPERS,
    STOP,
    SYSCALL,
)
from engine_core.kernels.cpu_source.compiler import int64s

SPINS = 4_000  # about 50 us: longer than from one kernel of a step to the next, shorter than anyone's time slice
EVERYBODY = 2**31 - 1
_PAUSE = {"x86_64": "pause", "AMD64": "pause", "aarch64": "yield", "arm64": "yield"}.get(platform.machine(), "")


@intrinsic  # type: ignore[untyped-decorator]
def load(typing_context: Any, cells: Any, index: Any) -> Any:
    """cells[index], in one order for all threads."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.gep(values[0], [values[1]]), "seq_cst", 8)

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store(typing_context: Any, cells: Any, index: Any, value: Any) -> Any:
    """cells[index] = value, in one order for all threads."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[2], builder.gep(values[0], [values[1]]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def add(typing_context: Any, cells: Any, index: Any, value: Any) -> Any:
    """cells[index] += value, in one order for all threads."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(values[0], [values[1]]), values[2], "seq_cst")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typing_context: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if _PAUSE:
            builder.asm(ir.FunctionType(ir.VoidType(), []), _PAUSE, "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call_kernel(typing_context: Any, address: Any, args: Any) -> Any:
    """Call the kernel at `address` with the arguments at `args`, both integers."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = ir.IntType(64).as_pointer()
        function = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(function, [builder.inttoptr(values[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def futex(typing_context: Any, cells: Any, operation: Any, value: Any) -> Any:
    """The system call on the low half of the generation: sleep while it is `value`, or wake up to `value` sleepers."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        cells, operation, value = values
        word = ir.IntType(64)
        where = [builder.gep(cells, [ir.Constant(word, at)]) for at in (SYSCALL, FUTEX)]
        function = ir.FunctionType(word, [word], var_arg=True).as_pointer()
        zero = ir.Constant(word, 0)
        address = builder.ptrtoint(cells, word)
        arguments = [builder.load(where[1]), address, operation, value, zero, zero, zero]
        return builder.call(builder.inttoptr(builder.load(where[0]), function), arguments)

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), codegen


def lead() -> Callable[[Any], None]:
    """Argument: the cells. Does the launches that they name, one after the other."""

    def kernel(cells: Any) -> None:
        for number in range(cells[COUNT]):
            launch = int64s(cells[LAUNCHES] + number * LAUNCH_BYTES)
            int64s(launch[1])[0] = 0
            if launch[2] == 0:
                call_kernel(launch[0], launch[1])
                continue
            cells[KERNEL], cells[ARGS] = launch[0], launch[1]
            store(cells, OPEN, 1)
            add(cells, GENERATION, 1)
            if load(cells, SLEEPERS) > 0:
                futex(cells, FUTEX_WAKE, EVERYBODY)
            call_kernel(launch[0], launch[1])
            store(cells, OPEN, 0)
            while load(cells, INSIDE) > 0:  # they have each one task at most left
                pause()

    return kernel


def work() -> Callable[[Any], None]:
    """Argument: the cells."""

    def kernel(cells: Any) -> None:
        seen = 0
        while load(cells, STOP) == 0:
            spins = 0
            while load(cells, GENERATION) == seen and spins < SPINS:
                pause()
                spins += 1
            if load(cells, GENERATION) == seen:
                add(cells, SLEEPERS, 1)
                futex(cells, FUTEX_WAIT, seen)
                add(cells, SLEEPERS, -1)
                continue
            seen = load(cells, GENERATION)
            add(cells, INSIDE, 1)
            if load(cells, OPEN) == 1:
                call_kernel(cells[KERNEL], cells[ARGS])
            add(cells, INSIDE, -1)

    return kernel


def nothing() -> Callable[[Any], None]:
    """What a team that ends runs last."""
    return lambda args: None
