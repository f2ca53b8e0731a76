from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ipc.actor import Envelope, run
from ipc.channel import Receiver
from ipc.memory import MemoryChannel
from ipc.messages import Abort, EngineMessage, Message, Shutdown


class Doubler:
    """Answers each Abort with twice its ids, to the outbox named by the first id."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def handle(self, batch: list[Abort]) -> Iterable[Envelope]:
        self.batches.append(len(batch))
        for message in batch:
            reply: Message = Abort(request_ids=[2 * i for i in message.request_ids])
            yield f"to.{message.request_ids[0]}", reply


def test_batches_in_answers_out_until_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    inbox: MemoryChannel[Any] = MemoryChannel(EngineMessage)
    outbox: MemoryChannel[Any] = MemoryChannel(EngineMessage)
    for ids in ([1], [1, 5], [9]):
        inbox.send(Abort(request_ids=ids))
    inbox.send(Shutdown())
    inbox.send(Abort(request_ids=[1, 7]))  # came with the Shutdown: still handled
    actor = Doubler()
    run(actor, inbox, {"to.1": outbox})
    assert [message.request_ids for message in outbox.drain()] == [[2], [2, 10], [2, 14]]
    assert actor.batches == [4]
    assert "unknown outbox 'to.9'" in caplog.text


def test_an_exception_in_the_actor_is_not_swallowed() -> None:
    class Broken:
        def handle(self, batch: list[Any]) -> Iterable[Envelope]:
            raise ZeroDivisionError

    inbox: MemoryChannel[Any] = MemoryChannel(EngineMessage)
    inbox.send(Abort(request_ids=[1]))
    with pytest.raises(ZeroDivisionError):
        run(Broken(), inbox, {})


def test_sigterm_ends_an_idle_loop_and_the_handler_is_put_back(short_dir: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Receiver[Any](f"ipc://{short_dir}/x", EngineMessage) as inbox:
        # Sent once the loop has its handler: before that, SIGTERM would end the test run.
        sender = threading.Thread(target=_send_when_handled, args=[before])
        sender.start()
        run(Doubler(), inbox, {})
        sender.join()
    assert signal.getsignal(signal.SIGTERM) is before


def _send_when_handled(before: Any) -> None:
    while signal.getsignal(signal.SIGTERM) is before:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def test_idle_is_blocked_not_spinning(short_dir: Path) -> None:
    with Receiver[Any](f"ipc://{short_dir}/x", EngineMessage) as inbox:
        loop = threading.Thread(target=run, args=[Doubler(), inbox, {}])
        loop.start()
        assert loop.native_id is not None
        status = Path(f"/proc/{os.getpid()}/task/{loop.native_id}/status")

        def switches() -> int:
            return sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches" in line)

        end = threading.Event()
        previous = -1
        while (now := switches()) != previous:  # until it has come to rest
            previous = now
            end.wait(0.2)
        cpu = psutil.Process().threads()
        used = next(thread.user_time + thread.system_time for thread in cpu if thread.id == loop.native_id)
        assert used < 1.0
        inbox.post(Shutdown())
        loop.join()
