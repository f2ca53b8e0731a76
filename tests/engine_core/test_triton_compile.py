"""Kernels compile side by side ahead of their first launch, here for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# A driver that knows the GPU's name and nothing else: what is launched would raise.
SCRIPT = """
import threading
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
from engine_core.kernels import triton_draw
from engine_core.kernels.triton_compile import compile_only

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


def test_launches_compile_and_do_not_run(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
