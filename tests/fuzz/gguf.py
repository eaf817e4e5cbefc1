"""Models with wrong metadata are loaded, evaluated, and used to tokenize and generate, with fenced buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

import localllm
from localllm import quant
from localllm.models import ARCHITECTURES
from tests.fuzz import fence, values
from tests.fuzz.case import OURS, Case, Wrong
from tests.fuzz.image import ARRAY, BOOL, FLOAT_TYPES, INTEGER_TYPES, STRING, Array, Entry, Image, Key
from tests.fuzz.models import bases, odd

# Few shapes, because attention kernels compile for a second per shape.
_CACHES = (*(("f16", "f16"),) * 4, ("q8_0", "q4_0"), ("bf16", "fp8"), ("q5_1", "q5_0"), ("q4_1", "q8_0"))
_SENTENCES = (
    "hello <|im_start|> é \x00 world   x",
    "the theatre\n\n  in 1234",
    "<0x41></s>\u2581 🙂\ud7ff",
    " ",
    "a" * 300,
)
_NAMES = (
    *("rope_freqs.weight", "rope_factors_long.weight", "output.bias", "output.scale", "blk.0.attn_sinks.weight"),
    *("blk.0.exp_probs_b.bias", "blk.0.attn_q_norm.weight", "blk.0.attn_qkv.weight", "blk.0.ffn_gate_inp.weight"),
    *("blk.0.ffn_up_shexp.weight", "blk.9.attn_q.weight", "x", ""),
)
_UNKNOWN_TYPES = (4, 5, 31, 36, 38, 43, 99, 2**32 - 1)


class Kind:
    together: ClassVar[int] = 10
    seconds: ClassVar[float] = 60.0  # includes the compilation of kernels for new shapes

    def __init__(self, home: Path) -> None:
        fence.install()
        self._bases = list(bases(home).values())
        for image in self._bases[:1]:  # warm-up: compile and load the kernels that all models share
            (home / "warm.gguf").write_bytes(image.encode())
            use(home / "warm.gguf", Random(0))

    def make(self, random: Random, folder: Path) -> Case:
        path, changes = folder / "model.gguf", []
        if random.random() < 0.25:
            image, about = odd(random)
            changes.append(about)
        else:
            image = random.choice(self._bases).copy()
            changes.append(image.get("general.name").decode())
            for change in random.choice(_MIXES):
                for _ in range(random.choice((1, 1, 1, 2, 3))):
                    changes.append(change(random, image))
        data = image.encode()
        if len(changes) == 1 and "of " not in changes[0]:
            data = values.damage(random, data, len(data) - len(image.data))
            changes.append("bytes")
        path.write_bytes(data)
        return Case(tuple(changes), lambda: use(path, random))


# -- changes -------------------------------------------------------------------------------------------------------


def change_key(random: Random, image: Image) -> str:
    """Change a metadata key that the model reads: give it another value, type, name or a value per layer, or
    remove it.
    """
    own = [i for i, key in enumerate(image.keys) if not key.name.startswith((b"tokenizer.ggml", b"general.name"))]
    if not own:
        return "no keys"
    at, how = random.choice(own), random.random()
    key = image.keys[at]
    if how < 0.07:
        del image.keys[at]
        return f"{_shown(key.name)} removed"
    if how < 0.15:
        kind = random.choice((*INTEGER_TYPES, *FLOAT_TYPES, STRING))
        new = Key(key.name, kind, value_of(random, kind, 1))
    elif how < 0.22 and key.kind in INTEGER_TYPES | FLOAT_TYPES.keys():
        count = random.choice((0, 1, 2, 3, 4))
        items = [key.value if random.random() < 0.6 else value_of(random, key.kind, key.value) for _ in range(count)]
        new = Key(key.name, ARRAY, Array(key.kind, items))
    elif how < 0.25:
        new = Key(random.choice((key.name + b"x", b"", values.stored(values.text(random)))), key.kind, key.value)
    else:
        new = Key(key.name, key.kind, value_of(random, key.kind, key.value))
    image.keys[at] = new
    return f"{_shown(new.name)} = {str(new.value)[:60]}"


def change_tokenizer(random: Random, image: Image) -> str:
    own = [i for i, key in enumerate(image.keys) if key.name.startswith(b"tokenizer.")]
    if not own:
        return "no tokenizer"
    at = random.choice(own)
    key = image.keys[at]
    if random.random() < 0.1:
        del image.keys[at]
        return f"{_shown(key.name)} removed"
    image.keys[at] = new = Key(key.name, key.kind, value_of(random, key.kind, key.value))
    return f"{_shown(key.name)} = {str(new.value)[:60]}"


def change_tensor(random: Random, image: Image) -> str:
    if not image.entries:
        return "no tensors"
    at, how = random.randrange(len(image.entries)), random.random()
    entry, other = image.entries[at], random.randrange(len(image.entries))
    if how < 0.35:
        image.entries[at] = new = entry._replace(sizes=_sizes(random, entry.sizes))
        return f"{_shown(entry.name)} sizes {new.sizes}"
    if how < 0.55:
        known = [f.type_id for f in quant.FORMATS.values()]
        image.entries[at] = new = entry._replace(kind=random.choice((*known, *_UNKNOWN_TYPES)))
        return f"{_shown(entry.name)} type {new.kind}"
    if how < 0.7:
        near = (image.entries[other].offset, len(image.data), len(image.data) - 32, entry.offset + 32)
        image.entries[at] = new = entry._replace(offset=random.choice((0, 1, 32, 2**63, 2**64 - 32, *near)))
        return f"{_shown(entry.name)} offset {new.offset}"
    if how < 0.8:
        image.entries[at], image.entries[other] = (
            entry._replace(name=image.entries[other].name),
            image.entries[other]._replace(name=entry.name),
        )
        return f"{_shown(entry.name)} swapped with {_shown(image.entries[at].name)}"
    if how < 0.88:
        del image.entries[at]
        return f"{_shown(entry.name)} removed"
    names = (random.choice(_NAMES).encode(), entry.name[:-3], image.entries[other].name, b"\x1b[31m\xff")
    image.entries[at] = new = Entry(random.choice(names), *entry[1:])
    return f"{_shown(entry.name)} renamed {_shown(new.name)}"


def change_counts(random: Random, image: Image) -> str:
    image.counts = (values.integer(random, len(image.entries)), values.integer(random, len(image.keys)))
    if random.random() < 0.3:
        image.counts, image.version = None, values.integer(random, 3)
    return f"counts {image.counts} version {image.version}"


def change_architecture(random: Random, image: Image) -> str:
    """Rename the metadata keys of an architecture to the keys of another architecture."""
    old, new = image.get("general.architecture"), random.choice(sorted(ARCHITECTURES)).encode()
    if not isinstance(old, bytes):  # an earlier change removed the key
        return "no architecture to change"
    image.keys = [
        key._replace(name=key.name.replace(old + b".", new + b".", 1)) if key.name.startswith(old + b".") else key
        for key in image.keys
    ]
    image.set("general.architecture", STRING, new)
    return f"architecture {_shown(new)}"


def change_numbers(random: Random, image: Image) -> str:
    """Put NaN, infinity and huge values into the weights."""
    data = bytearray(image.data)
    for _ in range(random.choice((1, 5, 50))):
        at, size = random.randrange(len(data)) & ~3, random.choice((2, 4, 64))
        data[at : at + size] = bytes([random.choice((0xFF, 0x7F, 0x7C, 0))]) * len(data[at : at + size])
    image.data = bytes(data)
    return "weights"


Change = Callable[[Random, Image], str]
_MIXES: tuple[tuple[Change, ...], ...] = (
    *((change_key,),) * 6,
    *((change_tensor,),) * 3,
    *((change_tokenizer,),) * 4,
    (change_key, change_tokenizer),
    (change_key, change_tensor),
    (change_counts,),
    (change_architecture, change_key),
    (change_numbers,),
    (),  # bytes
    (),
)


def value_of(random: Random, kind: int, old: Any) -> Any:
    """Return a hostile value of a GGUF type."""
    if kind in FLOAT_TYPES:
        return values.real(random)
    if kind == BOOL:
        return random.choice((0, 1, 2, 255))
    if kind == STRING:
        return random.choice((b"\xff\xfe", values.stored(values.text(random))))
    if kind == ARRAY:
        return _array(random, old) if isinstance(old, Array) else Array(4, [1])
    return values.integer(random, int(old) if isinstance(old, int | float) and old == old else 0)


def _array(random: Random, old: Array) -> Array:
    items, how = list(old.items), random.random()
    if how < 0.15:
        return Array(old.kind, items[: random.randrange(len(items) + 1)])
    if how < 0.25:
        return Array(old.kind, items * 2)
    if how < 0.3:
        return Array(old.kind, [])
    if how < 0.4:
        kind = random.choice((4, 5, 6, 7, STRING, ARRAY))
        return Array(kind, [value_of(random, kind, 1) for _ in range(min(len(items), 50))])
    for _ in range(random.choice((1, 1, 3, 10))):
        if items:
            at, twin = random.randrange(len(items)), items[random.randrange(len(items))]
            fresh = value_of(random, old.kind, items[at])
            items[at] = random.choice((fresh, fresh, twin, twin + b" " + twin if old.kind == STRING else fresh))
    return Array(old.kind, items)


def _sizes(random: Random, old: tuple[int, ...]) -> tuple[int, ...]:
    how = random.random()
    if how < 0.5:
        return tuple(n if random.random() < 0.5 else values.integer(random, n) for n in old)
    if how < 0.7:
        return (*old, random.choice((0, 1, 1, 2)))
    return random.choice((old[::-1], (), old[:1], (*old, 1, 1, 1, 1), (2**32, 2**32), (2**63, 2)))


def _shown(name: bytes) -> str:
    return name.decode("latin1")


# -- use -----------------------------------------------------------------------------------------------------------


def use(path: Path, random: Random) -> str:
    """Load a model, evaluate, tokenize and generate. Raise Wrong for an impossible result."""
    keys, cells = random.choice(_CACHES)
    context, threads = random.choice((0, 1, 2, 63, 64, 65, 130, 256, 700)), random.choice((1, 1, 2, 3))
    loaded = localllm.load(
        path, backend="cpu", threads=threads, ctx_size=context, cache_type_k=keys, cache_type_v=cells, force=True
    )
    with loaded as model:
        if model.maybe_tokenizer is not None:
            _tokenize(model)
        if model.plan is None:
            return "vocabulary only"
        count = min(model.context, random.choice((1, 2, 3, 5, 17, 40, 70, 130)))
        ids = [random.randrange(model.vocabulary) for _ in range(count)]
        logits = _evaluate(model, ids)
        _refuses_foreign_tokens(model)
        for _ in model.generate(ids[: max(1, count // 2)], max_tokens=3, temperature=random.choice((0.0, 1.0)), seed=1):
            pass
        if not np.array_equal(_evaluate(model, ids), logits, equal_nan=True):
            raise Wrong("other logits on memory that was used before: something reads what nobody wrote")
        return "ran" if np.isfinite(logits).all() else "ran, not finite"


def _evaluate(model: localllm.Model, ids: list[int]) -> np.ndarray:
    """Return the logits after a prompt and after one more token, in a new session."""
    session = model.session()
    try:
        found = [session.evaluate(ids, logits=len(ids) <= 16).copy()]
        if session.length < model.context:
            found.append(session.evaluate(ids[:1], logits=False).copy())
    finally:
        session.close()
    return np.concatenate(found)


def _refuses_foreign_tokens(model: localllm.Model) -> None:
    session = model.session()
    try:
        for token in (model.vocabulary, -1, 2**31):
            try:
                session.evaluate([token], logits=False)
            except (*OURS, OverflowError):
                continue
            raise Wrong(f"token {token} was taken, which is outside of the vocabulary")
    finally:
        session.close()


def _tokenize(model: localllm.Model) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    for sentence in _SENTENCES:
        for special in (False, True):
            ids = model.tokenize(sentence, parse_special=special)
            if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
                raise Wrong(f"ids {min(ids)} to {max(ids)} in a vocabulary of {tokenizer.vocab_size}")
            model.detokenize(ids)
    for token in range(min(tokenizer.vocab_size, 300)):
        tokenizer.piece(token)
