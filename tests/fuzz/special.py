"""Special files wherever a command reads or writes: pipes, devices, sockets, links, foreign owners, odd sizes.

A command must end in time, with success or a one-line error, and must not touch the target of a link.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import ClassVar

from localllm.cli.main import main
from tests.fuzz.case import Case, Wrong
from tests.localllm.convert.checkpoints import write
from tests.localllm.support import write_model

TEXT = "Once upon a time there was a little girl who liked to play outside. " * 8
SECRET = "not for others\n"
SHORT = ("-n", "2", "-t", "1")

# An option, the content of its file, and the command. {model} is a valid model, and {it} the path of the special file.
READ: dict[str, tuple[str, tuple[str, ...]]] = {
    "model": ("model", ("run", "{it}", "x", *SHORT)),
    "shown": ("model", ("show", "{it}")),
    "draft": ("model", ("run", "{model}", "x", *SHORT, "-md", "{it}")),
    "prompt": ("text", ("run", "{model}", "-f", "{it}", *SHORT)),
    "instructions": ("text", ("run", "{model}", "x", "-sysf", "{it}", *SHORT)),
    "grammar": ("grammar", ("run", "{model}", "x", "--grammar-file", "{it}", *SHORT)),
    "schema": ("schema", ("run", "{model}", "x", "--json-schema-file", "{it}", *SHORT)),
    "template": ("template", ("run", "{model}", "x", "--chat-template-file", "{it}", *SHORT)),
    "prompt cache": ("cache", ("run", "{model}", "x", "--prompt-cache", "{it}", *SHORT)),
    "configuration": ("toml", ("run", "{model}", "x", "--config", "{it}", *SHORT)),
    "text": ("text", ("perplexity", "{model}", "-f", "{it}", "-c", "32", "-t", "1")),
    "base": ("base", ("perplexity", "{model}", "-f", "{text}", "-c", "32", "-t", "1", "--kld", "{it}")),
    "matrix": (
        "matrix",
        ("quantize", "{model}", "{out}", "Q4_0", "--allow-requantize", "--imatrix", "{it}", "-t", "1"),
    ),
    "texts": ("text", ("embed", "{model}", "-f", "{it}", "-t", "1")),
}
WRITTEN: dict[str, tuple[str, ...]] = {
    "quantized": ("quantize", "{model}", "{it}", "Q4_0", "--allow-requantize", "-t", "1"),
    "saved matrix": ("imatrix", "{model}", "-f", "{text}", "-o", "{it}", "-c", "32", "-t", "1"),
    "saved base": ("perplexity", "{model}", "-f", "{text}", "-c", "32", "-t", "1", "--save-base", "{it}"),
    "saved cache": ("run", "{model}", "x", "--prompt-cache", "{it}", *SHORT),
    "page": ("explain", "{model}", "x", *SHORT, "-o", "{it}"),
}


class Kind:
    together: ClassVar[int] = 4
    seconds: ClassVar[float] = 40.0

    def __init__(self, home: Path) -> None:
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
            os.environ[name] = str(home)
        self._model = write_model(home / "model.gguf")
        self._text = home / "text"
        self._text.write_text(TEXT)
        self._folder = home / "llama"
        self._folder.mkdir()
        write("llama", self._folder)
        good = {"text": TEXT, "grammar": 'root ::= "a"*', "schema": '{"type": "integer"}', "toml": "temp = 0.5\n"}
        good["template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
        self._good = {name: text.encode() for name, text in good.items()} | {"model": self._model.read_bytes()}
        for name, place in (("cache", "saved cache"), ("base", "saved base"), ("matrix", "saved matrix")):
            main(self._words(WRITTEN[place], home / name, home))
            self._good[name] = (home / name).read_bytes()

    def make(self, random: Random, folder: Path) -> Case:
        target = folder / "target"
        target.mkdir()
        (target / "secret").write_text(SECRET)
        group = random.choice(("read", "read", "written", "folder", "hub"))
        if group == "read":
            name = random.choice(sorted(READ))
            content, words = READ[name]
            it = folder / "it"
            said = SPECIAL[how := random.choice(sorted(SPECIAL))](it, self._good[content], target)
        elif group == "written":
            name = random.choice(sorted(WRITTEN))
            it, words = folder / "it", WRITTEN[name]
            said = SPECIAL[how := random.choice(sorted(SPECIAL))](it, b"before", target)
        else:
            it, words = folder / "hf", ("quantize", "{it}", "{out}", "Q8_0", "-t", "1")
            name, how, said = self._in_a_folder(random, it, target, group == "hub")
        before = _state(target)
        return Case((name, how, said or ""), lambda: self._run(self._words(words, it, folder), folder, target, before))

    def _in_a_folder(self, random: Random, it: Path, target: Path, hub: bool) -> tuple[str, str, str | None]:
        """Create a Hugging Face checkpoint with one special file. In a hub cache, files are links to `blobs`."""
        blobs = it.with_name("blobs")
        shutil.copytree(self._folder, it)
        if hub:
            it.rename(blobs)
            it.mkdir()
            for path in sorted(blobs.iterdir()):
                (it / path.name).symlink_to(Path("..") / "blobs" / path.name)
        name = random.choice(
            [path.name for path in sorted(it.iterdir())] + ["chat_template.jinja", "added.safetensors"]
        )
        good = (it / name).read_bytes() if (it / name).exists() else b"{{ messages }}"
        (it / name).unlink(missing_ok=True)
        how = random.choice(sorted(SPECIAL))
        return name, f"{how}{' in a hub' if hub else ''}", SPECIAL[how](it / name, good, target)

    def _words(self, words: tuple[str, ...], it: Path, folder: Path) -> list[str]:
        given = {"it": it, "model": self._model, "text": self._text, "out": folder / "out.gguf"}
        return [word.format(**given) for word in words]

    def _run(self, words: list[str], folder: Path, target: Path, before: object) -> str:
        log = folder / "log"
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 2)
        code = main(words)
        os.close(out)
        text = log.read_text(errors="replace")
        if code not in (0, 1, 2) or "bug in localllm" in text or "Traceback" in text:
            raise Wrong(f"{' '.join(words[:2])}: exit code {code}: {text[-600:]}")
        if code and "error" not in text:
            raise Wrong(f"exit code {code} without a line: {text[-300:]!r}")
        if _state(target) != before:
            raise Wrong(f"what a link points at has changed: {before} is now {_state(target)}")
        if (folder / "out.gguf").exists() and SECRET.strip().encode() in (folder / "out.gguf").read_bytes():
            raise Wrong("a file out of the folder is in the output")
        return f"exit code {code}"


def _state(target: Path) -> list[tuple[str, int, int, bytes]]:
    """Return the names, kinds, owners and contents of the targets of links."""
    found = []
    for path in sorted(target.iterdir()):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24 else b""
        found.append((path.name, status.st_mode, status.st_uid, content))
    return found


# -- kinds of files ----------------------------------------------------------------------------------------------------

Maker = Callable[[Path, bytes, Path], str | None]


def _pipe(path: Path, good: bytes, target: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, good: bytes, target: Path) -> None:
    path.mkdir()
    (path / "x").write_bytes(good)


def _socket(path: Path, good: bytes, target: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    made = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        made.bind(f"/proc/self/fd/{here}/{path.name}")  # the path of a socket has at most 107 bytes
    os.close(here)
    made.close()


def _device(number: int) -> Maker:
    def make(path: Path, good: bytes, target: Path) -> str | None:
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, number))
        except OSError:  # creating it requires root
            path.symlink_to({3: "/dev/null", 5: "/dev/zero", 7: "/dev/full"}[number])
        return None

    return make


def _link(to: str) -> Maker:
    def make(path: Path, good: bytes, target: Path) -> str:
        path.symlink_to(to.format(path=path, target=target))
        return str(os.readlink(path))

    return make


def _good_link(path: Path, good: bytes, target: Path) -> None:
    (target / "good").write_bytes(good)
    path.symlink_to(target / "good")


def _hard_link(path: Path, good: bytes, target: Path) -> None:
    (target / "good").write_bytes(good)
    os.link(target / "good", path)


def _locked(path: Path, good: bytes, target: Path) -> None:
    path.write_bytes(good)
    path.chmod(0)


def _foreign(path: Path, good: bytes, target: Path) -> None:
    path.write_bytes(good)
    with suppress(OSError):
        os.chown(path, 12345, 12345)


def _huge(path: Path, good: bytes, target: Path) -> None:
    path.write_bytes(good)
    os.truncate(path, 1 << 41)


def _whole(path: Path, good: bytes, target: Path) -> None:
    path.write_bytes(good)


def _empty(path: Path, good: bytes, target: Path) -> None:
    path.write_bytes(b"")


SPECIAL: dict[str, Maker] = {
    "pipe": _pipe, "folder": _folder, "socket": _socket, "null": _device(3), "zero": _device(5), "full": _device(7),
    "dangling link": _link("{target}/nothing"), "loop": _link("{path}"), "link to a secret": _link("{target}/secret"),
    "link to a folder": _link("{target}"),
    "link to zero": _link("/dev/zero"), "link to itself by proc": _link("/proc/self/mem"),
    "link to stdin": _link("/dev/stdin"), "good link": _good_link, "hard link": _hard_link, "locked": _locked,
    "foreign": _foreign, "huge": _huge, "good": _whole, "empty": _empty,
}  # fmt: skip
