"""Inbox and outbox over ZeroMQ ipc:// sockets: PULL binds, any number of PUSH connect.

Every inbox is a socket file in the run's 0700 directory. Nothing that arrives there can raise in the process that
reads it: a frame that is no message of the inbox's union is counted, logged at a bounded rate and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from ipc.codec import MAX_MESSAGE_BYTES, encode, make_decoder
from ipc.config import Endpoints
from ipc.mailbox import MessageTooLarge

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PREFIX = "ipc://"
_MAX_PATH = 107  # sockaddr_un holds 108 bytes, one of them the terminator
_DROP_LOG_INTERVAL_S = 10.0
_LINGER_MS = 1000
_RECONNECT_MS, _RECONNECT_MAX_MS = 5, 20  # the first request waits for the last of these


class AddressInUse(OSError):
    """Another process is listening on this socket file."""


class Receiver(Generic[T]):
    """The one inbox of a process. Use from one thread; only `post` may be called from others.

    Raises `AddressInUse` if someone listens there (ZeroMQ alone would silently take over the path), ValueError if the
    address is no ipc:// path that fits into a socket address.
    """

    def __init__(self, address: str, union_type: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.address = address
        self.dropped = 0  # frames that were no message
        self._path = _socket_path(address)
        self._decoder = make_decoder(union_type)
        self._posted: deque[T] = deque()
        self._next_drop_log = 0.0
        _refuse_live(self._path)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        # With a bound, ZeroMQ loses what a peer wrote just before it closed whenever the queue is full at that moment.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)  # beyond it ZeroMQ cuts the peer off without reading on
        try:
            self._socket.bind(address)
            self._path.chmod(0o600)
        except BaseException:
            self._release()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def drain(self, limit: int = 1024) -> list[T]:
        messages: list[T] = []
        if self._posted:
            self._take_posted(messages, limit)
        receive, decode = self._socket.recv, self._decoder.decode
        for _ in range(limit - len(messages)):
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(decode(frame))
            except Exception as error:  # hostile bytes may fail in any way, RecursionError included
                self._drop(frame, error)
        return messages

    def wait(self, timeout_s: float | None = None) -> bool:
        """Also returns True when a signal came in (see `wake_fd`) or a watched descriptor is ready."""
        if self._posted:
            return True
        ready = self._poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))
        if any(source == self._wake_read for source, _ in ready):
            self.clear_wake()
        return bool(ready)

    def post(self, message: T) -> None:
        self._posted.append(message)
        self.wake()

    def wake(self) -> None:
        """Make a `wait` in another thread return."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"\0")

    def clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def watch(self, fd: int) -> None:
        """Let `wait` return also when `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)

    @property
    def wake_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a signal that comes just before `wait` blocks must still wake it."""
        return self._wake_write

    @property
    def fds(self) -> tuple[int, int]:
        """For a foreign event loop: the socket's descriptor (ready: `drain` until it returns nothing) and the one that
        `post` and `wake` make ready (ready: `clear_wake`, then `drain`)."""
        return int(self._socket.getsockopt(zmq.FD)), self._wake_read

    def close(self) -> None:
        """Stop listening and remove the socket file. Idempotent."""
        if not self._socket.closed:
            self._release()
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Receiver[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_posted(self, messages: list[T], limit: int) -> None:
        self.clear_wake()
        while self._posted and len(messages) < limit:
            messages.append(self._posted.popleft())

    def _drop(self, frame: bytes, error: Exception) -> None:
        self.dropped += 1
        now = time.monotonic()
        if now >= self._next_drop_log:
            self._next_drop_log = now + _DROP_LOG_INTERVAL_S
            logger.warning(
                "dropped a malformed frame of %d bytes (%s: %.200s); %d so far",
                len(frame), type(error).__name__, error, self.dropped,
            )  # fmt: skip

    def _release(self) -> None:
        self._socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


class Sender:
    """An outbox to the inbox at `address`, which need not exist yet. Use from one thread.

    `send` never blocks: the queue has no high-water mark, because work is bounded where it is admitted.
    """

    def __init__(self, address: str, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        _socket_path(address)
        self.address = address
        self._max_bytes = max_bytes
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)  # also when it is closed by the garbage collector
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        """Raises `MessageTooLarge` (the receiver would cut us off), and what `encode` raises."""
        self.send_encoded(self.encode(message))

    def encode(self, message: msgspec.Struct) -> bytes:
        """What `send` would send; raises what it raises."""
        data = encode(message)
        if len(data) > self._max_bytes:
            raise MessageTooLarge(f"{type(message).__name__} has {len(data)} bytes, the limit is {self._max_bytes}")
        return data

    def send_encoded(self, data: bytes) -> None:
        self._socket.send(data, zmq.NOBLOCK)

    def close(self, linger_s: float = _LINGER_MS / 1000) -> None:
        """Close; ZeroMQ has `linger_s` to deliver what is queued. Does not wait (see `flush`). Idempotent."""
        if not self._socket.closed:
            self._socket.close(linger=round(linger_s * 1000))

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Broadcast:
    """An outbox to several inboxes, where every message goes to all: it is encoded once."""

    def __init__(self, senders: Iterable[Sender]) -> None:
        self._senders = tuple(senders)

    def send(self, message: msgspec.Struct) -> None:
        """Raises what `Sender.send` raises, then nobody got it."""
        if self._senders:
            data = self._senders[0].encode(message)
            for sender in self._senders:
                sender.send_encoded(data)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


def frontend_key(index: int) -> str:
    """Name of a frontend's outbox in `connect`."""
    return f"frontend.{index}"


def tokenizer_key(index: int) -> str:
    return f"tokenizer.{index}"


def connect(endpoints: Endpoints, *names: str) -> dict[str, Sender]:
    """Senders by name: "supervisor", "engine"; of "frontends", "tokenizers" and "detokenizers" all, as "frontend.0"."""
    senders: dict[str, Sender] = {}
    for name in names:
        address = getattr(endpoints, name)
        if isinstance(address, str):
            senders[name] = Sender(address)
        else:
            senders |= {f"{name[:-1]}.{i}": Sender(each) for i, each in enumerate(address)}
    return senders


def flush(timeout_s: float = 1.0) -> None:
    """Close every channel of this process and wait until what was sent is delivered, at most `timeout_s`. The last
    thing a process does; without it the messages still queued vanish with the process."""
    zmq.Context.instance().destroy(linger=round(timeout_s * 1000))


def _socket_path(address: str) -> Path:
    path = address.removeprefix(_PREFIX)
    if path == address or not path.startswith("/"):
        raise ValueError(f"not an ipc:///absolute/path address: {address!r}")
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ValueError(f"socket path longer than {_MAX_PATH} bytes: {path}")
    return Path(path)


def _refuse_live(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full: someone listens
            pass
        except OSError:
            return  # no file, or a socket file whose owner is gone
    raise AddressInUse(f"{path} is in use by another process")
