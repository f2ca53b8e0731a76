"""The picture of `gapless top` in the docs, of a real server with clients: python -m bench.top_picture docs/top.svg"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import threading
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from frontend.cli.client import ChatMessage, Client
from frontend.cli.errors import CliError
from frontend.cli.models import resolve_model
from frontend.cli.settings import AnswerOptions
from frontend.top.figures import Watch
from frontend.top.screen import screen
from frontend.top.source import take
from frontend.topology import LaunchConfig, Server
from ipc.config import EngineOptions, ServerOptions

QUESTIONS = ("Why is the sky blue?", "Tell me a story of a fox.", "How do tides work?", "What is a prime number?")
SYSTEM = (
    "You are a patient teacher who explains things to children in simple words, with an example for each idea. " * 4
)
# Without the fonts that it would load from elsewhere.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def ask_on(client: Client, questions: itertools.cycle[str], ended: threading.Event) -> None:
    """One client: question after question."""
    while not ended.is_set():
        messages = [ChatMessage("system", SYSTEM), ChatMessage("user", next(questions))]
        with contextlib.suppress(CliError):  # of the end
            for _ in client.stream_chat(messages, AnswerOptions(max_tokens=60)):
                if ended.is_set():
                    return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=25)
    parser.add_argument("--width", type=int, default=100)
    args = parser.parse_args()
    model = resolve_model("smollm2")
    launch = LaunchConfig(
        model=str(model.path),
        engine=EngineOptions(max_num_seqs=8),
        server=ServerOptions(port=0, served_model_name=model.name),
    )
    questions, ended, watch = itertools.cycle(QUESTIONS), threading.Event(), Watch()
    with Server(launch) as server:
        client = Client(server.url)
        threads = [threading.Thread(target=ask_on, args=(client, questions, ended)) for _ in range(args.clients)]
        for thread in threads:
            thread.start()
        for _ in range(args.seconds):
            figures = watch.add(take(client))
            time.sleep(1)
        figures = watch.add(take(client))
        ended.set()
        for thread in threads:
            thread.join()
    console = Console(width=args.width, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(screen(figures, watch, "http://127.0.0.1:8000", console, 34))
    args.path.write_text(console.export_svg(title="gapless top", code_format=FORMAT), encoding="utf-8")


if __name__ == "__main__":
    main()
