"""The requests in the engine, asked for now and then: at most one question is on its way, however many want to know."""

from __future__ import annotations

import asyncio
import time

from ipc.mailbox import Outbox
from ipc.messages import ListRequests, RequestList

PATIENCE_S = 1.0
FRESH_S = 0.25  # an answer this young is given again: nobody can make the engine count all the time


class RequestWatch:
    """One event loop."""

    def __init__(self, frontend: int, engine: Outbox) -> None:
        self._frontend, self._engine = frontend, engine
        self._questions = 0
        self._asked_at = float("-inf")
        self._answer: asyncio.Future[RequestList] | None = None

    async def ask(self) -> RequestList | None:
        """None if the engine does not answer in time."""
        now = time.monotonic()
        if self._answer is None or now - self._asked_at > (FRESH_S if self._answer.done() else PATIENCE_S):
            self._questions = (self._questions + 1) % 2**31
            self._asked_at = now
            self._answer = asyncio.get_running_loop().create_future()
            self._engine.send(ListRequests(question=self._questions, frontend=self._frontend))
        try:
            return await asyncio.wait_for(asyncio.shield(self._answer), PATIENCE_S)
        except TimeoutError:
            return None

    def deliver(self, message: RequestList) -> None:
        if message.question == self._questions and self._answer is not None and not self._answer.done():
            self._answer.set_result(message)
