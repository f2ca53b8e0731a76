"""The one error whose message is meant for the person who started the engine."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can put right: the message names the file or flag, what is wrong with it and the way out.

    Shown as it is, without a traceback.
    """
