"""The in-memory channel behaves as the real one does; both are put through the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from ipc.channel import Receiver, Sender
from ipc.mailbox import Inbox, Outbox
from ipc.memory import MemoryChannel
from ipc.messages import Abort, EngineMessage, ProcessLost, Shutdown, StepOutput

DEADLINE_S = 60.0


@dataclass
class Ends:
    inbox: Any
    outbox: Outbox
    send_raw: Callable[[bytes], None]


@pytest.fixture(params=["memory", "zeromq"])
def ends(request: pytest.FixtureRequest, short_dir: Path) -> Iterator[Ends]:
    if request.param == "memory":
        channel: MemoryChannel[Any] = MemoryChannel(EngineMessage)
        yield Ends(channel, channel, channel.send_bytes)
        return
    address = f"ipc://{short_dir}/x"
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    with Receiver[Any](address, EngineMessage) as inbox, Sender(address) as outbox, raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(address)
        yield Ends(inbox, outbox, raw.send)


def take(inbox: Inbox[Any], count: int) -> list[Any]:
    got: list[Any] = []
    while len(got) < count:
        assert inbox.wait(DEADLINE_S)
        got += inbox.drain()
    return got


def test_order_and_equality(ends: Ends) -> None:
    sent = [Abort(request_ids=[i, 2**63 - 1], stop_string=bool(i % 2)) for i in range(100)]
    for message in sent:
        ends.outbox.send(message)
    assert take(ends.inbox, 100) == sent
    assert ends.inbox.drain() == []
    assert not ends.inbox.wait(0.0)


def test_limit(ends: Ends) -> None:
    for i in range(5):
        ends.outbox.send(Abort(request_ids=[i]))
    got: list[Any] = []
    while len(got) < 5:
        assert ends.inbox.wait(DEADLINE_S)
        batch = ends.inbox.drain(2)
        assert len(batch) <= 2
        got += batch
    assert [message.request_ids for message in got] == [[i] for i in range(5)]


def test_foreign_messages_and_junk_are_counted(ends: Ends) -> None:
    ends.outbox.send(StepOutput(step=1))
    ends.outbox.send(Shutdown())
    assert take(ends.inbox, 1) == [Shutdown()]
    ends.send_raw(b"\xc1")
    ends.send_raw(b"")
    while ends.inbox.dropped < 3:
        assert ends.inbox.drain() == []
        ends.inbox.wait(0.1)
    assert ends.inbox.dropped == 3


def test_post_from_another_thread_wakes(ends: Ends) -> None:
    timer = threading.Timer(0.05, ends.inbox.post, [Shutdown()])
    timer.start()
    assert take(ends.inbox, 1) == [Shutdown()]
    timer.join()


def test_an_unencodable_message_raises_in_the_sender(ends: Ends) -> None:
    with pytest.raises(OverflowError):
        ends.outbox.send(Abort(request_ids=[2**70]))
    with pytest.raises(ValueError):
        ends.outbox.send(ProcessLost(name="\ud800", detail=""))
