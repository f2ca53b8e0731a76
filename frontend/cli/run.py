"""`gapless run [MODEL] PROMPT`: one answer, streamed to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from frontend.cli.models import ALIASES
from frontend.cli.params import GroupedCommand, option_params, settings_keys
from frontend.cli.settings import load

KEYS = [*settings_keys("answer", "engine", "text", "program"), "api_key"]


def split_words(words: Sequence[str]) -> tuple[str | None, str | None]:
    """(model, prompt) of the command's words. One word alone is the prompt unless it can only be a model."""
    match words:
        case []:
            return None, None
        case [word]:
            return (word, None) if _is_model(word) else (None, word)
        case [model, prompt]:
            return model, prompt
    raise click.UsageError(f"expected [MODEL] PROMPT, got {len(words)} words; put the prompt in quotes")


def _is_model(word: str) -> bool:
    return word.lower() in ALIASES or word.endswith(".gguf") or (Path(word).expanduser() / "config.json").is_file()


def piped_text() -> str:
    """What is piped in; empty if standard input is a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


def _run(words: Sequence[str], **flags: Any) -> None:
    model, prompt = split_words(words)
    settings = load({**flags, "model": model})
    text = "\n\n".join(part for part in (prompt, piped_text().strip("\n")) if part)
    if not text:
        raise click.UsageError('no prompt: give it in quotes or pipe it in, e.g. gapless run "Why is the sky blue?"')
    from frontend.cli.client import ChatMessage
    from frontend.cli.launch import client_for
    from frontend.cli.terminal import note_cut_off, print_answer

    messages = [ChatMessage("system", settings.answer.system)] if settings.answer.system else []
    messages.append(ChatMessage("user", text))
    with client_for(settings, model) as client:
        print_answer(client.stream_chat(messages, settings.answer))
        if client.cut_off:
            note_cut_off()


COMMAND = GroupedCommand(
    "run",
    params=[click.Argument(["words"], nargs=-1, metavar="[MODEL] PROMPT"), *option_params(KEYS)],
    callback=_run,
    help="Answer PROMPT; what is piped in is added. Starts the model for this answer, or asks the server at --url.",
)
