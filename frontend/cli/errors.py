"""Errors that end a command with a message and no traceback."""

from __future__ import annotations

from ipc.errors import UserError


class CliError(UserError):
    """The command cannot go on, for a reason the user can act on."""

    exit_code = 1


class SettingsError(CliError):
    """A setting is unknown or out of bounds. The message names the key, the value, the bound and where it came from."""

    exit_code = 2


class ModelError(CliError):
    """The model cannot be used; the message says what to do about it."""
