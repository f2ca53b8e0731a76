"""The step loop of the engine process: messages in, steps, outputs out. Waits for nobody but the device.

When idle it is blocked in a poll, once the runner has done what it had put off. Sending never blocks either, so a
frontend or detokenizer that is stopped or slow changes nothing here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import assert_never

from engine_core.engine import Engine
from engine_core.usage import Host
from ipc.mailbox import Inbox, Outbox
from ipc.messages import Abort, EngineMessage, Generate, ListRequests, Profile, RequestList, Shutdown, StepOutput
from ipc.recorder.events import INTAKE, PUBLISH, WAIT

# What is taken in between two steps: a burst of long prompts must not hold up those who are decoding.
MESSAGES_PER_STEP = 64
MOST_LISTED = 256  # requests in an answer: making it takes half a microsecond for each
HEARTBEAT_BUSY_S = 0.2
HEARTBEAT_IDLE_S = 1.0


class EngineBroken(RuntimeError):
    """Step after step failed. Every request has had its end; the process has to be started anew."""


def run(
    engine: Engine,
    inbox: Inbox[EngineMessage],
    detokenizer: Outbox,
    frontends: Iterable[Outbox],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Serve until `Shutdown`; then every request that is left ends with an abort. Raises `EngineBroken`."""
    frontends = tuple(frontends)
    heartbeat = Heartbeat(engine, frontends, clock)
    recorder = engine.recorder
    stopping = False
    while not stopping or engine.has_work:
        engine.usage.doing(Host.INPUT)
        began = recorder.begin(INTAKE)
        messages = inbox.drain(MESSAGES_PER_STEP)
        for message in messages:
            match message:
                case Generate():
                    engine.add(message)
                case Abort():
                    engine.abort(message.request_ids, stop_string=message.stop_string)
                case Profile():
                    for frontend in frontends[message.frontend :][:1]:  # none, if the index is forged
                        frontend.send(engine.profile(message))
                case ListRequests():
                    answer = _request_list(engine, message)
                    for frontend in frontends[message.frontend :][:1]:  # none, if the index is forged
                        frontend.send(answer)
                case Shutdown():
                    stopping = True
                case _:
                    assert_never(message)
        recorder.end(INTAKE, began, 0, len(messages))
        if stopping:
            engine.abort_all()
        if engine.has_work:
            output = engine.step()
            began = recorder.begin(PUBLISH)
            publish(output, detokenizer)
            recorder.end(PUBLISH, began, output.step, len(output.token_ids) // 4)
        else:
            engine.usage.doing(Host.NOTHING)
            if not stopping and not engine.idle():
                began = recorder.begin(WAIT)
                inbox.wait(heartbeat.seconds_left)
                recorder.end(WAIT, began)
        heartbeat.beat_if_due()
        if engine.broken:
            raise EngineBroken(engine.broken)


def _request_list(engine: Engine, message: ListRequests) -> RequestList:
    requests = engine.requests(MOST_LISTED)
    return RequestList(question=message.question, total=engine.num_requests, requests=requests)


def publish(output: StepOutput, detokenizer: Outbox) -> None:
    """Send what a step produced, if anything: one that computed a part of a prompt has nothing to tell."""
    if output.request_ids or output.opened or output.finished:
        detokenizer.send(output)


class Heartbeat:
    """Tells the frontends how the engine is doing: while this is on its way, steps are being made."""

    def __init__(self, engine: Engine, frontends: tuple[Outbox, ...], clock: Callable[[], float]) -> None:
        self._engine, self._frontends, self._clock = engine, frontends, clock
        self._last = float("-inf")
        self._was_busy = False

    @property
    def seconds_left(self) -> float:
        """Until the next beat, if the engine stays as it is."""
        interval = HEARTBEAT_BUSY_S if self._engine.has_work else HEARTBEAT_IDLE_S
        return max(0.0, self._last + interval - self._clock())

    def beat_if_due(self) -> None:
        busy = self._engine.has_work
        # The last beat before a rest must not leave stale counts of running requests behind for a second.
        if self.seconds_left > 0.0 and not (self._was_busy and not busy):
            return
        self._last, self._was_busy = self._clock(), busy
        stats = self._engine.stats()
        for frontend in self._frontends:
            frontend.send(stats)
