"""`localllm worker`: lend this computer to models that run on several, until Ctrl-C."""

from __future__ import annotations

import sys
from contextlib import suppress

from localllm.base.machine.memory import memory
from localllm.base.machine.processor import usable_threads
from localllm.base.units import size
from localllm.cli.options import WorkerOptions
from localllm.cli.terminal.console import say

_OWNS = "The token lets anyone run any program on these computers, as you."


def worker(own: WorkerOptions) -> None:
    """Start or join a cluster, print what to type elsewhere, and wait for Ctrl-C."""
    from localllm.distributed.worker import check_worker, joined, started

    check_worker()
    with suppress(KeyboardInterrupt):
        if own.join:
            token = _token(own)
            say(f"joining the cluster at {own.join}")
            with joined(own.join, token, own.host, own.port) as found:
                print(f"This computer ({_parts()}) belongs to the cluster at {own.join} until Ctrl-C.", flush=True)
                print("On any of its computers:\n\n    localllm run MODEL --ray auto\n", flush=True)
                found.wait()
            return
        say("starting a cluster on this computer")
        with started(own.host, own.port) as found:
            port = f" --port {own.port}" if own.port != WorkerOptions().port else ""
            print(f"This computer ({_parts()}) is the first of a cluster until Ctrl-C. On another one, type:\n")
            print(f"    localllm worker --join {found.address}{port}\n")
            print(f"and, when it asks for the token:\n\n    {found.token}\n")
            print(f"{_OWNS} Then, on either:\n\n    localllm run MODEL --ray auto\n", flush=True)
            found.wait()


def _token(own: WorkerOptions) -> str:
    """Return the token: from a file, from a pipe, or asked for without showing it."""
    from localllm.distributed.worker import ask_token, checked_token, read_token

    if own.token_file:
        return read_token(own.token_file)
    if not sys.stdin.isatty():
        return checked_token(sys.stdin.readline(), "stdin")
    from getpass import getpass

    return ask_token(getpass)


def _parts() -> str:
    threads, found = usable_threads(), memory()
    return f"{threads} processor{'s' * (threads > 1)}, {size(found.free)} of memory free"
