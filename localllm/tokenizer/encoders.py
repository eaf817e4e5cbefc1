"""Encodes text without special tokens: one encoder for every `tokenizer.ggml.model`.

If no token crosses word boundaries, the text is split into words, and the ids of each word are cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

from localllm.gguf.strings import StringArray
from localllm.tokenizer.charsmap import CharsMap
from localllm.tokenizer.dna import DnaEncoder, knows_dna
from localllm.tokenizer.errors import TokenizerError
from localllm.tokenizer.merge import NEVER, Rank, merge
from localllm.tokenizer.plain import cheapest_encoder, longest_encoder
from localllm.tokenizer.pretokenize import WHITE_SPACE, PreRule, PreTokenizer
from localllm.tokenizer.unigram import normalizer, viterbi
from localllm.tokenizer.vocab import BYTE, HIDDEN, NORMAL, UNUSED, USER_DEFINED, Vocab
from localllm.tokenizer.wordpiece import word_encoder, word_splitter

SPACE = "\u2581"  # SentencePiece's representation of a space
_CACHED_WORDS = 1 << 16
_CACHED_CHARS = 64  # longer words rarely repeat
_SAMPLE = 1000  # number of merges to check


def _byte_letters() -> list[str]:
    """Return GPT-2's letter for each byte: the Latin-1 character if printable, else the next
    character from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()
_LETTER_OF = dict(enumerate(BYTE_LETTERS))


Split = Callable[[str, bool], list[str]]  # (text, start) -> words


class Encoder(Protocol):
    """The interface of encoders."""

    def encode(self, text: str, start: bool = True) -> list[int]:
        """Return the ids of plain text. With `start`, the text begins a word, which may need a leading space."""


class TextEncoder:
    """Splits text into words, and encodes each distinct word once."""

    def __init__(self, split: Split, encode_word: Callable[[str], list[int]]) -> None:
        self._split = split
        self._encode_word = encode_word
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str, start: bool = True) -> list[int]:
        ids: list[int] = []
        known = self._known
        for word in self._split(text, start):
            found = known.get(word)
            if found is None:
                found = self._encode_word(word)
                if len(word) <= _CACHED_CHARS:
                    if len(known) >= _CACHED_WORDS:
                        known.clear()
                    known[word] = found
            ids += found
        return ids


def text_encoder(vocab: Vocab) -> Encoder:
    """Return the encoder of a vocabulary. Building its merge table is expensive."""
    return _ENCODERS[vocab.model](vocab)


def _byte_pairs(vocab: Vocab) -> TextEncoder:
    rule = vocab.rule
    assert rule is not None  # guaranteed for this tokenizer model
    split = PreTokenizer(rule).split
    if not rule.escape_spaces:
        return TextEncoder(lambda text, start: split(text), _bpe(vocab, rule))
    finer = _space_splitter(vocab)
    return TextEncoder(lambda text, start: [word for line in split(text) for word in finer(line)], _bpe(vocab, rule))


def _dna(vocab: Vocab) -> Encoder:
    words = _byte_pairs(vocab)
    return DnaEncoder(vocab.ids, words) if knows_dna(vocab.ids) else words


def _without_space(vocab: Vocab) -> TextEncoder:
    """Return an encoder that drops white space, which only separates words."""
    rule = vocab.rule
    assert rule is not None
    split = PreTokenizer(rule).split
    white = re.compile(f"[{re.escape(''.join(WHITE_SPACE))}]+")

    def words(text: str, start: bool) -> list[str]:
        if vocab.lowercase:
            text = "".join(map(str.lower, text))  # character by character, since str.lower changes a final sigma
        return [word for part in white.split(text) for word in split(part)]

    return TextEncoder(words, _bpe(vocab, rule))


def _sentencepiece(vocab: Vocab) -> TextEncoder:
    finer, first = _space_splitter(vocab), " " if vocab.add_space_prefix else ""
    return TextEncoder(lambda text, start: finer(first + text if start else text), _by_score(vocab))


def _wordpiece(vocab: Vocab) -> TextEncoder:
    assert vocab.unknown is not None  # guaranteed for this tokenizer model
    split = word_splitter(vocab.lowercase, vocab.strip_accents)
    return TextEncoder(lambda text, start: split(text), word_encoder(_ids(vocab, ~HIDDEN), vocab.unknown))


def _unigram(vocab: Vocab) -> TextEncoder:
    assert vocab.unknown is not None
    ids, kinds = _ids(vocab, NORMAL | USER_DEFINED | UNUSED), vocab.kinds
    worst = min((score for score, kind in zip(vocab.scores, kinds, strict=True) if kind & NORMAL), default=0.0)
    free = frozenset(token for token in ids.values() if kinds[token] & USER_DEFINED)
    charsmap = CharsMap(vocab.charsmap) if vocab.charsmap else None
    normalize = normalizer(charsmap, SPACE, vocab.add_space_prefix, vocab.merge_spaces)
    encode = viterbi(ids, vocab.scores, free, worst, vocab.unknown)
    if SPACE not in ids:  # an unknown space may form one token with its neighbours
        return TextEncoder(lambda text, start: [normalize(text, start)], encode)
    finer = _space_splitter(vocab)
    return TextEncoder(lambda text, start: finer(normalize(text, start)), encode)


def _longest(vocab: Vocab) -> TextEncoder:
    return TextEncoder(lambda text, start: [text], longest_encoder(_ids(vocab, ~HIDDEN)))


def _cheapest(vocab: Vocab) -> TextEncoder:
    bytes_ = {byte: vocab.ids[text] for byte in range(256) if (text := f"<0x{byte:02X}>") in vocab.ids}
    ids = _ids(vocab, ~(HIDDEN | BYTE))
    return TextEncoder(lambda text, start: [text], cheapest_encoder(ids, vocab.scores, bytes_))


def _ids(vocab: Vocab, kinds: int) -> Mapping[str, int]:
    """Return the ids by text of tokens whose type is in `kinds`, except hidden tokens, which plain text must not
    produce.
    """
    return {text: i for text, i in vocab.ids.items() if vocab.kinds[i] & kinds and not vocab.kinds[i] & HIDDEN}


_ENCODERS: Mapping[str, Callable[[Vocab], Encoder]] = {
    "llama": _sentencepiece,
    "gpt2": _byte_pairs,
    "gemma4": _byte_pairs,
    "bert": _wordpiece,
    "t5": _unigram,
    "rwkv": _longest,
    "plamo2": _cheapest,
    "hybriddna": _dna,
    "whitespace": _without_space,
}


def _space_splitter(vocab: Vocab) -> Callable[[str], list[str]]:
    """Return a function that escapes spaces and splits text before each run of spaces. Token ids do not change, because
    no merge crosses such a boundary.

    If a token contains an inner space, do not split after a character that precedes an inner space in any token.
    """
    inner = [token for token in vocab.tokens if SPACE in token.lstrip(SPACE)]
    crossed = "".join({char for token in inner for char in re.findall(f"([^{SPACE}]){SPACE}", token)})
    boundary = re.compile(f"(?<=[^{re.escape(SPACE + crossed)}])(?={SPACE})")
    return lambda text: boundary.split(text.replace(" ", SPACE))


def _bpe(vocab: Vocab, rule: PreRule) -> Callable[[str], list[int]]:
    ids = vocab.ids
    rank = _merge_rank(vocab)

    def encode_word(word: str) -> list[int]:
        if rule.byte_level:
            word = word.encode().decode("latin-1").translate(_LETTER_OF)
        if word in ids and (rule.ignore_merges or (rule.newline_words and not word.strip("\n"))):
            return [ids[word]]
        out: list[int] = []
        for symbol in merge(word, rank):
            if symbol in ids:
                out.append(ids[symbol])
            elif rule.byte_level:
                out += [ids[letter] for letter in symbol if letter in ids]
            else:
                out += [ids[token] for byte in symbol.encode() if (token := f"<0x{byte:02X}>") in ids]
        return out

    return encode_word


def _merge_rank(vocab: Vocab) -> Rank:
    """Return the ranks of pairs. A few invalid merges are harmless; a sample shows whether all are invalid."""
    merges = vocab.merges.to_list() if isinstance(vocab.merges, StringArray) else list(vocab.merges)
    for i in range(0, len(merges), len(merges) // _SAMPLE + 1):
        if not isinstance(merges[i], str) or " " not in merges[i]:
            raise TokenizerError(
                f"tokenizer.ggml.merges: entry {i}, {merges[i]!r:.60}, is not two tokens with a space between them"
            )
    ranks = dict(zip(merges, range(len(merges)), strict=True))
    if len(ranks) < len(merges):  # of duplicates, the first is used
        ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
    get = ranks.get
    return lambda left, right: get(f"{left} {right}", NEVER)


def _by_score(vocab: Vocab) -> Callable[[str], list[int]]:
    ids, scores, unknown = vocab.ids, vocab.scores, vocab.unknown
    assert unknown is not None  # guaranteed for this tokenizer model

    def rank(left: str, right: str) -> float:
        joined = ids.get(left + right)
        return NEVER if joined is None else -scores[joined]

    def encode_word(word: str) -> list[int]:
        out: list[int] = []
        for symbol in merge(word, rank):
            if symbol in ids:
                out.append(ids[symbol])
            else:
                out += [ids.get(f"<0x{byte:02X}>", unknown) for byte in symbol.encode()]
        return out

    return encode_word
