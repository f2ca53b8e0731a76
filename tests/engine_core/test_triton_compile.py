"""Kernels compile side by side ahead of their first launch, here for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A driver that knows the GPU's name and nothing else: what is launched would raise.
DRIVER = """
import sys, threading
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
from engine_core.kernels.triton_compile import compile_only
"""

LAUNCHES = """
from engine_core.kernels import triton_draw

def draw(logits, ring):
    slots = torch.arange(4, dtype=torch.int32)
    last = torch.full((5,), -7, dtype=torch.int32)
    triton_draw.draw(logits, slots, slots, None, last, ring, slots[:1])
    return last

def launch(errors):
    try:
        draw(torch.randn(4, 1000), torch.zeros(1, 4, dtype=torch.int32))
    except Exception as error:
        errors.append(error)

ring = torch.full((1, 4), -7, dtype=torch.int32)
shares, errors = [], []
with compile_only(shares.append):
    for _ in range(3):  # the second and third time the kernels are on their way
        assert draw(torch.randn(4, 1000), ring).eq(-7).all() and ring.eq(-7).all()
    other = threading.Thread(target=launch, args=(errors,))  # another engine of this process goes on as ever
    other.start()
    other.join()
assert errors, "a launch of another thread was swallowed"
assert shares[-1] == 1.0 and shares == sorted(shares)
with compile_only(shares.append):
    draw(torch.randn(4, 1000), ring)
kernels = triton_draw._draw_part.device_caches[0][0]
assert len(kernels) == 1 and "cubin" in next(iter(kernels.values())).asm
errors.clear()
launch(errors)
assert errors, "launches are still swallowed"
"""


# Prompts of any length, against what `Needs.FULL` has compiled: a ring of some turns, rows and cells.
PROMPTS = """
import numpy as np
from engine_core.cuda.prompt_logprobs import prompt_records
from engine_core.kernels import triton_logprobs, triton_survey
from engine_core.plan import ScheduledRow
from engine_core.request import Request
from ipc.sampling import SamplingParams

with compile_only(lambda share: None):
    logits, slots, settings = torch.zeros(8, 1000), torch.zeros(8, dtype=torch.int32), torch.zeros(9, 16).int()
    found = triton_survey.survey(logits, logits, slots, settings, logprobs=True)
    ring, tokens = torch.zeros(4, 8, triton_logprobs.record_width()).int(), torch.zeros(4, 12).int()[:, 4:]
    triton_logprobs.best(logits, slots, settings, found, ring, slots[:1])
    triton_logprobs.rank(logits, slots, settings, found, tokens, ring, slots[:1])
    for length in (1, 2, 3, 4, 8, 16, 17, 32, 257, 270, 512):
        request = Request(1, [5] * (length + 1), SamplingParams(prompt_logprobs=2))
        row = ScheduledRow(request, 0, length + 1, True)
        prompt_records(row, torch.zeros(length + 1, 8), lambda hidden: torch.zeros(len(hidden), 1000))
for kernel in (triton_survey._survey, triton_logprobs._best, triton_logprobs._rank):
    assert len(kernel.device_caches[0][0]) == 1, (kernel, list(kernel.device_caches[0][0]))
"""


# The products that ask for most.
PRODUCTS = """
from engine_core.kernels import triton_gemm

capability, room = int(sys.argv[1]), int(sys.argv[2])
triton_gemm.chained, triton_gemm.shared_memory = lambda _: capability >= 90, lambda _: room
with compile_only(lambda share: None):
    for rows, n, k, gated in (
        *((8, 1024, 3072, False), (32, 4096, 4096, False), (64, 3072, 1024, True)),
        *((64, 32768, 4096, False), (256, 3072, 1024, True)),
    ):
        weight = torch.empty(n * (1 + gated), k, dtype=torch.bfloat16)
        assert triton_gemm.suits(rows, weight, gated)
        triton_gemm.gemm(torch.empty(rows, k, dtype=torch.bfloat16), weight, gated=gated)
taken = [kernel.metadata.shared for kernel in triton_gemm._skinny.device_caches[0][0].values()]
assert len(taken) == 5 and max(taken) <= room, taken
"""


def run(script: str, cache: Path, *args: int) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", DRIVER + script, *map(str, args or (90,))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_launches_compile_and_do_not_run(tmp_path: Path) -> None:
    run(LAUNCHES, tmp_path)


def test_no_prompt_compiles_a_kernel_of_its_own(tmp_path: Path) -> None:
    run(PROMPTS, tmp_path)


@pytest.mark.parametrize(("capability", "kibibytes"), [(86, 99), (90, 227)])
def test_products_fit_into_each_gpus_shared_memory(tmp_path: Path, capability: int, kibibytes: int) -> None:
    run(PRODUCTS, tmp_path, capability, kibibytes << 10)
