"""FlashAttention packages behind one interface: stand-ins with their signatures against torch's attention, the choice
between them, and their place in a step."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine_core.attention import flash
from engine_core.attention.base import AttentionSpec
from engine_core.attention.flash import Flash2, Flash3, Flash4, PromptRows, choose_flash
from engine_core.attention.select import check_attention
from engine_core.cuda.mixed import MixedInputs, mixed_inputs
from engine_core.cuda.prompts import FlashPrompts, try_flash
from engine_core.errors import UserError
from engine_core.plan import ScheduledRow
from engine_core.request import Request
from ipc.sampling import SamplingParams
from tests.engine_core.flash_packages import flash_attn_2, flash_attn_3, flash_attn_4

HEADS, KV_HEADS, DIM = 6, 2, 16
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
NAN = float("nan")
PACKAGES: list[tuple[type[Flash2], Callable[[], ModuleType], int]] = [
    (Flash2, flash_attn_2, 256),
    (Flash3, flash_attn_3, 16),
    (Flash4, flash_attn_4, 16),
]
MODULES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "fa3_fwd_interface")


def spec(block_size: int) -> AttentionSpec:
    return AttentionSpec(1, HEADS, KV_HEADS, DIM, block_size, torch.float32, CPU)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """torch's attention for the last len(q) positions of one sequence."""
    length, first = len(k), len(k) - len(q)
    at_q, at_k = torch.arange(first, length)[:, None], torch.arange(length)
    mask = (at_k <= at_q) & (at_k > at_q - (window or length))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize(("generation", "package", "block_size"), PACKAGES)
def test_whole_and_paged(
    generation: type[Flash2], package: Callable[[], ModuleType], block_size: int, window: int | None
) -> None:
    backend = generation(package())
    assert backend.takes_pages(block_size)
    queries, lengths, scale = [5, 1, 40], [5, 70, 300], 0.3
    widths = -(-max(lengths) // block_size)
    cache = torch.randn(2, 3 * widths + 1, block_size, KV_HEADS, DIM)
    tables = torch.randperm(3 * widths).view(3, widths).int() + 1
    cache[:, 0] = NAN  # nobody's
    starts = torch.tensor([0, 5, 6, 46], dtype=torch.int32)
    length = torch.tensor(lengths, dtype=torch.int32)
    sums = torch.tensor([0, 5, 75, 375], dtype=torch.int32)
    q = torch.randn(46, HEADS + 2, DIM)[:, :HEADS]  # a view, as of qkv
    contexts = []
    for table, size in zip(tables.long(), lengths, strict=True):
        k, v = cache[:, table].flatten(1, 2)
        k[size:], v[size:] = NAN, NAN
        cache[0, table], cache[1, table] = k.view(-1, block_size, KV_HEADS, DIM), v.view(-1, block_size, KV_HEADS, DIM)
        contexts.append((k[:size], v[:size]))
    rows = PromptRows(starts, sums, length, tables, max(queries), max(lengths), scale)
    parts = zip(q.split(queries), contexts, strict=True)
    expected = torch.cat([reference(part, k, v, scale, window) for part, (k, v) in parts])
    torch.testing.assert_close(backend.paged(q, cache[0], cache[1], rows, window), expected)

    k, v = torch.randn(2, 46, KV_HEADS, DIM)
    rows = PromptRows(
        starts, starts, torch.tensor(queries, dtype=torch.int32), tables, max(queries), max(queries), scale
    )
    whole = zip(q.split(queries), k.split(queries), v.split(queries), strict=True)
    expected = torch.cat([reference(*part, scale, window) for part in whole])
    torch.testing.assert_close(backend.whole(q, k, v, rows, window), expected)


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make these modules the only FlashAttention there is; None: one that raises when it is imported."""
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "")

    def install(capability: tuple[int, int], **modules: Callable[[], ModuleType] | None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

        def find(name: str) -> ModuleType:
            key = name.replace(".", "_")
            if key not in modules:
                raise ModuleNotFoundError(f"No module named {name!r}")
            make = modules[key]
            if make is None:
                raise OSError("undefined symbol: _ZN3c10")
            return make()

        monkeypatch.setattr(flash, "importlib", SimpleNamespace(import_module=find))

    return install


def chosen(name: str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    found = choose_flash(name, CUDA, dtype)
    return None if found is None else found.name


def test_auto_takes_what_beats_cudnn(installed: Callable[..., None]) -> None:
    installed((9, 0))
    assert chosen("auto") is None
    installed((9, 0), flash_attn=flash_attn_2)
    assert chosen("auto") is None
    installed((9, 0), flash_attn=flash_attn_2, flash_attn_cute=flash_attn_4)
    assert chosen("auto") == "flash_attn 4"
    installed((9, 0), flash_attn_cute=flash_attn_4, fa3_fwd_interface=flash_attn_3)
    assert chosen("auto") == "flash_attn 3"
    installed((10, 0), flash_attn_cute=flash_attn_4, flash_attn_interface=flash_attn_3)
    assert chosen("auto") == "flash_attn 4"
    installed((8, 0), flash_attn=flash_attn_2)
    assert chosen("auto") is None
    installed((9, 0), flash_attn_interface=None, flash_attn_cute=flash_attn_4)
    assert chosen("auto") == "flash_attn 4"
    assert chosen("auto", torch.float32) is None
    assert chosen("triton") is None
    assert chosen("torch") is None


def test_flash_attn_takes_any_that_works_and_says_what_was_tried(installed: Callable[..., None]) -> None:
    check_attention("flash_attn", CUDA)
    installed((8, 6), flash_attn=flash_attn_2)
    assert chosen("flash_attn") == "flash_attn 2"
    installed((9, 0), flash_attn=flash_attn_2)
    assert chosen("flash_attn") == "flash_attn 2"
    with pytest.raises(UserError, match=r"--attention flash_attn .*--dtype bfloat16"):
        chosen("flash_attn", torch.float32)
    installed((9, 0), flash_attn=None, flash_attn_cute=lambda: ModuleType("something else"))
    with pytest.raises(UserError) as failure:
        chosen("flash_attn")
    for said in (
        "--attention flash_attn",
        "No module named 'flash_attn_interface'",
        "No module named 'fa3_fwd_interface'",
        "flash_attn 4: AttributeError",
        "flash_attn 2: OSError: undefined symbol",
        "install one",
        "--attention triton",
    ):
        assert said in str(failure.value)
    installed((7, 5), flash_attn=flash_attn_2)
    with pytest.raises(UserError, match=r"flash_attn 2 does not run on compute capability 7\.5"):
        chosen("flash_attn")


def test_the_cpu_has_none() -> None:
    assert choose_flash("auto", CPU, torch.float32) is None
    with pytest.raises(UserError, match="--attention flash_attn"):
        check_attention("flash_attn", CPU)


def test_no_package_is_imported_unless_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    choose_flash("triton", CUDA, torch.bfloat16)
    assert not any(name in sys.modules for name in MODULES)


# --- in a step --------------------------------------------------------------------------------------------------------


class Step:
    """Rows (start, count) of requests with random K and V in the pool, and the qkv of the step's tokens."""

    def __init__(self, rows: list[tuple[int, int]], block_size: int, window: int | None = None) -> None:
        self.spec, self.window = spec(block_size), window
        width = -(-max(start + count for start, count in rows) // block_size)
        blocks = random.Random(3).sample(range(1, 1 + len(rows) * width), len(rows) * width)
        requests = [
            Request(i, [1] * (start + count), SamplingParams(), block_ids=blocks[i * width : (i + 1) * width], slot=i)
            for i, (start, count) in enumerate(rows)
        ]
        self.rows = [ScheduledRow(request, *row, True) for request, row in zip(requests, rows, strict=True)]
        self.host = mixed_inputs(self.rows, self.rows, self.spec, 0, tile_all=False)
        self.device = MixedInputs(*map(torch.from_numpy, self.host.arrays))
        self.tables = torch.tensor([request.block_ids for request in requests], dtype=torch.int32)
        self.cache = torch.full((2, len(blocks) + 1, block_size, KV_HEADS, DIM), NAN)
        self.qkv = torch.randn(sum(count for _, count in rows), (HEADS + 2 * KV_HEADS) * DIM)
        flat, parts = self.cache.flatten(1, 2), self.qkv.view(-1, HEADS + 2 * KV_HEADS, DIM)
        expected = []
        for row, at in zip(self.rows, self.host.query_starts, strict=False):
            slots = torch.tensor(
                [row.request.block_ids[p // block_size] * block_size + p % block_size for p in range(row.stop)]
            )
            flat[:, slots[: row.start]] = torch.randn(2, row.start, KV_HEADS, DIM)
            q, k, v = parts[at : at + row.count].split((HEADS, KV_HEADS, KV_HEADS), 1)
            flat[:, slots[row.start :]] = torch.stack((k, v))
            expected.append(reference(q, *flat[:, slots], self.spec.scale, window).flatten(1))
        self.expected = torch.cat(expected)

    def run(self, backend: Flash2) -> torch.Tensor | None:
        prompts = FlashPrompts(backend, self.spec)
        rows = prompts.rows(self.host, self.device, self.tables)
        if rows is None:
            return None
        out = torch.full((len(self.qkv), HEADS * DIM), NAN)
        return prompts.attend(self.qkv, self.cache, rows, self.host, out, self.window)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "rows", [[(0, 30)], [(0, 3), (0, 40), (0, 16)], [(17, 30)], [(8, 1), (63, 1), (0, 20), (31, 9)]]
)
@pytest.mark.parametrize(("generation", "package", "block_size"), PACKAGES)
def test_prompts_of_a_step(
    generation: type[Flash2],
    package: Callable[[], ModuleType],
    block_size: int,
    rows: list[tuple[int, int]],
    window: int | None,
) -> None:
    step = Step(rows, block_size, window)
    out = step.run(generation(package()))
    assert out is not None
    decodes = sum(count == 1 for _, count in rows)
    assert out[:decodes].isnan().all()  # decode rows are not its own
    torch.testing.assert_close(out[decodes:], step.expected[decodes:])


def test_what_a_package_cannot_take_is_left_to_ours() -> None:
    second = Flash2(flash_attn_2())
    assert Step([(5, 20)], 16).run(second) is None  # pages too small for it
    assert Step([(5, 1), (9, 1)], 16).run(second) is None  # no prompts
    whole = Step([(5, 1), (0, 20)], 16)
    out = whole.run(second)
    assert out is not None
    torch.testing.assert_close(out[1:], whole.expected[1:])
    for other in (Flash3(flash_attn_3()), Flash4(flash_attn_4())):
        assert not other.takes_pages(128)  # read by TMA, which does not clear what lies behind a context


def test_a_package_is_tried_out_and_given_up_if_it_fails() -> None:
    cache = torch.zeros(2, 1, 16, KV_HEADS, DIM)
    tried = try_flash(Flash3(flash_attn_3()), spec(16), cache, required=False)
    assert tried is not None
    assert tried.pages

    def fail(*args: Any, **more: Any) -> Any:
        raise RuntimeError("This flash attention build does not support paged KV.")

    without_pages = flash_attn_3()
    without_pages.flash_attn_with_kvcache = fail  # type: ignore[attr-defined]
    tried = try_flash(Flash3(without_pages), spec(16), cache, required=True)
    assert tried is not None
    assert not tried.pages

    broken = flash_attn_4()
    broken.flash_attn_varlen_func = fail  # type: ignore[attr-defined]
    assert try_flash(Flash4(broken), spec(16), cache, required=False) is None
    with pytest.raises(UserError, match=r"--attention flash_attn: flash_attn 4 does not .*--attention triton"):
        try_flash(Flash4(broken), spec(16), cache, required=True)
