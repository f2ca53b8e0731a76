"""`gapless chat [MODEL]`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from frontend.cli.client import ChatMessage, Client, ServerError
from frontend.cli.params import GroupedCommand, model_argument, option_params
from frontend.cli.run import KEYS
from frontend.cli.settings import AnswerOptions, load
from frontend.cli.terminal import Stopped, note_cut_off, print_answer

HELP = """\
Enter sends, Alt+Enter starts a new line, Up brings back what you wrote before.
Ctrl-C stops the answer; at the prompt it clears the line. Ctrl-D leaves.
  /new            forget the conversation
  /system [TEXT]  set the system message; without TEXT, show it
  /retry          answer the last message again
  /help           this
  /exit           leave"""

ReadLine = Callable[[], str]  # raises EOFError at the end, KeyboardInterrupt on Ctrl-C


class Conversation:
    """The messages so far. A turn that brought no answer leaves no trace."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[ChatMessage] = []

    def messages(self, text: str) -> list[ChatMessage]:
        """What to send for a new message of the user."""
        start = [ChatMessage("system", self.system)] if self.system else []
        return [*start, *self.turns, ChatMessage("user", text)]

    def add(self, text: str, answer: str) -> None:
        if answer:
            self.turns += [ChatMessage("user", text), ChatMessage("assistant", answer)]

    def drop_last(self) -> str | None:
        """Remove the last exchange; returns what the user had said."""
        if not self.turns:
            return None
        text = self.turns[-2].content
        del self.turns[-2:]
        return text


class Chat:
    """The loop: read, command or question, answer."""

    def __init__(self, client: Client, options: AnswerOptions, read: ReadLine) -> None:
        self._client, self._options, self._read = client, options, read
        self.conversation = Conversation(options.system)

    def run(self) -> None:
        while True:
            try:
                text = self._read().strip()
                if text.startswith("/"):
                    if not self._command(text):
                        return
                elif text:
                    self._answer(text)
            except EOFError:
                return
            except KeyboardInterrupt:
                click.echo("(Ctrl-D or /exit leaves)", err=True)

    def _command(self, text: str) -> bool:
        """False: leave."""
        name, _, rest = text.partition(" ")
        match name:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help":
                click.echo(HELP)
            case "/new":
                self.conversation.turns.clear()
                click.echo("(a new conversation)")
            case "/system":
                if rest.strip():
                    self.conversation.system = rest.strip()
                click.echo(f"(system: {self.conversation.system or 'none'})")
            case "/retry":
                last = self.conversation.drop_last()
                if last is None:
                    click.echo("(nothing to answer again)")
                else:
                    self._answer(last)
            case _:
                click.echo(f"(no command {name}; /help lists them)")
        return True

    def _answer(self, text: str) -> None:
        try:
            answer = print_answer(self._client.stream_chat(self.conversation.messages(text), self._options))
            if self._client.cut_off:
                note_cut_off()
        except Stopped as stop:
            answer = stop.text
            click.echo("(stopped)", err=True)
        except ServerError as error:
            click.echo(f"error: {error}", err=True)
            return
        self.conversation.add(text, answer)


def history_path() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "gapless" / "chat_history"


def terminal_reader() -> ReadLine:
    """Reads with editing and history on a terminal, plain lines from a pipe."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain_reader
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    except OSError as error:
        click.echo(f"(no history: {error})", err=True)
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
    return lambda: session.prompt(">>> ", prompt_continuation="... ")


def _plain_reader() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _chat(**flags: Any) -> None:
    settings = load(flags)
    # Half a second of imports, done while the model loads.
    threading.Thread(target=__import__, args=("prompt_toolkit.shortcuts",), daemon=True).start()
    from frontend.cli.launch import client_for

    with client_for(settings, flags.get("model")) as client:
        if sys.stdin.isatty():
            click.echo(f"Connected to {client.url}. /help lists the commands.", err=True)
        Chat(client, settings.answer, terminal_reader()).run()


COMMAND = GroupedCommand(
    "chat",
    params=[model_argument(), *option_params(KEYS)],
    callback=_chat,
    help="Talk with MODEL. Starts it for this conversation, or talks to the server at --url.",
)
