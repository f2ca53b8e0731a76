from __future__ import annotations

import logging
import os
import pickle
import random
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from ipc.channel import AddressInUse, Receiver, Sender, connect, frontend_key, tokenizer_key
from ipc.codec import encode, pack_prompt
from ipc.config import Endpoints
from ipc.mailbox import MessageTooLarge
from ipc.messages import (
    Abort,
    Deltas,
    DetokenizerMessage,
    EngineMessage,
    FrontendMessage,
    Shutdown,
    StartFailed,
    StepOutput,
    Submit,
    SupervisorMessage,
    TextPrompt,
    TokenizerMessage,
)
from ipc.sampling import SamplingParams

DEADLINE_S = 60.0
SUBMIT = Submit(request_ids=[1], frontend=0, prompt=pack_prompt(TextPrompt("hi")), sampling=SamplingParams(), arrival=1)


def receive(receiver: Receiver[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        assert receiver.wait(DEADLINE_S), f"only {len(messages)} of {count} messages came"
        messages += receiver.drain()
    return messages


@pytest.fixture
def address(short_dir: Path) -> str:
    return f"ipc://{short_dir}/inbox.sock"


@pytest.fixture
def raw(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer that sends what it likes."""
    peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    with peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(address)
        yield peer


def test_messages_arrive_in_order_from_senders_that_came_first(address: str) -> None:
    with Sender(address) as early:
        for i in range(3000):  # more than ZeroMQ's default queue of 1000
            early.send(Abort(request_ids=[i]))
        with Receiver[Any](address, EngineMessage) as receiver:
            assert [message.request_ids[0] for message in receive(receiver, 3000)] == list(range(3000))
            assert receiver.drain() == []
            assert not receiver.wait(0.0)


def test_drain_takes_no_more_than_its_limit(address: str) -> None:
    with Receiver[Any](address, EngineMessage) as receiver, Sender(address) as sender:
        for i in range(10):
            sender.send(Abort(request_ids=[i]))
        got: list[int] = []
        while len(got) < 10:
            assert receiver.wait(DEADLINE_S)
            batch = receiver.drain(3)
            assert len(batch) <= 3
            got += [message.request_ids[0] for message in batch]
        assert got == list(range(10))


def test_post_wakes_a_waiting_thread_and_keeps_order(address: str) -> None:
    with Receiver[Any](address, EngineMessage) as receiver:
        timer = threading.Timer(0.05, lambda: list(map(receiver.post, (Abort(request_ids=[1]), Shutdown()))))
        timer.start()
        assert receive(receiver, 2) == [Abort(request_ids=[1]), Shutdown()]
        timer.join()
        receiver.post(Shutdown())
        receiver.post(Shutdown())
        assert len(receiver.drain(1)) == 1
        assert receiver.wait(0.0)
        assert len(receiver.drain(1)) == 1


@pytest.mark.parametrize(
    ("union", "sample"),
    [
        (TokenizerMessage, SUBMIT),
        (EngineMessage, Abort(request_ids=[1, 2, 3])),
        (DetokenizerMessage, StepOutput(step=1, request_ids=b"12345678", token_ids=b"1234")),
        (FrontendMessage, Deltas(request_ids=b"12345678", num_tokens=[1], texts=["a"])),
        (SupervisorMessage, StartFailed(name="x", message="y")),
    ],
    ids=["tokenizer", "engine", "detokenizer", "frontend", "supervisor"],
)  # fmt: skip
def test_hostile_frames_are_dropped_on_every_inbox(
    union: Any,
    sample: Any,
    address: str,
    raw: zmq.Socket[bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ipc.channel._DROP_LOG_INTERVAL_S", 3600.0)  # longer than any machine takes for this
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    trap = tmp_path / "pickle-was-run"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(trap),)

    valid = encode(sample)
    junk = [pickle.dumps(Bomb(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    junk += [b"", b"\xc1", b"{}", b"\x91" * 200_000]  # the last: deep nesting
    junk += [kind + b"\xff\xff\xff\xff" for kind in (b"\xdd", b"\xdf", b"\xc6")]  # arrays, maps, bytes of 4 GiB
    junk += [encode(Abort(request_ids=[]) if union is SupervisorMessage else StartFailed(name="", message=""))]
    always_bad = len(junk)
    junk += [rng.randbytes(rng.randrange(1, 200)) for _ in range(300)]
    for _ in range(300):
        mutated = bytearray(valid)
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        junk.append(bytes(mutated))
    with Receiver[Any](address, union) as receiver, caplog.at_level(logging.WARNING):
        for frame in junk:
            raw.send(frame)
        raw.send_multipart([b"junk", b"\xc0", valid])
        raw.send(encode(sample))
        last: list[Any] = []
        while len(last) + receiver.dropped < len(junk) + 4:
            assert receiver.wait(DEADLINE_S)
            last += receiver.drain()
        assert last[-2:] == [sample, sample]
        assert receiver.dropped >= always_bad
    assert not trap.exists()
    assert len([record for record in caplog.records if "malformed" in record.message]) == 1  # rate-limited


def test_an_oversized_frame_is_cut_off_and_others_go_on(address: str, raw: zmq.Socket[bytes]) -> None:
    with (
        Receiver[Any](address, EngineMessage, max_bytes=10_000) as receiver,
        Sender(address, max_bytes=10_000) as sender,
    ):
        raw.send(b"\0" * 1_000_000)
        sender.send(Abort(request_ids=[1]))
        assert receive(receiver, 1) == [Abort(request_ids=[1])]
        assert receiver.dropped == 0  # it never got as far as us
        with pytest.raises(MessageTooLarge, match="limit is 10000"):
            sender.send(Abort(request_ids=[2**40] * 5000))
        sender.send(Abort(request_ids=[2]))
        assert receive(receiver, 1) == [Abort(request_ids=[2])]


def test_a_live_path_is_refused_and_a_stale_one_taken_over(address: str, short_dir: Path) -> None:
    with Receiver[Any](address, EngineMessage) as first, Sender(address) as sender:
        with pytest.raises(AddressInUse, match="in use"):
            Receiver[Any](address, EngineMessage)
        sender.send(Shutdown())
        assert receive(first, 1) == [Shutdown()]  # and the first was not disturbed
    path = short_dir / "inbox.sock"
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with Receiver[Any](address, EngineMessage) as second, Sender(address) as sender:
        sender.send(Shutdown())
        assert receive(second, 1) == [Shutdown()]


def test_the_socket_file_is_for_this_user_alone_and_removed(address: str, short_dir: Path) -> None:
    receiver = Receiver[Any](address, EngineMessage)
    assert stat.S_IMODE((short_dir / "inbox.sock").stat().st_mode) == 0o600
    receiver.close()
    receiver.close()
    assert list(short_dir.iterdir()) == []


@pytest.mark.parametrize("bad", ["tcp://0.0.0.0:1", "ipc://relative", "ipc:///" + "x" * 200, ""])
def test_only_short_absolute_ipc_paths(bad: str) -> None:
    with pytest.raises(ValueError):
        Receiver[Any](bad, EngineMessage)
    with pytest.raises(ValueError):
        Sender(bad)


def test_send_does_not_block_when_nobody_listens(address: str) -> None:
    with Sender(address) as sender:
        for _ in range(20_000):
            sender.send(Shutdown())


def test_a_sender_finds_a_receiver_that_comes_back(address: str) -> None:
    with Sender(address) as sender:
        for i in range(3):
            with Receiver[Any](address, EngineMessage) as receiver:
                got: list[Any] = []
                while not got:  # what was on its way to the one that went is lost
                    sender.send(Abort(request_ids=[i]))
                    receiver.wait(0.1)
                    got = receiver.drain()
                assert got


def test_connect_names_every_outbox(short_dir: Path) -> None:
    ends = Endpoints(
        supervisor=f"ipc://{short_dir}/s",
        tokenizers=(f"ipc://{short_dir}/t",),
        engine=f"ipc://{short_dir}/e",
        detokenizers=(f"ipc://{short_dir}/d",),
        frontends=(f"ipc://{short_dir}/f0", f"ipc://{short_dir}/f1"),
    )
    outboxes = connect(ends, "engine", "tokenizers", "frontends")
    assert {name: outbox.address for name, outbox in outboxes.items()} == {
        "engine": ends.engine,
        tokenizer_key(0): ends.tokenizers[0],
        frontend_key(0): ends.frontends[0],
        frontend_key(1): ends.frontends[1],
    }
    for outbox in outboxes.values():
        outbox.close()


def test_what_the_engine_imports_of_ipc_brings_no_asyncio() -> None:
    code = (
        "import sys, ipc.actor, ipc.channel, ipc.codec, ipc.runtime;"
        "bad = {'asyncio', 'uvloop', 'torch', 'multiprocessing'} & sys.modules.keys(); sys.exit(str(bad) if bad else 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_last_words_are_delivered_by_flush(address: str) -> None:
    code = (
        "import sys; from ipc.channel import Sender, flush; from ipc.messages import Abort; s = Sender(sys.argv[1])\n"
        "for i in range(2000): s.send(Abort(request_ids=[i]))\n"
        "flush(30.0); import os; os._exit(0)"
    )
    root = Path(__file__).parents[2]
    with Receiver[Any](address, EngineMessage) as receiver:
        with subprocess.Popen([sys.executable, "-c", code, address], cwd=root) as child:
            assert len(receive(receiver, 2000)) == 2000
        assert child.returncode == 0
