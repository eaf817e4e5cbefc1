"""Prompt caches with correct digests and wrong content are read, restored, and continued."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np

import localllm
from localllm.plan import BLOCK
from localllm.saved import prompt_cache
from tests.fuzz import fence, values
from tests.fuzz.case import OURS, Case, Wrong
from tests.localllm.support import write_model

TOKENS = 200
_TYPES = (("f16", "f16"), ("q8_0", "q4_0"), ("fp8", "bf16"))
_START = struct.Struct("<8sII")
_DIGEST = 32


class _Good(NamedTuple):
    """A valid prompt cache of a model with one pair of KV cache types."""

    model: localllm.Model
    header: dict[str, Any]
    body: bytes  # the stored tokens and KV cache blocks


class Kind:
    together: ClassVar[int] = 100
    seconds: ClassVar[float] = 30.0

    def __init__(self, home: Path) -> None:
        fence.install()
        model = write_model(home / "model.gguf", context=300)
        self._good = [_good(model, home / "cache", keys, cells) for keys, cells in _TYPES]

    def make(self, random: Random, folder: Path) -> Case:
        good = random.choice(self._good)
        header, body = json.loads(json.dumps(good.header)), bytearray(good.body)
        changes = [_change_header(random, header) for _ in range(random.choice((0, 1, 1, 2)))]
        for _ in range(random.choice((0, 0, 1, 3, 300)) if changes else random.choice((1, 3, 300))):
            at, size = random.randrange(len(body)), random.choice((1, 2, 4))
            body[at : at + size] = bytes([random.choice((0xFF, 0x7F, 0x80, 0x7C, random.randrange(256)))] * size)
            del body[len(good.body) :]
        if random.random() < 0.2:
            at, token = 4 * random.randrange(TOKENS), random.choice((-1, good.model.vocabulary, 2**31 - 1, 0))
            struct.pack_into("<i", body, at, token)
            changes.append(f"token at {at} = {token}")
        data = _file(random, header, _fitted(random, header, bytes(body)))
        if random.random() < 0.1:
            data = values.damage(random, data, random.choice((16, 200, None)))
            changes.append("bytes")
        (folder / "cache").write_bytes(data)
        return Case(tuple(changes) or ("cache blocks",), lambda: use(folder / "cache", good.model))


def _good(model: Path, path: Path, keys: str, cells: str) -> _Good:
    opened = localllm.load(model, threads=1, ctx_size=300, cache_type_k=keys, cache_type_v=cells, force=True)
    session = opened.session()
    ids = np.random.RandomState(1).randint(0, opened.vocabulary, TOKENS).tolist()
    session.evaluate(ids, logits=False)
    path.unlink(missing_ok=True)
    prompt_cache.save(path, opened, session.sequence, [{"role": "user", "content": "hi"}])
    session.close()
    data = path.read_bytes()
    length = _START.unpack_from(data)[2]
    text, body = data[_START.size : _START.size + length], data[_START.size + length : -_DIGEST]
    return _Good(opened, json.loads(text), body)


def _change_header(random: Random, header: dict[str, Any]) -> str:
    name = random.choice(list(header) or ["tokens"])
    if name in ("block_bytes", "first_blocks") and random.random() < 0.7 and isinstance(header[name], list):
        items, at = header[name], random.randrange(max(1, len(header[name])))
        items[at : at + 1] = [random.choice((0, 1, 3, values.integer(random), None, 1.5))] * random.choice((0, 1, 1, 2))
    elif name == "tokens" and random.random() < 0.7:
        header[name] = random.choice((0, 1, 63, 64, 128, 192, 199, 201, 256, 300, 301, 2**30))
    elif name == "messages" and random.random() < 0.5:
        role, content = random.choice(("user", "system", "x", 1)), random.choice(("a", 1, None, "\x1b[2J"))
        header[name] = [{"role": role, "content": content}] * random.choice((1, 2, 1000))
    else:
        return values.change_json(random, header)
    return f"{name} = {str(header[name])[:80]}"


def _fitted(random: Random, header: dict[str, Any], body: bytes) -> bytes:
    """Return the body, usually with the length that the header requires, so that a wrong header passes size checks."""
    if random.random() < 0.3:
        return body
    try:
        count, kinds = header["tokens"], zip(header["block_bytes"], header["first_blocks"], strict=False)
        size = 4 * count + sum(block * max(0, count // BLOCK - first) for block, first in kinds)
    except (KeyError, TypeError):
        return body
    return (body + bytes(size))[:size] if isinstance(size, int) and 0 <= size < 1 << 22 else body


def _file(random: Random, header: dict[str, Any], body: bytes) -> bytes:
    text = values.json_text(random, header)
    length = random.choice((*(len(text),) * 30, 0, 2**32 - 1))
    data = _START.pack(prompt_cache.MAGIC, prompt_cache.VERSION, length) + text + body
    return data + (hashlib.blake2b(data, digest_size=_DIGEST).digest() if random.random() < 0.97 else bytes(_DIGEST))


def use(path: Path, model: localllm.Model) -> str:
    """Restore a file into a session that is not empty, and evaluate one more token."""
    session = model.session()
    try:
        session.evaluate([1, 2, 3], logits=False)
        kept = prompt_cache.read_prompt_cache(path, model)
        if any(not 0 <= token < model.vocabulary for token in kept.tokens):
            raise Wrong("tokens outside of the vocabulary were taken")
        try:
            prompt_cache.restore(kept, model, session.sequence)
        except OURS:
            if session.length:
                raise Wrong("the session holds something after a restore that failed") from None
            raise
        if session.tokens != (kept.tokens if not kept.problem else []):
            raise Wrong("the session holds other tokens than the file")
        if session.length < model.context:
            logits = session.evaluate([1], logits=False)
            if not np.isfinite(logits).all():
                raise Wrong("logits that are not finite out of a cache that was taken")
        return "restored" if not kept.problem else "text only"
    finally:
        session.close()
        if model.pool.free_blocks != model.pool.blocks:
            raise Wrong("blocks of the cache are lost")
