"""Convert the tokenizer of a Hugging Face folder to GGUF keys: tokens, types, scores or merges, special tokens, chat
templates. Then both tokenizers encode a text, and a note reports different ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.confined import Confined, ConfinedError, folder_tokenizer
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.jsonfile import objects, read_json, steps
from localllm.convert.pretokenizer import pre_tokenizer_name
from localllm.convert.sentencepiece import read_pieces
from localllm.convert.special import special_keys
from localllm.convert.templates import template_keys
from localllm.printable import printable
from localllm.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types in GGUF files
SPACE = "\u2581"
_ADDED_SCORE, _PADDING_SCORE = -1000.0, -10000.0  # as in llama.cpp's files; text never merges into such a token
_LOOKS_SPECIAL = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
_SPECIAL_TEXTS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")  # not marked as control tokens in some folders
_CHECK = (
    "Hello, World! It's 12345 o'clock; we'LL see...\n\n\tdef f(x_1):\n        return x_1 ** 2  # two\r\n"
    "Über naïve façade – 3.14159 €100 日本語のテキスト и русский текст العربية हिन्दी 🙂👍🏽 \u00a0 end   "
)


@dataclass(frozen=True, slots=True)
class TokenizerKeys:
    keys: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(slots=True)
class Tokens:
    """The three arrays of a GGUF vocabulary; ids that the folder does not name are padding."""

    texts: list[str]
    types: list[int]
    scores: list[float]

    @classmethod
    def padding(cls, count: int) -> Tokens:
        return cls([f"[PAD{i}]" for i in range(count)], [UNUSED] * count, [_PADDING_SCORE] * count)

    def put(self, i: int, text: str, kind: int, score: float) -> None:
        """Set token i; a token beyond the rows of the embedding has no weights and is dropped."""
        if i < len(self.texts):
            self.texts[i], self.types[i], self.scores[i] = text, kind, score


def tokenizer_keys(folder: Path, config: HfConfig, rows: int) -> TokenizerKeys:
    """Return `tokenizer.*` for an embedding with this many rows; ConvertError for an unsupported tokenizer."""
    fast = _optional(folder / "tokenizer.json")
    settings = _optional(folder / "tokenizer_config.json")
    model = fast.get("model") or {}
    if not isinstance(model, dict):
        raise ConvertError(f"{folder / 'tokenizer.json'}: model is not an object; download it again")
    pieces = folder / "tokenizer.model"
    by_bytes = bool(fast) and not model.get("byte_fallback")
    if pieces.is_file() and not by_bytes:
        keys = _from_pieces(pieces, fast, settings, folder, rows)
    elif not fast:
        raise ConvertError(
            f"{folder}: holds no tokenizer.json and no tokenizer.model; load its tokenizer with transformers "
            "(AutoTokenizer) and save it into the folder"
        )
    elif model.get("type") != "BPE":
        raise ConvertError(
            f"{folder / 'tokenizer.json'}: is a {printable(str(model.get('type')))} model; supported: BPE"
        )
    else:
        make = _from_bytes if by_bytes else _from_merges
        keys = make(folder, fast, model, settings, rows)
    keys |= special_keys(folder, fast, settings, config, keys)
    keys |= template_keys(folder, settings)
    tokenizer = Tokenizer.from_metadata(keys)
    return TokenizerKeys(keys, _differences(folder / "tokenizer.json", tokenizer) if fast else ())


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _from_pieces(
    path: Path, fast: Mapping[str, Any], settings: Mapping[str, Any], folder: Path, rows: int
) -> dict[str, Any]:
    """Convert a SentencePiece model. Its tokenizer.json, if present, determines the prefix of a text."""
    pieces = read_pieces(path)
    tokens = Tokens.padding(rows)
    for i, (text, kind, score) in enumerate(zip(pieces.texts, pieces.types, pieces.scores, strict=True)):
        tokens.put(i, text, kind, score)
    _add(tokens, folder, fast, settings)
    prefix = _space_prefix(fast) if fast else pieces.space_prefix
    return _spm_keys(tokens, prefix)


def _from_merges(
    folder: Path, fast: Mapping[str, Any], model: Mapping[str, Any], settings: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Convert a SentencePiece vocabulary from tokenizer.json only: tokens that are merged earlier get higher scores."""
    tokens = Tokens.padding(rows)
    rank: dict[str, int] = {}
    for i, merge in enumerate(_merges(folder, model)):
        rank.setdefault(merge[0] + merge[1], i)
    unknown = model.get("unk_token")
    for text, i in _vocabulary(folder, model, rows):
        kind = UNKNOWN if text == unknown else BYTE if _is_byte(text) else NORMAL
        tokens.put(i, text, kind, -float(rank.get(text, len(rank))) if kind == NORMAL else 0.0)
    _add(tokens, folder, fast, settings)
    return _spm_keys(tokens, _space_prefix(fast))


def _from_bytes(
    folder: Path, fast: Mapping[str, Any], model: Mapping[str, Any], settings: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Convert a vocabulary of byte-level BPE."""
    tokens = Tokens.padding(rows)
    for text, i in _vocabulary(folder, model, rows):
        tokens.put(i, text, NORMAL, 0.0)
    _add(tokens, folder, fast, settings)
    try:
        pre = pre_tokenizer_name(fast.get("pre_tokenizer"), model.get("ignore_merges") is True)
    except ConvertError as error:
        raise ConvertError(f"{folder}: {error}") from None
    escaped = ((left.replace(" ", "Ġ"), right.replace(" ", "Ġ")) for left, right in _merges(folder, model))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens.texts,
        "tokenizer.ggml.token_type": np.array(tokens.types, np.int32),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in escaped],
    }


def _spm_keys(tokens: Tokens, space_prefix: bool) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens.texts,
        "tokenizer.ggml.scores": np.array(tokens.scores, np.float32),
        "tokenizer.ggml.token_type": np.array(tokens.types, np.int32),
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def _vocabulary(folder: Path, model: Mapping[str, Any], rows: int) -> list[tuple[str, int]]:
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise ConvertError(f"{folder / 'tokenizer.json'}: model.vocab is not an object of tokens; download it again")
    for text, i in vocabulary.items():
        if type(i) is not int or not 0 <= i < rows:
            raise ConvertError(
                f"{folder / 'tokenizer.json'}: token '{printable(text)}' has the id {printable(str(i))}, but the "
                f"embedding has {rows} rows; tokenizer and weights do not belong together"
            )
    return list(vocabulary.items())


def _merges(folder: Path, model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs, best first; older files write a pair as one text with a space."""
    merges = model.get("merges")
    pairs = [m.split(" ") if isinstance(m, str) else m for m in merges] if isinstance(merges, list) else [None]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ConvertError(f"{folder / 'tokenizer.json'}: model.merges is not a list of pairs; download it again")
    return [(pair[0], pair[1]) for pair in pairs if pair]


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _add(tokens: Tokens, folder: Path, fast: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Add the added tokens, which override the vocabulary's, from every file that lists any, the most reliable last."""
    listed: dict[int, tuple[str, bool]] = {}
    for text, i in _optional(folder / "added_tokens.json").items():
        if type(i) is int and i >= 0:
            listed[i] = (text, False)
    decoder = settings.get("added_tokens_decoder")
    entries = [{"id": i, **e} for i, e in decoder.items() if isinstance(e, dict)] if isinstance(decoder, dict) else []
    for entry in (*entries, *objects(fast.get("added_tokens"))):
        number, content = str(entry.get("id")), entry.get("content")
        if not number.isdecimal() or len(number) > 9 or not isinstance(content, str):
            raise ConvertError(f"{folder}: an added token has no id or no content; download the tokenizer again")
        listed[int(number)] = (content, entry.get("special") is True)
    for i, (text, special) in listed.items():
        known = tokens.types[i] if i < len(tokens.types) else UNUSED
        if known == UNKNOWN:
            tokens.put(i, text, UNKNOWN, 0.0)
        elif special or _looks_special(text):
            tokens.put(i, text, CONTROL, _ADDED_SCORE)
        else:
            tokens.put(i, text.replace(SPACE, " "), USER_DEFINED, _ADDED_SCORE)


def _looks_special(text: str) -> bool:
    return text in _SPECIAL_TEXTS or any(text.startswith(begin) and text.endswith(end) for begin, end in _LOOKS_SPECIAL)


def _space_prefix(fast: Mapping[str, Any]) -> bool:
    """Return whether the normalizer or pre-tokenizer of tokenizer.json puts a space before a text."""
    for part, name in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        for step in steps(fast.get(part), name):
            if step.get("type") == "Prepend":
                return True
            if step.get("type") == "Metaspace":
                scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
                return bool(scheme != "never")
    return False


def _differences(path: Path, ours: Tokenizer) -> tuple[str, ...]:
    """Compare both tokenizers on a text; return a note if ids or the tokens around the text differ."""
    json = path.read_text(encoding="utf-8")
    try:
        with Confined(folder_tokenizer.__name__, folder_tokenizer.limits(json)) as confined:
            theirs = confined.call({"json": json, "text": _CHECK})
    except ConfinedError as error:
        raise ConvertError(f"{path}: the folder's tokenizer fails on a text of a few lines: {error}") from None
    if "error" in theirs:
        raise ConvertError(f"{path}: cannot be read: {printable(theirs['error'], 200)}")
    if ours.encode(_CHECK, add_special=False) != theirs["plain"]:
        return ("the file's tokenizer gives other ids than the folder's for a text of many scripts",)
    given, added = ours.encode(_CHECK), len(theirs["whole"]) - len(theirs["plain"])
    if given != theirs["whole"]:
        return (f"around a text the folder's tokenizer puts {added} special tokens, the file's "
                f"{len(given) - len(theirs['plain'])}",)  # fmt: skip
    return ()
