"""The error whose message is meant for the person who started the engine, under the library's own name."""

from __future__ import annotations

from ipc.errors import UserError

__all__ = ["UserError"]
