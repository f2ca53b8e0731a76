"""`LLM` with the SmolLM2 weights for what has to do with text, with a tiny random model for the rest."""

from __future__ import annotations

import gc
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core import LLM, AsyncLLM, SamplingParams
from engine_core.outputs import EngineError, RequestOutput
from engine_core.progress import BatchProgress, load_progress
from tests.engine_core.tiny_models import save_model
from tokenizer_proc.load import load_text_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), kv_tokens=4096, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with no tokenizer at all."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), kv_tokens=1024, max_model_len=64, threads=1) as loaded:
        yield loaded


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.running == stats.waiting == 0
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- what is imported -------------------------------------------------------------------------------------------------


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, engine_core; print(*(m for m in ('torch', 'numpy', 'msgspec', 'tokenizers') if m in sys.modules))"
    )
    assert run_python(code).split() == []
    code = (
        "import sys; from engine_core import LLM, SamplingParams; "
        "print(*(m for m in ('torch', 'tokenizers', 'asyncio', 'rich') if m in sys.modules))"
    )
    assert run_python(code).split() == []


def test_use_with_ids_alone_needs_no_tokenizer(tiny_path: Path) -> None:
    code = f"""
import sys
from engine_core import LLM, AsyncLLM, SamplingParams
llm = LLM({str(tiny_path)!r}, kv_tokens=512, threads=1)
params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=1, prompt_logprobs=1, ignore_eos=True)
whole = llm.generate([[1, 2, 3]], params)[0]
parts = list(llm.stream([1, 2, 3], params, text=False))
assert [token for part in parts for token in part.token_ids] == whole.token_ids and len(whole.token_ids) == 5
assert [item for part in parts for item in part.logprobs] == whole.logprobs
print(*(m for m in ("tokenizers", "minijinja", "jinja2", "tokenizer_proc", "detokenizer_proc") if m in sys.modules))
"""
    assert run_python(code).split() == []


def test_an_unknown_name_in_the_package_is_an_attribute_error() -> None:
    import engine_core

    with pytest.raises(AttributeError, match="Nothing"):
        _ = engine_core.Nothing


# --- generate ---------------------------------------------------------------------------------------------------------


def test_text_is_the_one_shot_decode_of_the_tokens(llm: LLM, smollm2_path: Path) -> None:
    tokenizer = load_text_model(smollm2_path).tokenizer
    prompts = ["The capital of France is", "def add(a, b):", "日本の首都は", "🙂🙂"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == tokenizer.encode(prompt).ids
        assert output.text == tokenizer.decode(output.token_ids)
        assert len(output.choices) == 1
        assert output.usage.completion_tokens == len(output.token_ids)
    assert "Paris" in outputs[0].text
    assert_idle(llm)


def test_ids_and_text_alone_and_in_a_batch_give_the_same_answer(llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time", "1, 2, 3,"]
    together = llm.generate(prompts, GREEDY)
    ids = [llm.encode(prompt) for prompt in prompts]
    for output, prompt, given in zip(together, prompts, ids, strict=True):
        assert llm.generate(prompt, GREEDY)[0].token_ids == output.token_ids
        assert llm.generate(given, GREEDY)[0].text == output.text
    assert [o.token_ids for o in llm.generate(ids, GREEDY)] == [o.token_ids for o in together]
    assert llm.generate(np.array(ids[0]).tolist(), GREEDY)[0].prompt is None


def test_each_prompt_may_have_its_own_parameters(tiny: LLM) -> None:
    params = [SamplingParams(seed=count, max_tokens=count, ignore_eos=True) for count in (7, 1, 4)]
    outputs = tiny.generate([[1], [2, 3], [4]], params)
    assert [len(output.token_ids) for output in outputs] == [7, 1, 4]
    assert tiny.generate([], GREEDY) == []


def test_seeds_decide_whatever_else_is_in_the_batch(tiny: LLM) -> None:
    params = SamplingParams(seed=42, max_tokens=10, ignore_eos=True, top_p=0.9)
    alone = tiny.generate([5, 6, 7], params)[0].token_ids
    others = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (20, 3)]
    mixed = tiny.generate([[9] * 30, [5, 6, 7], [8]], [others[0], params, others[1]])
    assert mixed[1].token_ids == alone
    unseeded = SamplingParams(max_tokens=10, ignore_eos=True)  # two may well begin with EOS
    different = {tuple(tiny.generate([5, 6, 7], unseeded)[0].token_ids) for _ in range(4)}
    assert len(different) == 4


def test_n_answers_have_seeds_of_their_own(tiny: LLM) -> None:
    output = tiny.generate([1, 2], SamplingParams(n=4, seed=10, max_tokens=8, ignore_eos=True))[0]
    assert [choice.index for choice in output.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(output.choices):
        single = tiny.generate([1, 2], SamplingParams(seed=10 + index, max_tokens=8, ignore_eos=True))[0]
        assert single.token_ids == choice.token_ids
    assert output.usage.completion_tokens == 32
    unseeded = tiny.generate([1, 2], SamplingParams(n=4, max_tokens=8, ignore_eos=True))[0]
    assert len({tuple(choice.token_ids) for choice in unseeded.choices}) == 4


def test_the_context_is_the_bound_whatever_max_tokens_says(tiny: LLM) -> None:
    for max_tokens in (None, 62, 100_000):
        output = tiny.generate([1, 2, 3], SamplingParams(seed=1, ignore_eos=True, max_tokens=max_tokens))[0]
        assert len(output.token_ids) == 64 - 3
        assert output.finish_reason == "length"
    assert_idle(tiny)


def test_stop_strings_and_stop_tokens(llm: LLM) -> None:
    prompt = "1, 2, 3, 4,"
    plain = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24))[0]
    assert " 7, 8" in plain.text
    stopped = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24, stop=(" 7, 8",)))[0]
    assert stopped.text == plain.text[: plain.text.index(" 7, 8")]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " 7, 8")
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
    ids = llm.generate(llm.encode(prompt), SamplingParams(temperature=0.0, max_tokens=24, stop=(" 7, 8",)))[0]
    assert (ids.text, ids.stop_reason) == (stopped.text, " 7, 8")

    token = plain.token_ids[5]
    first = plain.token_ids.index(token)
    by_token = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(token,)))[0]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", token)
    assert by_token.token_ids == plain.token_ids[: first + 1]
    assert by_token.text == llm.decode(plain.token_ids[:first])
    assert_idle(llm)


def test_prompt_logprobs_agree_with_those_of_generating_the_same_tokens(llm: LLM) -> None:
    prompt = llm.encode("The capital of France is")
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    generated = llm.generate(prompt, params)[0]
    assert generated.logprobs is not None
    scored = llm.generate(
        prompt + generated.token_ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    )[0]
    assert scored.prompt_logprobs is not None
    assert [item.token_id for item in scored.prompt_logprobs] == prompt + generated.token_ids
    assert scored.prompt_logprobs[0].logprob is None
    for ours, theirs in zip(generated.logprobs, scored.prompt_logprobs[len(prompt) :], strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank) == (ours.top[0].token_id, 1)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-3)
        assert [item.token_id for item in ours.top] == [item.token_id for item in theirs.top]
    text = llm.generate("The capital of France is", params)[0]
    assert text.logprobs is not None
    assert "".join(item.text or "" for item in text.logprobs) == text.text
    assert [len(item.top) for item in text.logprobs] == [3] * 6


# --- chat, stream -----------------------------------------------------------------------------------------------------


def test_chat_renders_the_models_own_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Say hello."}]
    output, again = llm.chat([conversation, conversation], GREEDY)
    rendered = llm.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert rendered.endswith("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n")
    assert again.text == output.text == llm.chat(conversation, GREEDY)[0].text
    assert "<|im_end|>" not in output.text
    going_on = llm.chat([*conversation, {"role": "assistant", "content": "Hel"}], GREEDY, continue_final_message=True)
    assert llm.decode(going_on[0].prompt_token_ids, skip_special_tokens=False).endswith("assistant\nHel")
    assert "".join(part.text for part in llm.stream(conversation, GREEDY)) == output.text


def test_joined_stream_is_the_whole_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, n=2, logprobs=1)
    whole = llm.generate("My favourite emoji are", params)[0]
    parts = list(llm.stream("My favourite emoji are", params))
    for choice in whole.choices:
        mine = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert list(itertools.chain(*(part.token_ids for part in mine))) == choice.token_ids
        assert list(itertools.chain(*(part.logprobs for part in mine))) == choice.logprobs
        assert [part.finish_reason is None for part in mine] == [True] * (len(mine) - 1) + [False]
        assert mine[-1].usage is not None
        assert mine[-1].usage.completion_tokens == len(choice.token_ids)
    assert len(parts) > 30


def test_a_stream_that_is_closed_or_dropped_gives_its_kv_back(tiny: LLM) -> None:
    params = SamplingParams(ignore_eos=True)
    stream = tiny.stream([1, 2, 3], params, text=False)
    assert_idle(tiny)  # nothing runs before the first item is asked for
    next(stream)
    assert tiny.stats().running == 1
    stream.close()  # type: ignore[attr-defined]
    assert_idle(tiny)
    for _ in tiny.stream([1, 2, 3], params, text=False):
        break
    gc.collect()
    assert_idle(tiny)


def test_a_stream_that_is_collected_in_the_middle_of_a_step(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(ignore_eos=True)
    expected = tiny.generate([9], SamplingParams(temperature=0.0, max_tokens=9))[0].token_ids
    stream = tiny.stream([1, 2, 3], params, text=False)
    next(stream)
    (request_id,) = tiny._session._live
    pipeline = tiny._session.engine._pipeline  # type: ignore[attr-defined]
    schedule = pipeline._schedule
    told: list[int] = []

    def collected() -> Any:
        plan = schedule()
        if not told:
            stream.close()  # type: ignore[attr-defined]  # what the garbage collector does, at any allocation
            told.append(request_id in tiny._session._live)
        return plan

    monkeypatch.setattr(pipeline, "_schedule", collected)
    assert tiny.generate([9], SamplingParams(temperature=0.0, max_tokens=9))[0].token_ids == expected
    assert told == [True]  # the step that ran was left alone
    assert_idle(tiny)


def test_streams_may_be_interleaved_with_each_other_and_with_generate(tiny: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=15, ignore_eos=True) for seed in (1, 2, 3)]
    expected = [output.token_ids for output in tiny.generate([[1], [2], [3]], params)]
    one, two = (tiny.stream([i + 1], params[i], text=False) for i in (0, 1))
    got: list[list[int]] = [[], []]
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        got[0] += a.token_ids
        got[1] += b.token_ids
        if step == 4:
            assert tiny.generate([3], params[2])[0].token_ids == expected[2]
    assert got == expected[:2]


def test_threads_share_one_llm(tiny: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=25, ignore_eos=True) for seed in range(6)]
    expected = [tiny.generate([seed + 1], params[seed])[0].token_ids for seed in range(6)]
    got: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i: got.update({i: tiny.generate([i + 1], params[i])[0].token_ids}))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == expected
    assert_idle(tiny)


def test_ctrl_c_leaves_the_engine_clean(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = tiny.generate([7], SamplingParams(temperature=0.0, max_tokens=9))[0].token_ids
    for _ in range(5):
        stop = threading.Event()

        def press(stop: threading.Event = stop) -> None:
            while tiny._session.engine.stats().running == 0 and not stop.wait(0.001):
                pass
            os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        try:
            with pytest.raises(KeyboardInterrupt) as raised:
                tiny.generate([[token] * 20 for token in range(1, 120)], params)
            assert raised.value.__context__ is None, "told twice"
        finally:
            stop.set()
            presser.join()
        assert_idle(tiny)
        assert tiny.generate([7], SamplingParams(temperature=0.0, max_tokens=9))[0].token_ids == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_does_not_wait_for_the_steps_of_other_threads(tiny: LLM) -> None:
    held, interrupted = threading.Event(), threading.Event()

    def hold() -> None:
        with tiny._lock:
            held.set()
            assert interrupted.wait(30)

    def press() -> None:
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert held.wait(30)
        with pytest.raises(KeyboardInterrupt):
            tiny._step_unless(lambda: False, press)
        interrupted.set()
        holding.result()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[1], []], None, ["empty"]),
        ([1] * 64, None, ["64"]),
        ([5, 320], None, ["320", "319"]),
        ([5, -1], None, ["-1"]),
        ([5, 2**40], None, ["prompts", str(2**40)]),
        ([1], SamplingParams(logit_bias={999: 1.0}), ["logit_bias", "999", "320"]),
        ([1], SamplingParams(allowed_token_ids=(400,)), ["allowed_token_ids", "400", "320"]),
        (5, None, ["prompts", "5"]),
        ([[1], None], None, ["prompts[1]", "None"]),
        ([[1], [1.5]], None, ["prompts[1]", "1.5"]),
        ([[1], [True]], None, ["prompts[1]", "True"]),
        ([[1], [2]], [SamplingParams()], ["params", "2"]),
        ([1], {"temperature": 1}, ["params", "SamplingParams"]),
    ],
)
def test_a_bad_argument_is_a_value_error_that_names_it(tiny: LLM, prompts: Any, params: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        tiny.generate(prompts, params)
    for word in words:
        assert word in str(caught.value)
    assert_idle(tiny)


@pytest.mark.parametrize("messages", [[], "hi", [{"content": "x"}], [[]], [["x"]], [{"role": "user"}, 5]])
def test_bad_messages_are_value_errors(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        llm.chat(messages)


def test_roles_are_those_of_the_server(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    with pytest.raises(ValueError, match=r"messages must be one of system, developer, user, .*, got 'x'"):
        llm.chat([{"role": "user", "content": "hi"}, {"role": "x", "content": "hi"}], params)
    ids = [
        llm.chat([{"role": role, "content": "Be brief."}, {"role": "user", "content": "hi"}], params)[0]
        for role in ("system", "developer")
    ]
    assert ids[0].prompt_token_ids == ids[1].prompt_token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs", "0", "1"]),
        ({"dtype": "float8"}, ["dtype", "float8", "bfloat16"]),
        ({"kv_tokens": "many"}, ["kv_tokens", "many", "int"]),
        ({"max_model_length": 5}, ["max_model_length", "max_model_len"]),
        ({"gpu_memory_utilization": 90}, ["gpu_memory_utilization must be a number above 0 and at most 1, got 90"]),
        ({"kv_bytes": "much"}, ["kv_bytes must be a size such as 20GiB, got 'much'"]),
        ({"overlap": "yes"}, ["overlap must be true or false, got 'yes'"]),
        ({"chat_templte": "x"}, ["did you mean chat_template?"]),
        ({"quantization": "x"}, ["the options are device", "max_model_len", "chat_template", "progress"]),
        ({"chat_template": "nowhere.jinja"}, ["chat_template", "nowhere.jinja"]),
        # What only the engine can tell names options, not the server's flags.
        ({"max_model_len": 99999}, ["max_model_len 99999 must be between 1 and"]),
        ({"kv_tokens": 64, "max_model_len": 64, "kv_bytes": "1MiB"}, ["kv_tokens and kv_bytes both"]),
    ],
)
def test_a_bad_option_is_a_value_error_that_names_it(
    tiny_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        LLM(str(tiny_path), **options)
    for word in words:
        assert word in str(caught.value)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize("options", [{"max_model_len": 99999}, {"chat_template": "nowhere.jinja"}])
def test_asyncio_programs_are_told_the_same(tiny_path: Path, options: dict[str, Any]) -> None:
    told = []
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ValueError) as caught:
            kind(str(tiny_path), **options)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "--" not in told[0]


def test_a_model_that_is_not_there_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        LLM(str(tmp_path / "nowhere.gguf"))
    with pytest.raises(ValueError, match="smolm2"):
        LLM("smolm2")


def test_text_without_a_tokenizer_is_a_value_error(tiny: LLM) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tiny.generate("hello")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tiny.generate([1], SamplingParams(stop=("x",)))
    assert_idle(tiny)


def test_a_closed_llm_says_so(tiny_path: Path) -> None:
    with LLM(str(tiny_path), kv_tokens=256, threads=1) as llm:
        stream = llm.stream([1], SamplingParams(ignore_eos=True), text=False)
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    with pytest.raises(EngineError, match="closed"):
        llm.generate([1])
    llm.close()


# --- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(stream: io.StringIO, wanted: bool) -> list[RequestOutput]:
        monkeypatch.setattr(sys, "stderr", stream)
        with load_progress(wanted) as report:
            report("loading weights", 0.5)
        return tiny.generate([[1], [2]], SamplingParams(max_tokens=3, ignore_eos=True), progress=wanted)

    terminal, hidden, pipe = Terminal(), Terminal(), io.StringIO()
    generate(terminal, True)
    generate(hidden, False)
    generate(pipe, True)
    assert "loading weights" in terminal.getvalue()
    assert "prompts" in terminal.getvalue()
    assert hidden.getvalue() == pipe.getvalue() == ""
    with BatchProgress(0, True) as bar:
        bar.update([])
