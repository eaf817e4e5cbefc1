"""Read text from files and from an external editor, and copy text to the clipboard."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from base64 import b64encode
from pathlib import Path

from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import open_regular
from localllm.cli.terminal.console import raw
from localllm.loading.media_parts import Kind

_MOST_DROPPED = 20_000  # maximum characters of dropped paths
_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".ppm"),
    "audio": (".wav", ".flac", ".ogg", ".opus", ".mp3"),
}
_MOST_COPIED = 74_994  # maximum bytes to copy; several terminals ignore longer clipboard texts


def path_of(name: str) -> Path:
    """Return the path that the user typed, or dropped on the terminal, which then quotes it like a shell."""
    path = Path(name).expanduser()
    if not path.exists() and any(sign in name for sign in "'\"\\"):
        try:
            words = shlex.split(name)
        except ValueError:  # a quote without an end
            words = []
        if len(words) == 1 and Path(words[0]).expanduser().exists():
            return Path(words[0]).expanduser()
    return path


def dropped(text: str) -> list[tuple[Kind, str]]:
    """Return the pictures and sounds if a message has nothing but their paths, as terminals paste dropped files."""
    if len(text) > _MOST_DROPPED:
        return []
    try:
        words = [text] if _kind(text) else shlex.split(text)
    except ValueError:  # a quote without an end
        return []
    found = [(kind, word) for word in words if (kind := _kind(word))]
    return found if len(found) == len(words) else []


def _kind(name: str) -> Kind | None:
    """Return the kind of an existing file by its suffix, or None."""
    kind = next((kind for kind, suffixes in _SUFFIXES.items() if name.lower().endswith(suffixes)), None)
    try:
        return kind if kind and Path(name).expanduser().is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or an unknown home
        return None


def text_of(path: Path, most: int) -> str:
    """Return the text of a file of at most `most` characters. Raise LocalLLMError if the file cannot be read or is
    longer."""
    try:
        with open_regular(path) as file:
            data = file.read(4 * most + 1)
    except OSError as error:
        raise LocalLLMError(f"{path}: cannot be read: {error.strerror or error}") from None
    if b"\0" in data:
        raise LocalLLMError(f"{path}: not a text file; give another file")
    text = data.decode("utf-8", "replace")
    if len(text) > most:
        raise LocalLLMError(f"{path}: is longer than the context; give a shorter text")
    if not text.strip():
        raise LocalLLMError(f"{path}: is empty")
    return text.removesuffix("\n")


def edited(text: str) -> str:
    """Open a text in the user's editor and return the result. Raise LocalLLMError if the editor cannot be started or
    fails."""
    if not sys.stdin.isatty():
        raise LocalLLMError("/edit needs a terminal")
    program = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    descriptor, name = tempfile.mkstemp(suffix=".md", prefix="localllm-", text=True)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            code = subprocess.run([*shlex.split(program), name], check=False).returncode
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise LocalLLMError(f"the editor {program!r} cannot be started: {reason}; set EDITOR") from None
        if code:
            raise LocalLLMError(f"the editor {program!r} failed with code {code}; nothing was sent")
        return Path(name).read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    finally:
        Path(name).unlink(missing_ok=True)


def copy(text: str) -> None:
    """Copy a text to the terminal's clipboard (OSC 52). Raise LocalLLMError without a terminal, or if the text is too
    long."""
    stream = next((raw(each) for each in (sys.stdout, sys.stderr) if each.isatty()), None)
    if stream is None or os.environ.get("TERM") == "dumb":
        raise LocalLLMError("/copy needs a terminal with a clipboard; use /save or a pipe instead")
    data = text.encode("utf-8", "replace")
    if len(data) > _MOST_COPIED:
        raise LocalLLMError(f"the answer has {len(data)} bytes; terminals accept at most {_MOST_COPIED}")
    stream.write(f"\x1b]52;c;{b64encode(data).decode()}\a")  # base64, so that the text cannot inject control sequences
    stream.flush()
