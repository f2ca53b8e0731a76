"""The other frontends of this server, and the one thing they tell each other: what each of them counts.

Any of them may be asked for /metrics, and a client cannot choose which: each answers for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from frontend.metrics import Metrics
from ipc.mailbox import Outbox
from ipc.messages import AskMetrics, MetricsText

PATIENCE_S = 0.25  # for one that is busy or stopped; its counts are then those it told last


class Siblings:
    """`outboxes` by frontend index, this one's own left out."""

    def __init__(self, index: int, outboxes: Mapping[int, Outbox], metrics: Metrics) -> None:
        self._index = index
        self._outboxes = dict(outboxes)
        self._metrics = metrics
        self._texts: dict[int, bytes] = {}
        self._answered = dict.fromkeys(self._outboxes, 0)  # the latest question that each has answered
        self._questions = 0
        self._news = asyncio.Event()

    async def metrics_text(self) -> bytes:
        """Prometheus' text format for the whole server."""
        if self._outboxes:
            self._questions += 1
            question = AskMetrics(question=self._questions, frontend=self._index)
            for outbox in self._outboxes.values():
                outbox.send(question)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    while min(self._answered.values()) < question.question:
                        self._news.clear()
                        await self._news.wait()
        return self._metrics.render(self._texts.values())

    def deliver(self, message: AskMetrics | MetricsText) -> None:
        outbox = self._outboxes.get(message.frontend)
        if outbox is None:  # forged
            return
        if isinstance(message, AskMetrics):
            outbox.send(MetricsText(question=message.question, frontend=self._index, text=self._metrics.own()))
        else:
            self._texts[message.frontend] = message.text
            self._answered[message.frontend] = message.question
            self._news.set()
