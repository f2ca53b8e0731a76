"""/v1/chat/completions and /v1/completions in raw ASGI: the hot path of the server."""

from __future__ import annotations

from functools import partial

from frontend.backend import Backend
from frontend.errors import from_error
from frontend.handle import Event, Handle
from frontend.http import CONNECTION, Connection, HeaderList, Receive, Scope, Send, respond, watching
from frontend.openai.answer import Choice, Identity, body, failure
from frontend.openai.job import Job
from frontend.stream import HEADERS, Chunks, DirectText, error_events
from ipc.messages import Error
from ipc.recorder.events import NAMED, WRITE, name_words

_JSON = (b"content-type", b"application/json")


class Generator:
    """Answers one `Job` over one connection."""

    def __init__(self, backend: Backend, model: str) -> None:
        self._backend = backend
        self._recorder = backend.recorder
        self._model = model

    async def answer(self, job: Job, scope: Scope, receive: Receive, send: Send) -> int | None:
        """The HTTP status sent, None if the client went away first. Raises `ApiError` before anything is sent."""
        identity = Identity.new(job, self._model)
        handle = self._backend.submit(job)
        self._recorder.mark(NAMED, handle.first_id, *name_words(identity.id), job.num_choices)
        connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
        if connection is not None:
            handle.on_overflow = connection.cut
        cancel = partial(self._backend.cancel, handle)
        try:
            async with watching(scope, receive, cancel):
                if job.stream:
                    return await self._stream(job, identity, handle, send, connection)
                return await self._whole(job, identity, handle, send)
        finally:
            cancel()  # whatever went wrong, nothing is left running

    async def _whole(self, job: Job, identity: Identity, handle: Handle, send: Send) -> int | None:
        choices = [Choice() for _ in range(job.num_choices)]
        unfinished = job.num_choices
        while unfinished:
            events = await handle.next()
            if not events:
                return None
            for event in events:
                if (error := failure(event)) is not None:
                    raise from_error(error)
                choices[event.choice].add(event)
                unfinished -= event.detail is not None and event.detail.ended is not None
        began = self._recorder.begin(WRITE)
        data = body(job, identity, choices)
        await respond(send, 200, [_JSON, _request_id(identity)], data)
        self._recorder.end(WRITE, began, handle.first_id, len(data), 1)
        return 200

    async def _stream(
        self, job: Job, identity: Identity, handle: Handle, send: Send, connection: Connection | None
    ) -> int | None:
        chunks = Chunks(job, identity)
        started = False
        while True:
            events = await handle.next()
            if not events:
                return 200 if started else None
            began = self._recorder.begin(WRITE)
            failed_at, error = first_failure(events)
            if not started:
                # Headers wait for the first event, so that a refusal by the tokenizer or the engine is a real 4xx.
                if error is not None:
                    raise from_error(error)
                started = True
                headers: HeaderList = [*HEADERS, _request_id(identity)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                if connection is not None:
                    handle.begin(DirectText(chunks, connection))
            data = chunks.render(events[:failed_at])
            if error is not None:
                data += error_events(error)
            more = error is None and not chunks.finished
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})
            self._recorder.end(WRITE, began, handle.first_id, len(data), len(events))
            if not more:
                return 200


def first_failure(events: list[Event]) -> tuple[int, Error | None]:
    """Where in `events` the whole HTTP request fails, and why; their length and None if it does not."""
    for at, event in enumerate(events):
        if (error := failure(event)) is not None:
            return at, error
    return len(events), None


def _request_id(identity: Identity) -> tuple[bytes, bytes]:
    return (b"x-request-id", identity.id.encode())
