"""Count the localllm source files whose functions are called, in any thread, for a token and for an HTTP request.

    python benchmarks/walk.py [--model demo] [--port 9400] [--out benchmarks/results/walk.jsonl] [--commit NAME]

The program measures the localllm of its interpreter, so another commit needs a separate environment. For a token,
`localllm chat` writes a sampled answer to a pipe. Only the second half counts, because a fast model generates some
tokens before the first is shown. A file counts if it is called between two tokens in at least a fifth of the cases. The
server writes in another thread, so all tokens in the second half of a streamed chat completion are counted together.
For a request, the second of two streamed chat completions is observed from its first byte to its last. Files in
backends/, plan/ and quant/ are below the engine and counted separately. Compiled code and child processes are not
observed.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

BELOW = ("backends/", "plan/", "quant/")
TOKENS = 60
MESSAGES = [{"role": "user", "content": "Hello! Who are you?"}]
LENGTH = {"max_tokens": TOKENS, "ignore_eos": True}
MARK = "tokenizer/tokenizer.py:push"  # every call of this function marks the start of a token
WALKS = ("token of a chat", "token of an HTTP answer", "HTTP request")


class Files:
    """Records the files whose functions are called. Recording must start before any other thread."""

    def __init__(self) -> None:
        import localllm

        self._folder = str(Path(localllm.__file__).parent) + os.sep
        self._known: dict[str, str] = {}  # file name of a code object -> path in the project; "" for others
        self.now: set[str] = set()
        self.between: list[frozenset[str]] = []  # files called from one mark to the next
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename
        path = self._known.get(name)
        if path is None:
            path = name.removeprefix(self._folder) if name.startswith(self._folder) else ""
            self._known[name] = path
        if not path:
            return
        if f"{path}:{frame.f_code.co_name}" == MARK:
            self.between.append(frozenset(self.now))
            self.now = set()
        self.now.add(path)


def one_token(model: str) -> frozenset[str]:
    """Return the files called for one token of `localllm chat`."""
    files = Files()
    sys.stdin = io.StringIO("Tell me a long story about a dog and a cat.\n")
    options = ("--temp", "0.8", "--seed", "1", "--spec", "off", "-n", str(TOKENS), "--ignore-eos")
    run("chat", model, *options, "--no-stats", "--no-history")
    walks = steady(files)
    often = Counter(file for walk in walks for file in walk)
    return frozenset(file for file, times in often.items() if times >= len(walks) / 5)


def steady(files: Files) -> list[frozenset[str]]:
    """Return the sets of files between two tokens in the second half of the last answer."""
    half = files.between[-TOKENS // 2 : -1]
    assert len(half) >= TOKENS // 4, f"the answer had only {len(files.between)} tokens"
    return half


def one_request(model: str, port: int, token: bool) -> frozenset[str]:
    """Return the files called for a streamed chat completion, or for one `token` of it."""
    files = Files()
    found: list[frozenset[str]] = []

    def client() -> None:
        sys.setprofile(None)
        wait(port)
        ask(port)
        time.sleep(0.5)  # lets the first request finish
        files.now = set()
        files.between.clear()
        ask(port)
        found.append(frozenset().union(*steady(files)) if token else frozenset(files.now.union(*files.between)))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=client, daemon=True).start()
    run("serve", model, "--host", "127.0.0.1", "--port", str(port))
    return found[0]


def run(*words: str) -> None:
    """Run a localllm command line in this process."""
    from localllm.__main__ import main

    sys.argv = ["localllm", *words]
    with suppress(SystemExit):
        main()


def wait(port: int) -> None:
    """Wait until the server is ready."""
    for _ in range(600):
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def ask(port: int) -> None:
    """Request a streamed answer and read it to the end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"messages": MESSAGES, "stream": True, "temperature": 0.8, "seed": 1} | LENGTH)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    text = connection.getresponse().read()
    assert b"[DONE]" in text, text
    connection.close()


def parted(files: frozenset[str]) -> tuple[list[str], list[str]]:
    """Return the files of the generation loop and the server, and the files below the engine."""
    above = sorted(file for file in files if not file.startswith(BELOW))
    return above, sorted(files.difference(above))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--port", type=int, default=9400)
    parser.add_argument("--commit", default="", help="name of what is measured, for the result")
    parser.add_argument("--out", type=Path, help="add the result to this file")
    parser.add_argument("--one", choices=WALKS, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:  # each measurement has a separate process
        if arguments.one == WALKS[0]:
            found = one_token(arguments.model)
        else:
            found = one_request(arguments.model, arguments.port, arguments.one == WALKS[1])
        arguments.to.write_text(json.dumps(sorted(found)))
        return
    row: dict[str, Any] = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "commit": arguments.commit}
    with tempfile.TemporaryDirectory() as folder:
        for walk in WALKS:
            to = Path(folder) / "files.json"
            command = [sys.executable, __file__, "--model", arguments.model, "--port", str(arguments.port)]
            done = subprocess.run([*command, "--one", walk, "--to", str(to)], capture_output=True, text=True)
            if not to.exists():
                raise SystemExit(done.stdout + done.stderr)
            above, below = parted(frozenset(json.loads(to.read_text())))
            to.unlink()
            print(f"{walk}: {len(above)} files of the loop and the server, {len(below)} below the engine")
            print("".join(f"  {file}\n" for file in (*above, *below)), end="")
            row[walk] = {"count": len(above), "files": above, "below": len(below), "files_below": below}
    if arguments.out:
        with arguments.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
