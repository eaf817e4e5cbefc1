"""`localllm top`: poll a server and show its metrics until q or Ctrl-C.

A thread polls, so that keys work while the server is slow. If the server goes away, the last values stay and a line
reports it. A terminal that cannot move its cursor (TERM=dumb) gets the values as plain lines.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from queue import Empty, Queue
from time import monotonic, time

from localllm.cli.app import one_word
from localllm.cli.flags import typed
from localllm.cli.options import TopOptions
from localllm.cli.terminal.console import raw, room
from localllm.cli.top.asking import MOST_SECONDS, USUAL, Client, Look, TopError, address_of
from localllm.cli.top.keys import keys
from localllm.cli.top.numbers import Recent, view_of
from localllm.cli.top.screen import screen
from localllm.server.settings import keys_in

FIRST_SECONDS = 3 * MOST_SECONDS  # limit for a server that sends its first response byte by byte
ONCE_SECONDS = 1.0  # between the two polls of --once; rates need two samples
PIPE_WIDTH, PIPE_HEIGHT = 80, 1000
KEY_SECONDS = 0.25


def top(own: TopOptions) -> None:
    """Watch a server. Raise TopError if it cannot be reached at the start."""
    url = one_word(own.words, "URL", USUAL)
    given = (*keys_in(own.api_key_file)[:1], *own.api_key)
    client = Client(address_of(url), given[-1] if given else "")
    once = own.once or not sys.stdout.isatty()
    asking = _Asking(client, ONCE_SECONDS if once else float(own.interval))
    recent = Recent()
    recent.add(asking.first())
    if once:
        recent.add(asking.first())
        _print(recent, client, lately=False)
        return
    with suppress(KeyboardInterrupt):  # Ctrl-C is a usual way to leave
        (_plain if os.environ.get("TERM") == "dumb" else _live)(recent, client, asking)


class _Asking:
    """Polls a server in a thread, once every `interval` seconds."""

    def __init__(self, client: Client, interval: float) -> None:
        self._client, self._interval = client, interval
        self._found: Queue[Look | TopError] = Queue(4)
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        pause = threading.Event()
        while True:
            began = monotonic()
            try:
                self._found.put(self._client.look())
            except TopError as error:
                self._found.put(error)
            pause.wait(max(self._interval - (monotonic() - began), 0.1))

    def first(self) -> Look:
        """Wait for the first result. Raise TopError if polling failed."""
        try:
            found = self._found.get(timeout=FIRST_SECONDS)
        except Empty:
            raise TopError(f"{self._client.address} does not answer in time") from None
        if isinstance(found, TopError):
            raise found
        return found

    def news(self) -> Look | TopError | None:
        """Return the next result of polling, or None without a new result."""
        try:
            return self._found.get_nowait()
        except Empty:
            return None


def _print(recent: Recent, client: Client, lately: bool, remark: str = "") -> None:
    """Print the screen once, as lines without trailing spaces."""
    from rich.console import Console

    stream = raw(sys.stdout)
    width = room() or PIPE_WIDTH
    console = Console(file=stream, width=width, height=PIPE_HEIGHT, highlight=False, markup=False)
    view = view_of(recent.looks, time(), lately)
    with console.capture() as capture:
        console.print(screen(view, str(client.address), width, PIPE_HEIGHT, _has_blocks(), remark))
    text = "".join(line.rstrip() + "\n" for line in capture.get().splitlines())
    stream.write(text)  # not printed by rich, which would exit on a broken pipe
    stream.flush()


def _plain(recent: Recent, client: Client, asking: _Asking) -> None:
    """Print the values as lines, with one name and value each."""
    _print(recent, client, lately=True)
    with keys(lambda: None, lambda: None) as key:
        while b"q" not in key(KEY_SECONDS).lower():
            found = asking.news()
            if isinstance(found, Look):
                recent.add(found)
            if found is not None:
                print()
                _print(recent, client, lately=True, remark=typed(found) if isinstance(found, TopError) else "")


def _live(recent: Recent, client: Client, asking: _Asking) -> None:
    """Show the values full-screen."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=raw(sys.stdout), highlight=False, markup=False)
    blocks, problem, last = _has_blocks(), "", monotonic()

    def shown() -> object:
        remark = f"no answer for {monotonic() - last:.0f} s: {problem}" if problem else "q leaves"
        view = view_of(recent.looks, time(), lately=True)
        return screen(view, str(client.address), console.width, console.height, blocks, remark)

    with (
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
        keys(live.stop, lambda: live.start(refresh=True)) as key,
    ):
        size = None
        while True:
            found = asking.news()
            if isinstance(found, Look):
                recent.add(found)
                problem, last = "", monotonic()
            elif found is not None:
                problem = typed(found)
            if found is not None or size != console.size or problem:
                size = console.size
                live.update(shown(), refresh=True)  # type: ignore[arg-type]
            if b"q" in key(KEY_SECONDS).lower():
                return


def _has_blocks() -> bool:
    """Return whether the terminal's encoding has block characters."""
    try:
        "█▒░▁".encode(getattr(raw(sys.stdout), "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
