"""A conversation in a file: its messages, its tokens, and its KV cache blocks.

The file consists of a magic number, a version, a JSON header with its length, the tokens (int32), the full cache blocks
layer by layer as the backend exports them, and a digest of everything before. Tokens after the last full block are
evaluated again on loading. The file is untrusted: sizes are checked against the file size before reading, and the
digest is verified before any change. The contents of pictures and sounds in the messages (`attachments.py`) are behind
the blocks; a file with contents has version 2.

Ids of media tokens hold in one process only. The file has -1 in their place, and in its header the key and the layout
of each picture or sound (`saved_media.py`).

`packed` and `unpacked` are the same in memory, for sending a sequence to another process. They include the last block
if it is partly filled.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.base.errors import LocalLLMError
from localllm.base.files.outputs import new_file
from localllm.base.files.regular import open_regular
from localllm.base.notices import Notice, Setting, said
from localllm.engine import Placed, SequenceRows
from localllm.engine.paging import CacheSequence
from localllm.loading.loaded_model import LoadedModel
from localllm.plan import BLOCK
from localllm.saved.attachments import HASH, MOST_FILE, MOST_ROWS, NOTHING, Attachments, Lost
from localllm.saved.saved_media import MOST_MEDIA, header_of, with_ids

MAGIC = b"LOCALLLM"
VERSION, WITH_CONTENTS = 1, 2
_START = struct.Struct("<8sII")  # magic, version, header length in bytes
_DIGEST = 32
_MAX_HEADER = 16 << 20  # maximum header size in bytes; it contains the messages
_MAX_PACKED_HEADER = 1 << 20  # the same without messages, with the digest
_MAX_TOKENS = 1 << 30
_CHUNK = 8 << 20  # maximum bytes read or written at a time
_ROLES = ("system", "user", "assistant")

Messages = Sequence[dict[str, str]]


class CacheFileError(LocalLLMError):
    """A file cannot be written, or is not a valid conversation file; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A validated conversation file."""

    path: Path
    messages: list[dict[str, str]]
    tokens: list[int]  # the ids of media tokens hold while `media` exists
    media: list[Placed]
    problem: str  # why the cache is unusable although the text is usable; "" if both are usable
    attachments: Any  # rows of `attachments.py`
    contents: Mapping[str, tuple[int, int]]  # by hash: the offset and the size of each content
    _blocks: int  # number of blocks; the last one may be partly filled
    _offset: int  # offset of the first block
    _own: bool  # whether links and files of other users are refused
    _data: bytes | None  # the content, if it is not in a file


def save(
    path: Path,
    model: LoadedModel,
    sequence: CacheSequence,
    messages: Messages,
    overwrite: bool = False,
    own: bool = False,
    attachments: Attachments = NOTHING,
) -> int:
    """Write the content of a sequence and return the file size in bytes. On failure, the old file is kept.

    A new file is only readable by this user; with `own`, so is a replaced file. Raises CacheFileError for an existing
    file of another format, OutputError for an existing conversation without `overwrite`.
    """
    check_replaceable(path)
    blocks = sequence.length // BLOCK
    text = _header_of(model, sequence, messages, blocks, attachments)
    if len(text) > _MAX_HEADER:
        raise CacheFileError(f"{path}: the conversation is too long to save: {len(text)} bytes of text")
    with new_file(path, overwrite, 0o600, keep_mode=not own) as file:
        _write(file.write, text, model, sequence, blocks, attachments.contents)
        return file.size


def packed(model: LoadedModel, sequence: CacheSequence) -> bytes:
    """Return the content of a sequence with all its blocks."""
    blocks = -(-sequence.length // BLOCK)
    parts: list[bytes] = []
    text = _header_of(model, sequence, (), blocks)
    _write(lambda data: parts.append(bytes(data)), text, model, sequence, blocks)
    return b"".join(parts)


def unpacked(data: bytes, model: LoadedModel) -> Kept:
    """Check what another process packed; raise CacheFileError if it cannot be used."""
    name = Path("received blocks")
    kept = _checked(name, BytesIO(data), len(data), model, data=data)
    if kept.problem:
        raise CacheFileError(f"{name}: {kept.problem}")
    return kept


def packed_bytes(model: LoadedModel, tokens: int) -> int:
    """Return an upper limit of the size of a packed sequence of text."""
    sizes = zip(model.executable.block_bytes, _first_blocks(model, tokens), strict=True)
    blocks = -(-tokens // BLOCK)
    return _MAX_PACKED_HEADER + 4 * tokens + sum(size * (blocks - first) for size, first in sizes)


def content_of(kept: Kept, key: str) -> bytes:
    """Return a content of a file by its hash, which the caller compares. Raises Lost."""
    if key not in kept.contents:
        raise Lost("its content is missing")
    offset, size = kept.contents[key]
    try:
        with open_regular(kept.path, kept._own) as file:
            file.seek(offset)
            return _exactly(kept.path, file, size)
    except (OSError, CacheFileError) as error:
        raise Lost(f"cannot be read: {error}") from None


def _header_of(
    model: LoadedModel, sequence: CacheSequence, messages: Messages, blocks: int, attachments: Attachments = NOTHING
) -> bytes:
    """Return the header. Raises CacheFileError if blocks are missing, in whose place others would be written."""
    executable, tokens = model.executable, sequence.tokens
    if not sequence.keeps(_evaluated(len(tokens), blocks)):
        problem = "the cache no longer has all blocks of their window"
        raise CacheFileError(f"{len(tokens)} tokens cannot be saved: {problem}; evaluate them again first")
    header = {
        "program": _version(),
        "model": str(model.file.metadata.get("general.name", model.file.path.name))[:200],
        "identity": model.identity,
        "layout": executable.cache_layout,
        "block_bytes": list(executable.block_bytes),
        "first_blocks": _first_blocks(model, _evaluated(len(tokens), blocks)),
        "tokens": len(tokens),
        "messages": list(messages),
        "media": [header_of(each) for each in sequence.media],
        **({"blocks": blocks} if blocks != len(tokens) // BLOCK else {}),
        "attachments": list(attachments.rows),
        "contents": [[key, len(data)] for key, data in attachments.contents.items()],
    }
    return json.dumps(header, ensure_ascii=True).encode()


def _write(
    out: Callable[[bytes | memoryview], object],
    text: bytes,
    model: LoadedModel,
    sequence: CacheSequence,
    blocks: int,
    contents: Mapping[str, bytes] = NOTHING.contents,
) -> None:
    """Write the header `text`, the tokens and the blocks of a sequence, the contents, and the digest."""
    executable, tokens = model.executable, sequence.tokens
    digest = hashlib.blake2b(digest_size=_DIGEST)

    def write(data: bytes | memoryview) -> None:
        digest.update(data)
        out(data)

    write(_START.pack(MAGIC, WITH_CONTENTS if contents else VERSION, len(text)))
    write(text)
    write(np.maximum(np.array(tokens, "<i4"), -1).tobytes())
    firsts = _first_blocks(model, _evaluated(len(tokens), blocks))
    for layer, start, stop in _pieces(executable.block_bytes, firsts, blocks):
        blocks_of = _table(model, sequence, layer)[start:stop]
        write(np.ascontiguousarray(executable.read_blocks(layer, blocks_of)).data)
    for content in contents.values():
        write(content)
    out(digest.digest())


def check_replaceable(path: Path) -> None:
    """Raise CacheFileError if the file is neither a conversation nor empty."""
    if path.exists() and not _is_ours(path):
        raise CacheFileError(f"{path}: exists and is not a localllm conversation file; give another name")


def read_prompt_cache(path: Path, model: LoadedModel, own: bool = False) -> Kept:
    """Check a file against this model; raise CacheFileError if it cannot be used.

    `own`: refuse links and files of other users, and make the file private. A server uses this for its folders.
    """
    try:
        with open_regular(path, own) as file:
            if own and hasattr(os, "fchmod") and os.fstat(file.fileno()).st_mode & 0o077:
                os.fchmod(file.fileno(), 0o600)  # earlier versions let other users read the file
            return _checked(path, file, os.fstat(file.fileno()).st_size, model, own)
    except OSError as error:
        raise CacheFileError(f"{path}: cannot be read: {error.strerror or error}") from None


def loaded(kept: Kept, model: LoadedModel) -> CacheSequence:
    """Return a new sequence with the content of `kept`. Raises CacheFileError, and CacheFull."""
    sequence = model.engine.add()
    try:
        restore(kept, model, sequence)
    except BaseException:
        sequence.free()
        raise
    return sequence


def restore(kept: Kept, model: LoadedModel, sequence: CacheSequence) -> None:
    """Load `kept` into `sequence` and evaluate the tokens after the last full block. On failure the
    sequence is empty."""
    model.engine.truncate(sequence, 0)
    if kept.problem:
        return
    executable = model.executable
    blocks = kept._blocks
    there = kept.tokens[: _evaluated(len(kept.tokens), blocks)]
    if model.engine.opened(there) is not there:  # a partial encoder text is useless
        blocks, there = 0, []
    try:
        with BytesIO(kept._data) if kept._data is not None else open_regular(kept.path, kept._own) as file:
            file.seek(kept._offset)
            with model.engine.taking(sequence, there):
                for layer, start, stop in _pieces(executable.block_bytes, _first_blocks(model, len(there)), blocks):
                    size = executable.block_bytes[layer]
                    content = np.frombuffer(_exactly(kept.path, file, (stop - start) * size), np.uint8)
                    blocks_of = _table(model, sequence, layer)[start:stop]
                    executable.write_blocks(layer, blocks_of, content.reshape(stop - start, size))
    except OSError as error:
        raise CacheFileError(f"{kept.path}: cannot be read: {error.strerror or error}") from None
    except BackendError as error:
        raise CacheFileError(Notice(f"{kept.path}: ", said(error))) from None
    rest = kept.tokens[len(there) :]
    if min(rest, default=0) < 0:  # only the client has the picture; its tokens are evaluated with the next prompt
        model.engine.truncate(sequence, sequence.length)
    elif rest:
        model.engine.step([SequenceRows(sequence, rest, "none")])


def _checked(
    path: Path, file: BinaryIO, size: int, model: LoadedModel, own: bool = False, data: bytes | None = None
) -> Kept:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    if size < _START.size + _DIGEST:
        raise CacheFileError(f"{path}: not a localllm conversation file, or truncated: it has {size} bytes")
    start = _exactly(path, file, _START.size)
    magic, version, length = _START.unpack(start)
    if magic != MAGIC:
        raise CacheFileError(f"{path}: not a localllm conversation file")
    if version not in (VERSION, WITH_CONTENTS):
        raise CacheFileError(f"{path}: has format {version}, this program reads up to {WITH_CONTENTS}; save it again")
    if length > min(_MAX_HEADER, size - _START.size - _DIGEST):
        raise CacheFileError(f"{path}: is damaged: a header of {length} bytes in a file of {size}")
    text = _exactly(path, file, length)
    header = _header(path, text)
    count, kinds = header["tokens"], list(zip(header["block_bytes"], header["first_blocks"], strict=False))
    offset = _START.size + length + 4 * count
    blocks = header.get("blocks", count // BLOCK)
    end = offset + sum(size * max(0, blocks - first) for size, first in kinds)
    contents, expected = {}, end
    for key, each in header["contents"]:
        contents[key], expected = (expected, each), expected + each
    expected += _DIGEST
    if size != expected:
        raise CacheFileError(f"{path}: truncated or damaged: it has {size} bytes and should have {expected}")
    if header["identity"] != model.identity:
        named = json.dumps(header["model"], ensure_ascii=False)[:80]
        raise CacheFileError(f"{path}: made with another model, or another version of it ({named}); give another file")
    if count > model.context:
        problem = f"{path}: holds {count} tokens, but the context is {model.context}"
        raise CacheFileError(Notice(problem, "; raise ", Setting("ctx_size")))
    digest.update(start)
    digest.update(text)
    raw = _exactly(path, file, 4 * count)
    digest.update(raw)
    left = expected - offset - _DIGEST
    while left:
        part = _exactly(path, file, min(left, _CHUNK))
        digest.update(part)
        left -= len(part)
    if digest.digest() != _exactly(path, file, _DIGEST):
        raise CacheFileError(f"{path}: is damaged: its content does not match its digest; save it again")
    tokens = np.frombuffer(raw, "<i4")
    assert model.config is not None
    least = -1 if header["media"] else 0
    if count and not least <= int(tokens.min()) <= int(tokens.max()) < model.config.vocabulary:
        raise CacheFileError(f"{path}: is damaged: tokens outside the vocabulary")
    try:
        ids, media = with_ids(tokens.tolist(), header["media"], model.engine.pool.media, model.context)
        if any(1 < each.media.positions.shape[1] < model.engine.media.axes for each in media):
            raise ValueError("its media have no usable 'positions'")
    except ValueError as error:
        raise CacheFileError(f"{path}: is damaged: {error}") from None
    return Kept(
        path, header["messages"], ids, media, _misfit(header, model), header["attachments"], contents, blocks, offset,
        own, data,
    )  # fmt: skip


def _misfit(header: dict[str, Any], model: LoadedModel) -> str:
    """Return why the file's KV cache is unusable although its text is usable; "" if both are usable."""
    executable = model.executable
    if header["media"] and not model.engine.media.width:
        return "its cache has pictures or sound, which this model is loaded without"
    if header["program"] != _version():
        return f"its cache was made by version {header['program'][:40]}"
    count = header["tokens"]
    if header["first_blocks"] != _first_blocks(model, _evaluated(count, header.get("blocks", count // BLOCK))):
        return "its cache keeps a different window"
    if header["layout"] != executable.cache_layout or tuple(header["block_bytes"]) != executable.block_bytes:
        return f"its cache is {header['layout'][:80]}, this one {executable.cache_layout}"
    return ""


def _header(path: Path, text: bytes) -> dict[str, Any]:
    """Return the header after checking the type of every field."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise CacheFileError(f"{path}: is damaged: its header is not JSON") from None
    if isinstance(header, dict):
        for name in ("media", "attachments", "contents"):
            header.setdefault(name, [])  # earlier versions had none
    for name, good in _FIELDS.items():
        if not isinstance(header, dict) or not good(header.get(name)):
            raise CacheFileError(f"{path}: is damaged: its header has no usable {name!r}")
    count = header["tokens"]
    blocks = header.get("blocks", count // BLOCK)
    if type(blocks) is not int or blocks not in (count // BLOCK, -(-count // BLOCK)):
        raise CacheFileError(f"{path}: is damaged: its header has no usable 'blocks'")
    return dict(header)


def _count(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value <= limit


def _message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in _ROLES
        and isinstance(value["content"], str)
    )


def _content(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return isinstance(value[0], str) and bool(HASH.fullmatch(value[0])) and _count(value[1], MOST_FILE)


_FIELDS: dict[str, Any] = {
    "program": lambda v: isinstance(v, str),
    "model": lambda v: isinstance(v, str),
    "identity": lambda v: isinstance(v, str),
    "layout": lambda v: isinstance(v, str),
    "tokens": lambda v: _count(v, _MAX_TOKENS),
    "block_bytes": lambda v: isinstance(v, list) and len(v) <= 4096 and all(_count(n, 1 << 40) for n in v),
    "first_blocks": lambda v: isinstance(v, list) and len(v) <= 4096 and all(_count(n, _MAX_TOKENS) for n in v),
    "messages": lambda v: isinstance(v, list) and all(map(_message, v)),
    "media": lambda v: isinstance(v, list) and len(v) <= MOST_MEDIA and all(isinstance(each, dict) for each in v),
    "attachments": lambda v: True,  # checked by `restored`, because the conversation can be used without them
    "contents": lambda v: isinstance(v, list) and len(v) <= MOST_ROWS and all(map(_content, v)),
}


def _version() -> str:
    """Return the package version. It cannot be imported at module level because the package imports `Conversation`."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def _evaluated(tokens: int, blocks: int) -> int:
    """Return how many of the tokens are in the blocks."""
    return min(tokens, blocks * BLOCK)


def _first_blocks(model: LoadedModel, tokens: int) -> list[int]:
    """Return, per layer, the first block to save of a sequence: all blocks in the window and a few more."""
    pool, windowed = model.pool, model.pool.windowed
    return [(windowed if layer.window and windowed else pool).first_kept(tokens) for layer in model.layers]


def _table(model: LoadedModel, sequence: CacheSequence, layer: int) -> NDArray[np.int32]:
    """Return the physical blocks of a sequence in one layer, in order of position."""
    return sequence.tables()[-1 if model.layers[layer].window else 0]


def _pieces(block_bytes: Sequence[int], firsts: Sequence[int], blocks: int) -> Iterator[tuple[int, int, int]]:
    """Yield (layer, first block, end) in file order, each covering a bounded number of bytes."""
    for layer, (size, first) in enumerate(zip(block_bytes, firsts, strict=True)):
        step = max(1, _CHUNK // max(size, 1))
        for start in range(first, blocks, step):
            yield layer, start, min(start + step, blocks)


def _exactly(path: Path, file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise CacheFileError(f"{path}: truncated while being read")
    return data


def _is_ours(path: Path) -> bool:
    """Return whether a file may be overwritten: a conversation file or an empty one."""
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) in (MAGIC, b"")
    except OSError:
        return False
