"""What the CPU kernels run in: a team of threads that does every task once, and a cache of machine code."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.kernels import cpu_cache, cpu_team
from tests.engine_core.tiny_models import save_model

COUNT_TASKS = "tests.engine_core.count_tasks:count_tasks"


@pytest.mark.parametrize("callers", [1, 3])
def test_every_task_is_done_once_when_a_team_returns(callers: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)  # more than there are cores, so that workers are often late
    team, kernel = cpu_team.Team(), cpu_cache.kernel(COUNT_TASKS)
    wrong: list[str] = []

    def call_often() -> None:
        for run in range(3000):
            tasks = run % 17
            counts = np.zeros(16, np.int64)
            team.run(kernel, (tasks, counts.ctypes.data))
            if counts.tolist() != [1] * tasks + [0] * (16 - tasks):
                wrong.append(f"run {run}: {counts}")

    threads = [threading.Thread(target=call_often) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    team.close()
    torch.set_num_threads(before)
    assert not wrong


@pytest.mark.parametrize("native", [True, False])
def test_a_replay_does_every_task_of_every_launch_once(native: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    team, kernel = cpu_team.Team(native), cpu_cache.kernel(COUNT_TASKS)
    counts = np.zeros((40, 16), np.int64)
    args = np.full((40, 3), 99, np.int64)  # a counter that was left behind
    args[:, 1], args[:, 2] = np.arange(40) % 17, counts.ctypes.data + 128 * np.arange(40)
    launches = np.zeros((40, 3), np.int64)
    launches[:, 0], launches[:, 1] = kernel, args.ctypes.data + 24 * np.arange(40)
    launches[:, 2] = np.arange(40) % 3 > 0
    for run in range(1, 4):
        team.replay(launches)
        assert counts.tolist() == [[run] * (i % 17) + [0] * (16 - i % 17) for i in range(40)]
    team.close()
    torch.set_num_threads(before)


def test_a_closed_team_has_no_threads_left() -> None:
    def workers() -> int:
        return sum(thread.name == "kernel" for thread in threading.enumerate())

    before, alive = torch.get_num_threads(), workers()
    torch.set_num_threads(3)
    team, kernel = cpu_team.Team(), cpu_cache.kernel(COUNT_TASKS)
    team.run(kernel, (0, 0))
    assert workers() == alive + 2
    team.close()
    assert workers() == alive
    torch.set_num_threads(before)


FORK = """
import os, signal, threading, torch
from engine_core.kernels.cpu_linear import PackedLinear
from engine_core.kernels.cpu_pack import pack_floats

torch.set_num_threads(3)
linear, x = PackedLinear(pack_floats(torch.randn(256, 64))), torch.randn(60, 64)
expected, stop = linear(x), threading.Event()

def work():
    while not stop.is_set():
        linear(x)

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
statuses = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child if it hangs
        os._exit(not torch.equal(linear(x), expected))
    statuses.append(os.waitpid(child, 0)[1])
stop.set()
for thread in threads:
    thread.join()
print(statuses)
"""


def test_a_forked_process_has_a_team_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == str([0] * 10), done.stderr


def test_kernels_are_compiled_without_a_writable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gapless").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_cache.load_kernel("elementwise:silu_and_mul") > 0


def test_a_damaged_file_in_the_cache_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[str] = []
    compile_ = cpu_cache._compile

    def counted(source: str, *parameters: int) -> tuple[str, bytes]:
        compiled.append(source)
        return compile_(source, *parameters)

    monkeypatch.setattr(cpu_cache, "_compile", counted)

    def run() -> None:
        counts = np.zeros(3, np.int64)
        address = cpu_cache.load_kernel(COUNT_TASKS)
        cpu_team.Team().run(address, (3, counts.ctypes.data), parallel=False)
        assert counts.tolist() == [1, 1, 1]

    run()
    run()
    assert len(compiled) == 1
    (file,) = cpu_cache.cache_directory().iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        run()
    assert len(compiled) == 4
    assert list(cpu_cache.cache_directory().iterdir()) == [file]


WARM = """
import sys
from engine_core import LLM, SamplingParams

with LLM(sys.argv[1], kv_tokens=1024, progress=False, weights=sys.argv[2]) as llm:
    print(llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].token_ids)
print("numba" in sys.modules)
"""


@pytest.mark.parametrize("weights", ["int8", "none"])
def test_a_start_that_finds_its_kernels_imports_no_compiler(weights: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", WARM, str(tmp_path / "model"), weights]
    cold, warm = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
        for _ in range(2)
    )
    assert cold[1] == "True"
    assert warm == [cold[0], "False"]
