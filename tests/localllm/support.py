"""Helpers for tests of the program: write a small GGUF, and run the program as a user does."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np

from localllm import quant
from localllm.gguf import NewTensor, write_gguf
from tests.localllm.started import Started, can_fork

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-c", "import sys; from localllm.cli.main import main; sys.exit(main())"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WIDTH, FFN, HEADS = 64, 96, 2
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def write_model(
    path: Path, *, template: str | None = CHATML, context: int = 512, extra: dict[str, Any] | None = None
) -> Path:
    """Write a llama of one layer with random weights. It generates printable ASCII, because the rows of the
    output matrix for other tokens are zero.
    """
    random = np.random.RandomState(11)
    letters = [chr(c) for c in range(33, 127)]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters]
    kinds = [2, *[3] * 4, *[6] * 256, *[1] * (1 + len(letters))]  # token types: unknown, control, byte, normal
    size = len(tokens)
    output = random.standard_normal((size, WIDTH)) / 8
    output[: size - len(letters)] = 0
    values = {"token_embd.weight": random.standard_normal((size, WIDTH)), "output.weight": output}
    for name, rows, columns in (
        *((f"blk.0.attn_{part}.weight", WIDTH, WIDTH) for part in ("q", "k", "v", "output")),
        *((f"blk.0.ffn_{part}.weight", FFN, WIDTH) for part in ("gate", "up")),
        ("blk.0.ffn_down.weight", WIDTH, FFN),
    ):
        values[name] = random.standard_normal((rows, columns)) / np.sqrt(columns)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        values[f"{name}.weight"] = np.ones(WIDTH)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": 1,
        "llama.context_length": context,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(size, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.add_bos_token": True,
        **({} if template is None else {"tokenizer.chat_template": template}),
        **(extra or {}),
    }
    formats = {name: "Q8_0" if value.ndim == 2 else "F32" for name, value in values.items()}
    tensors = [
        NewTensor(
            name, formats[name], value.shape, quant.quantize(np.atleast_2d(value).astype(np.float32), formats[name])
        )
        for name, value in values.items()
    ]
    write_gguf(path, metadata, tensors)
    return path


def default_signals() -> None:
    """For `preexec_fn`: restore default signal handling, because children of a background process inherit ignored
    signals.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def localllm(
    *words: object, stdin: str | None = None, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the program. Without `stdin`, the input is empty. `environ` adds environment variables."""
    command, environ = [*PROGRAM, *map(str, words)], environ or {}
    if not can_fork(environ):
        return subprocess.run(
            command, input=stdin or "", capture_output=True, encoding="utf-8", cwd=REPOSITORY, timeout=120,
            env={**os.environ, **environ},
        )  # fmt: skip
    with (
        TemporaryFile("w+", encoding="utf-8") as out,
        TemporaryFile("w+", encoding="utf-8") as err,
        _input(stdin) as given,
    ):
        started = Started([*map(str, words)], (given, out.fileno(), err.fileno()), {**os.environ, **environ})
        try:
            code = started.wait(120)
        finally:
            started.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


@contextmanager
def _input(text: str | None) -> Iterator[int]:
    """Open a pipe with a text, or an empty device."""
    if text is None:
        reading = os.open(os.devnull, os.O_RDONLY)
    else:
        reading, writing = os.pipe()
        thread = Thread(target=_write, args=(writing, text.encode()), daemon=True)
        thread.start()
    try:
        yield reading
    finally:
        os.close(reading)


def _write(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb") as pipe:
        pipe.write(data)


class Terminal:
    """The program on a pseudo-terminal.

    `seen` is the output that no `wait_for` has returned yet, without cursor movements and colors. `written` is the
    whole raw output.
    """

    def __init__(
        self, *words: object, environ: Mapping[str, str] | None = None, columns: int = 0, shell: bool = False
    ) -> None:
        """With `shell`, run the program from a shell, so that it can be suspended."""
        self.master, slave = pty.openpty()
        if columns:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        around = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environ = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PS1": "$ ", "ENV": "", **(environ or {})}
        self.process: Started | subprocess.Popen[bytes]
        if can_fork(environ) and not shell:
            self.process = Started([*map(str, words)], (slave, slave, slave), {**around, **environ}, terminal=True)
        else:
            self.process = subprocess.Popen(
                ["sh", "-i"] if shell else [*PROGRAM, *map(str, words)], stdin=slave, stdout=slave, stderr=slave,
                cwd=REPOSITORY, env={**around, **environ}, start_new_session=True, preexec_fn=self._prepare,
            )  # fmt: skip
        os.close(slave)
        self.seen = self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
        self._part = ""  # the start of an incomplete escape sequence
        if shell:
            self.type(shlex.join([*PROGRAM, *map(str, words)]) + "\n")

    @staticmethod
    def _prepare() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # needed for Ctrl-C to reach the program
        default_signals()

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def resize(self, columns: int) -> None:
        """Resize the terminal, and notify the program."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Return the output up to the end of the first match. The next call continues after it."""
        end = monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            assert monotonic() < end, f"{pattern!r} did not come: {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self._read()
                except OSError:  # the program has closed the terminal
                    assert re.search(pattern, self.seen), self.seen
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def end(self) -> int:
        """Read the rest of the output, and return the exit code."""
        limit = monotonic() + 60
        while (running := self.process.poll() is None) or select.select([self.master], [], [], 0)[0]:
            assert monotonic() < limit, f"it does not end: {self.seen!r}"
            try:
                if not running or select.select([self.master], [], [], 0.1)[0]:
                    self._read()
            except OSError:  # the program has closed the terminal
                break
        os.close(self.master)
        return self.process.wait(60)

    def _read(self) -> None:
        text = self._decoder.decode(os.read(self.master, 4096))
        self.written += text
        plain = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\a]*\a|[^\[\]])", "", self._part + text)
        begun = plain.find("\x1b")
        self._part = plain[begun:] if begun >= 0 else ""
        self.seen += plain[:begun] if begun >= 0 else plain
