"""A user's desk: a folder with the files, models, server and hub that the documents name, and a shell in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.hub.short_names import KNOWN
from localllm.loading.resolve import resolve
from tests.localllm import started
from tests.localllm.convert.mmproj_cases import stored
from tests.localllm.convert.mmproj_cases import write as write_encoders
from tests.localllm.convert.support import HF
from tests.localllm.diffusion.test_diffusion import write_diffusion
from tests.localllm.hub.hub_server import HubServer, Repo, serving
from tests.localllm.media_models import png, write_mmproj
from tests.localllm.support import REPOSITORY, default_signals, write_model
from tests.localllm.test_embedding import write_embedder

CONTEXT = 32768  # the longest that a document asks for
HOME = "/home/ann"  # a home folder in shown output
ADDRESS = re.compile(r"(?:https?://)?(?:127\.0\.0\.1|localhost):8080|https://gpu\.example\.org:8443")
QUIET = ("run", "embed")  # they read what is piped to them as well
TEXT = "The cat sat on the mat. It was a good day, and the cat was happy. Then a dog came by. " * 80
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
STARTED = Path(started.__file__)
PROGRAMS = {
    "localllm": f'exec {shlex.quote(sys.executable)} -IS {shlex.quote(str(STARTED))} "$TEMPLATE" "$@"',
    "python": f'exec {shlex.quote(sys.executable)} "$@"',
    "llama-bench": 'echo \'[{"avg_ts": 100.0, "build_commit": "abc1234"}]\'',  # another program's part of a comparison
}


ON_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(['bash', '-c', sys.argv[1]])))"


def _model(path: Path) -> None:
    """Write the bundled draft model, which is fast, with a longer context."""
    with open_gguf(resolve("draft")) as file:
        tensors = [
            NewTensor(each.name, each.format, each.shape, each.read(0, each.rows).reshape(-1))
            for each in file.tensors.values()
        ]
        write_gguf(path, {**file.stored, "llama.context_length": CONTEXT}, tensors)


def _unquantized(path: Path) -> None:
    """Write a tiny model in F16. Its matrices are too narrow for blocks of 256, so types fall back as they should."""
    tiny = write_model(path.with_name("tiny.gguf"), context=CONTEXT)
    command = [sys.executable, "-m", "localllm", "quantize", tiny, path, "F16", "--allow-requantize"]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)
    tiny.unlink()


def _vision(path: Path) -> None:
    """Write a tiny model and encoders of pictures."""
    write_mmproj(path.with_name("mmproj-vision-F16.gguf"), "gemma3")
    write_model(path, context=CONTEXT)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


# What a command reads. A file that an earlier command of the page has written is left as it is.
FILES: dict[str, Callable[[Path], object]] = {
    "model.gguf": _model,
    "small.gguf": lambda path: write_model(path, context=CONTEXT),
    "model-F16.gguf": _unquantized,
    "vision.gguf": _vision,
    "a.png": lambda path: path.write_bytes(png(seed=1)),
    "b.jpg": lambda path: path.write_bytes(png(seed=2)),  # the content decides
    "dream.gguf": lambda path: write_diffusion(path, "dream"),
    "llada.gguf": lambda path: write_diffusion(path, "llada"),
    "embedder.gguf": lambda path: write_embedder(path, "bert-mean"),
    "reranker.gguf": lambda path: write_embedder(path, "bert-rank"),
    "vision-folder": lambda path: write_encoders(stored()["qwen2.5vl"], path),
    "llama-folder": lambda path: path.symlink_to(HF / "llama-shards"),
    "text.txt": _text(TEXT),
    "texts.txt": _text("a cat\na dog\n"),
    "letter.txt": _text(TEXT[:400]),
    "notes.txt": _text(TEXT[:400]),
    "wiki.test.raw": _text(TEXT),
    "person.json": _text(json.dumps(SCHEMA)),
    "rivers.json": _text(json.dumps(SCHEMA)),
    "yes-no.gbnf": _text('root ::= "yes" | "no"'),
    "key.txt": _text("secret\n"),
    "keys.txt": _text("secret\n"),
    "prefixes": Path.mkdir,
}


def hub(names: Iterable[str]) -> dict[str, Repo]:
    """Return the repositories of `names` (USER/REPO:LABEL), each with a model under the name of its file."""
    repos: dict[str, Repo] = {}
    with tempfile.TemporaryDirectory() as folder:
        unquantized = Path(folder, "model.gguf")
        _unquantized(unquantized)
        data = {"F16": unquantized.read_bytes()}
    bundled = resolve("demo").read_bytes()
    for name in names:
        repo, _, label = name.partition(":")
        title = repo.split("/")[1].removesuffix("-GGUF")
        repos.setdefault(repo, Repo({})).files[f"{title}-{label}.gguf"] = data.get(label, bundled)
    return repos


@contextmanager
def network(names: Iterable[str]) -> Iterator[HubServer]:
    """Run a hub with the models of `names`, and of the short names."""
    with serving(hub([*(known.reference for known in KNOWN), *names])) as server:
        yield server


class Desk:
    """A folder, and a shell with an empty home, in which the commands of one page run one after another."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder, self.home = folder / "work", folder / "home"
        self.server: subprocess.Popen[bytes] | None = None
        self.url = ""
        programs = folder / "bin"
        for each in (self.folder, self.home / "models", programs):
            each.mkdir(parents=True)
        for program, body in PROGRAMS.items():
            (programs / program).write_text(f"#!/bin/sh\n{body}\n")
            (programs / program).chmod(0o755)
        for shared in ("docs", "benchmarks"):
            (self.folder / shared).symlink_to(REPOSITORY / shared)
        FILES["model.gguf"](self.home / "models" / "small.gguf")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALLLM_", "XDG_", "HF_"))}
        self.passed = [started.template().connection.fileno()]  # to each command, which forks from it
        self.environment = {
            "RAY_ADDRESS": "local",  # not the cluster of a test that runs at the same time
            **kept,
            "HOME": str(self.home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),  # compiled kernels
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(self.home / "hf"),
            "OLLAMA_MODELS": str(self.home / "ollama"),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "BROWSER": "true",
            "LOCALLLM_REPETITIONS": "1",  # of a benchmark
            "LOCALLLM_PREDICT": "64",
            "TEMPLATE": str(started.template().connection.fileno()),
        }

    def run(self, command: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the shell. `typed` is its standard input; without it, a message to chat with.

        A command that asks before it deletes gets a terminal, and "y".
        """
        self._provide(command)
        command = self._reached(command)
        words = shlex.split(command, comments=True)
        name = words[words.index("localllm") + 1] if "localllm" in words[:-1] else ""
        environment = dict(self.environment)
        if typed is not None:
            del environment["LOCALLLM_PREDICT"]  # the page shows whole answers
        if "--clean" in words:
            environment["XDG_CACHE_HOME"] = str(self.home / "cache")  # other tests need the compiled kernels
        shell = ["bash", "-o", "pipefail", "-c", command]
        if name == "rm" or "--clean" in words:
            shell, typed = [sys.executable, "-c", ON_TERMINAL, command], "y\n"
        return subprocess.run(
            shell, input=("" if name in QUIET else "Hello!\n") if typed is None else typed,
            cwd=self.folder, env=environment, capture_output=True, encoding="utf-8", timeout=120, pass_fds=self.passed,
        )  # fmt: skip

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run a Python example."""
        return subprocess.run(
            [sys.executable, "-c", self._reached(code)],
            cwd=self.folder, env=self.environment, capture_output=True, encoding="utf-8", timeout=120,
        )  # fmt: skip

    def serve(self, command: str) -> int:
        """Start a server by its command, on a free port, ask it once, and return its exit code after SIGINT."""
        self._provide(command)
        process, url = self._start(command)
        try:
            ask(url)
            process.send_signal(signal.SIGINT)
            return process.wait(30)
        finally:
            process.kill()
            process.wait()

    def close(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()

    def _start(self, command: str) -> tuple[subprocess.Popen[bytes], str]:
        command = re.sub(r"--port \d+|LOCALLLM_PORT=\d+ ", "", command)
        log = self.folder / "server.log"
        with log.open("wb") as to:
            process = subprocess.Popen(
                ["bash", "-c", re.sub(r"\blocalllm ", "exec localllm ", command, count=1) + " --port 0"],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=to, stderr=to,
                preexec_fn=default_signals, pass_fds=self.passed,
            )  # fmt: skip
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        return process, found[1]

    def _provide(self, command: str) -> None:
        """Make the files that a command names, but not the output of `quantize`."""
        words = shlex.split(command, comments=True)
        if "git" in words:
            self._repository()
        files = [word for word in words if word in FILES]
        if "quantize" in words and (written := words[words.index("quantize") + 2]) in files:
            (self.folder / written).unlink(missing_ok=True)
            files.remove(written)
        for file in files:
            path = self.folder / file
            if not path.exists():
                FILES[file](path)

    def _repository(self) -> None:
        for step in (["init", "-q"], ["add", "letter.txt"]):
            FILES["letter.txt"](self.folder / "letter.txt")
            subprocess.run(["git", *step], cwd=self.folder, env=self.environment, check=True, timeout=60)
        (self.folder / "letter.txt").write_text("A shorter letter.\n")

    def _reached(self, text: str) -> str:
        """Return the text with the address of a running server."""
        if re.match(r"localllm top\b(?! http)", text):
            text = text.replace("localllm top", "localllm top http://127.0.0.1:8080", 1)
        if not ADDRESS.search(text):
            return text
        if self.server is None:
            self._provide("model.gguf")
            self.server, self.url = self._start("localllm serve model.gguf")
        return ADDRESS.sub(lambda found: self.url if "//" in found[0] else self.url.split("//")[1], text)


def ask(url: str) -> None:
    """Check that a server is healthy, and answers a chat and a browser."""
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        assert answer.status == 200
    key = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=key), timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers=key)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"]
    page = urllib.request.Request(url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(page, timeout=60) as answer:
        assert b"<html" in answer.read()
