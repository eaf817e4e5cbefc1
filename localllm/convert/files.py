"""Open the files of a checkpoint. The files are untrusted, so only regular files of limited size are read, and no link
may lead out of the folder.

A link such as `chat_template.jinja -> /etc/passwd` would copy a private file into a model that the user may share. The
Hugging Face cache stores files as links to `blobs` of the same model; these links are followed.
"""

from __future__ import annotations

import io
from pathlib import Path

from localllm.base.files.regular import inside, open_regular, read_regular
from localllm.convert.errors import ConvertError

MOST_BYTES = 1 << 28  # the largest known tokenizer.json has 35 MB


def open_file(path: Path) -> io.FileIO:
    """Open a file of a checkpoint; raise ConvertError if it cannot be opened or a link leaves the folder."""
    check_inside(path)
    try:
        return open_regular(path)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be opened: {error.strerror or error}") from None


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of a checkpoint; raise ConvertError as in `open_file`, or if the file exceeds `most`
    bytes."""
    check_inside(path)
    try:
        return read_regular(path, most)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_lines(path: Path, most: int = MOST_BYTES) -> list[str]:
    """Return the lines of a UTF-8 file of a checkpoint, without line ends; raise ConvertError as in `read_file`."""
    try:
        text = read_file(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path}: cannot be read: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def check_inside(path: Path, folder: Path | None = None) -> None:
    """Raise ConvertError if links lead out of `folder`, which defaults to the folder that contains the path."""
    if not inside(path, folder or path.parent):
        raise ConvertError(f"{path}: is a link to a file outside the folder; replace it by the file itself")
