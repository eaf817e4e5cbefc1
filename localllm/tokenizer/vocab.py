"""The vocabulary in GGUF metadata: token texts, types and scores, special tokens, flags.

Missing parts (defaults by tokenizer model, end-of-generation tokens, corrected token types) are completed as in
llama.cpp, so that both programs interpret a GGUF equally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.tokenizer.dna import shown_tokens
from localllm.tokenizer.errors import TokenizerError
from localllm.tokenizer.kinds import LETTERS, NO_TEXT_MODELS, PLAIN, SPACES, VOCAB_KINDS, VocabKind
from localllm.tokenizer.pretokenize import PreRule, nearest_known, pre_rule, unknown_rule

# Token types as bits: a token may be a control token in addition to the GGUF's type.
UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 2, 4, 8, 16, 32
SPECIAL = UNKNOWN | CONTROL | USER_DEFINED
HIDDEN = UNKNOWN | CONTROL  # not shown; recognized in text only on request
_KINDS = np.array([0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE], np.uint8)  # indexed by token type

_KEY = "tokenizer.ggml."
_REQUIRED_IN_RANGE = ("bos", "eos", "eot", "eom")  # ids that must be valid; other invalid ids are common and ignored

# Tokens recognized by their text if the GGUF gives no id; the first match is used.
_FIM_TEXTS: Mapping[str, tuple[str, ...]] = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")  # these tokens start the next file, so they end the generation
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
_TURN_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss: markers inside the answer
# If all tokens in `present` end generation, `token` does not, and gets the type `kind`.
_EXCEPTIONS: tuple[tuple[tuple[str, ...], str, int], ...] = (
    (("<|return|>", "<|call|>"), "<|end|>", USER_DEFINED),  # gpt-oss: `<|end|>` ends one of several messages
    (("<|return|>", "<|calls|>"), "<|end|>", USER_DEFINED),
    (("<|flush|>", "<|call|>"), "<|end|>", USER_DEFINED),
    (("<|flush|>", "<|calls|>"), "<|end|>", USER_DEFINED),  # solar-open
    (("<|tool_response>",), "</s>", NORMAL),  # gemma 4: `</s>` is an HTML tag
    (("<|plamo:eos|>",), "</s>", NORMAL),
)
_MASKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # token, key, substrings of its value
    ("<mask>", _KEY + "pre", ("jina-v2-de", "jina-v2-es", "jina-v2-code")),
    ("<mask>", "general.architecture", ("nomic-bert-moe", "jina-bert-v3")),
    ("[MASK]", "general.name", ("modern-bert",)),
)


@dataclass(frozen=True, slots=True)
class Vocab:
    """The validated input of `Tokenizer`. `kinds` contains one byte of type bits per token."""

    model: str  # a key of VOCAB_KINDS
    tokens: list[str]
    ids: dict[str, int]
    kinds: bytes
    scores: list[float]  # empty if the GGUF has no scores
    merges: Sequence[str]  # "left right", highest priority first; decoded on demand; empty without merges
    rule: PreRule | None  # pre-tokenizer, which splits text into words before merging; None without merges
    writes: str  # how token texts represent spaces and bytes: SPACES, LETTERS, ESCAPES or PLAIN
    bos: int | None
    eos: int | None
    unknown: int | None
    adds: Mapping[str, int]  # special-token ids to add, by name: "bos" before the text, "eos" or "seperator" after it
    add_space_prefix: bool
    merge_spaces: bool  # "t5": whether to collapse runs of spaces
    lowercase: bool  # "bert", "whitespace"
    strip_accents: bool  # "bert"
    charsmap: bytes  # "t5": normalization table; empty without one
    ends: frozenset[int]  # end-of-generation tokens
    end: int | None  # token that ends an answer: end of turn, or else end of text
    suppressed: tuple[int, ...]  # tokens that are never sampled
    strip_before: frozenset[int]  # special tokens that absorb the white space before them
    strip_after: frozenset[int]  # special tokens that absorb the white space after them
    note: str  # note to the user if the pre-tokenizer is guessed, else ""


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Return whether the GGUF declares a tokenizer; if so, `Tokenizer.from_metadata` must succeed or raise."""
    return metadata.get(_KEY + "model", "none") not in NO_TEXT_MODELS


def read_vocab(metadata: Mapping[str, Any], nearest_rule: bool = False) -> Vocab:
    """Read the vocabulary from GGUF metadata; raise TokenizerError naming a missing or invalid key.

    With `nearest_rule`, use the most similar known pre-tokenizer for an unknown one.
    """
    model = _typed(metadata, _KEY + "model", str, "a string")
    if model in NO_TEXT_MODELS:
        raise TokenizerError(f"{_KEY}model is '{model}': the file has no tokenizer; give token ids instead of text")
    if model not in VOCAB_KINDS:
        raise TokenizerError(f"{_KEY}model '{model}' is not supported; supported: {', '.join(VOCAB_KINDS)}")
    kind = VOCAB_KINDS[model]
    named = kind.pre or _typed(metadata, _KEY + "pre", str, "a string", "") or "default"
    taken = nearest_known(named) if nearest_rule and kind.merges else named
    rule = pre_rule(taken) if kind.merges else None
    tokens = _tokens(metadata)
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    kinds = _kinds(metadata, len(tokens))
    special = _special_ids(metadata, kind, rule, len(tokens))
    ends = _complete(ids, kinds, special)
    lowercase = _flag(metadata, "normalizer.lowercase", kind.lowercase)
    return Vocab(
        model=model,
        tokens=shown_tokens(tokens, ids) if model == "hybriddna" else tokens,
        ids=ids,
        kinds=bytes(kinds),
        scores=_scores(metadata, len(tokens)) if kind.scores else [],
        merges=_merges(metadata, rule) if rule is not None else (),
        rule=rule,
        writes=kind.writes if rule is None else SPACES if rule.escape_spaces else LETTERS if rule.byte_level else PLAIN,
        bos=special.get("bos"),
        eos=special.get("eos"),
        unknown=special.get("unknown"),
        adds={name: special[name] for name in _adds(metadata, kind, rule) if name in special},
        add_space_prefix=rule is None and _flag(metadata, "add_space_prefix", kind.prefix),
        merge_spaces=_flag(metadata, "remove_extra_whitespaces", False),
        lowercase=lowercase,
        strip_accents=_flag(metadata, "normalizer.strip_accents", lowercase),
        charsmap=_charsmap(metadata),
        ends=ends,
        end=special.get("eot", next((ids[text] for text in _TURN_TEXTS if ids.get(text) in ends), special.get("eos"))),
        suppressed=_suppressed(metadata, len(tokens)),
        strip_before=_strip_before(metadata, ids),
        strip_after=_strip_after(metadata, ids, kinds),
        note="" if taken == named else f"{unknown_rule(named)}; {taken} is used instead, so some ids may be wrong",
    )


def _adds(metadata: Mapping[str, Any], kind: VocabKind, rule: PreRule | None) -> Sequence[str]:
    """Return the names of the special tokens to add to a text."""
    if kind.adds_always:
        return kind.adds
    add_bos = _flag(metadata, "add_bos_token", "bos" in kind.adds or (rule is not None and rule.add_bos))
    add_eos = _flag(metadata, "add_eos_token", "eos" in kind.adds)
    add_bos = add_bos or (rule is not None and rule.force_bos)
    return [name for name, wanted in (("bos", add_bos), ("eos", add_eos)) if wanted]


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise TokenizerError(f"{_KEY}tokens is empty: the file has no vocabulary; download it again")
    if "" in tokens:
        return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    return tokens


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = _string_array(metadata, name)
    to_list = getattr(value, "to_list", None)  # StringArray: decoding all strings at once is much faster
    if to_list is not None:
        return list(to_list())
    if not all(isinstance(text, str) for text in value):
        raise TokenizerError(f"{_KEY}{name} holds something that is not a string; supported: an array of strings")
    return list(value)


def _string_array(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    value: Sequence[str] = _typed(metadata, _KEY + name, Sequence, "an array of strings")
    if isinstance(value, str | bytes):
        raise TokenizerError(f"{_KEY}{name} is one string; supported: an array of strings")
    return value


def _merges(metadata: Mapping[str, Any], rule: PreRule) -> Sequence[str]:
    if rule.merges_optional and _KEY + "merges" not in metadata:
        return ()
    return _string_array(metadata, "merges")


def _numbers(metadata: Mapping[str, Any], name: str, count: int, kinds: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the first `count` values of an array (0: all), which must be of the NumPy kinds `kinds`."""
    key = _KEY + name
    value = _typed(metadata, key, (np.ndarray, Sequence), "an array of numbers")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths, or very large numbers
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise TokenizerError(f"{key} must be an array of {'whole ' if 'f' not in kinds else ''}numbers")
    if len(array) < count:
        raise TokenizerError(f"{key} has {len(array)} entries, but {_KEY}tokens has {count}; they must be equal")
    return array[:count] if count else array


def _suppressed(metadata: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the tokens that must not be sampled; ids beyond the vocabulary are ignored."""
    if _KEY + "suppress_tokens" not in metadata:
        return ()
    listed = _numbers(metadata, "suppress_tokens", 0, "iu")
    return tuple(np.unique(listed[(listed >= 0) & (listed < count)]).tolist())


def _charsmap(metadata: Mapping[str, Any]) -> bytes:
    table = metadata.get(_KEY + "precompiled_charsmap", b"")
    if not isinstance(table, bytes):
        table = _numbers(metadata, "precompiled_charsmap", 0, "iu").astype(np.uint8).tobytes()
    return table


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    scores = _numbers(metadata, "scores", count, "iuf")
    if np.isnan(scores).any():
        raise TokenizerError(f"{_KEY}scores holds a NaN at entry {int(np.isnan(scores).argmax())}; the file is damaged")
    return np.clip(scores.astype(np.float64), -1e300, 1e300).tolist()  # type: ignore[no-any-return]


def _kinds(metadata: Mapping[str, Any], count: int) -> bytearray:
    if _KEY + "token_type" not in metadata:
        return bytearray([NORMAL]) * count
    types = _numbers(metadata, "token_type", count, "iu")
    known = (types >= 0) & (types < len(_KINDS))
    return bytearray(_KINDS[np.where(known, types, 0)].tobytes())


def _special_ids(metadata: Mapping[str, Any], kind: VocabKind, rule: PreRule | None, count: int) -> dict[str, int]:
    """Return ids by name: bos, eos, eot, eom, unknown, seperator (spelled as in the key), fim_*. Names without an id in
    the GGUF and without a default are omitted.
    """
    ids = {name: i for name, i in kind.ids.items() if i < count}
    if rule is not None and rule.no_default_bos:
        ids.pop("bos", None)
    for name in ("bos", "eos", "eot", "eom", "unknown", "seperator", *_FIM_TEXTS):
        key = f"{_KEY}{name}_token_id"
        value = metadata.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TokenizerError(f"{key} must be a whole number, the id of a token")
        if 0 <= value < count:
            ids[name] = int(value)
        elif name in _REQUIRED_IN_RANGE:
            raise TokenizerError(f"{key} is {value}, but the vocabulary has {count} tokens (0 to {count - 1})")
    for name in kind.needs:
        if name not in ids:
            raise TokenizerError(f"{_KEY}{name}_token_id is missing: the file's tokenizer cannot be used without it")
    return ids


def _complete(ids: Mapping[str, int], kinds: bytearray, special: dict[str, int]) -> frozenset[int]:
    """Return the end-of-generation tokens. Correct `kinds` of control tokens with a wrong type in the GGUF."""
    for name, texts in _FIM_TEXTS.items():
        found = next((ids[text] for text in texts if text in ids), None)
        if name not in special and found is not None:
            special[name] = found
            kinds[found] |= CONTROL
    ends = {special[name] for name in _FIM_ENDS if name in special}
    for text in _END_TEXTS:
        if text in ids:
            ends.add(ids[text])
            kinds[ids[text]] |= CONTROL
    for text in _SHOWN_TEXTS:
        if text in ids:
            kinds[ids[text]] = USER_DEFINED
    ends.update(special[name] for name in ("eos", "eot", "eom") if name in special)
    for present, text, kind in _EXCEPTIONS:
        if ids.get(text) in ends and all(ids.get(other) in ends for other in present):
            ends.discard(ids[text])
            kinds[ids[text]] = kind
    return frozenset(ends)


def _strip_before(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> frozenset[int]:
    """Return the mask token of embedding models, which absorbs white space before it. Models are identified by name."""
    found = {
        ids[token]
        for token, key, names in _MASKS
        if token in ids and any(name in str(metadata.get(key, "")).lower() for name in names)
    }
    return frozenset(found)


def _strip_after(metadata: Mapping[str, Any], ids: Mapping[str, int], kinds: bytearray) -> frozenset[int]:
    """Return the added tokens of Phi-3, which absorb the white space after them. The model is identified by name."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    strip = {i for i, kind in enumerate(kinds) if kind & SPECIAL}
    strip.update(ids[text] for text in ("</s>",) if text in ids)
    return frozenset(strip - {ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in ids})


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(_typed(metadata, _KEY + name, (bool, np.bool_), "true or false", default))


def _typed(metadata: Mapping[str, Any], key: str, kind: Any, wanted: str, default: Any = None) -> Any:
    value = metadata.get(key)
    if value is None:
        if default is None:
            raise TokenizerError(f"{key} is missing: the file's tokenizer cannot be used without it")
        return default
    if not isinstance(value, kind):
        raise TokenizerError(f"{key} is of type {type(value).__name__}; supported: {wanted}")
    return value
