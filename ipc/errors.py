"""Errors that are for the user, not for a developer."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can put right. The message says what is wrong and what to do; shown without a traceback."""
