"""Encode text without special tokens: byte-level BPE ("gpt2"), BPE over UTF-8 ("gemma4"), SentencePiece ("llama").

All split text into words that no token crosses, merge each word once, and cache the result, because words repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from localllm.gguf.strings import StringArray
from localllm.tokenizer.errors import TokenizerError
from localllm.tokenizer.merge import NEVER, Rank, merge
from localllm.tokenizer.pretokenize import PreRule, PreTokenizer
from localllm.tokenizer.vocab import Vocab

SPACE = "\u2581"  # SentencePiece's space
_CACHED_WORDS = 1 << 16
_CACHED_CHARS = 64  # longer words rarely repeat
_SAMPLE = 1000  # merges checked as a sample


def _byte_letters() -> list[str]:
    """Return GPT-2's letter for each byte: the Latin-1 letter if visible, else the next one from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()
_LETTER_OF = dict(enumerate(BYTE_LETTERS))


class TextEncoder:
    """`encode(text)` returns the ids of plain text; made once per vocabulary."""

    def __init__(self, split: Callable[[str], list[str]], encode_word: Callable[[str], list[int]]) -> None:
        self._split = split
        self._encode_word = encode_word
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        known = self._known
        for word in self._split(text):
            found = known.get(word)
            if found is None:
                found = self._encode_word(word)
                if len(word) <= _CACHED_CHARS:
                    if len(known) >= _CACHED_WORDS:
                        known.clear()
                    known[word] = found
            ids += found
        return ids


def text_encoder(vocab: Vocab) -> TextEncoder:
    """Return the encoder of a vocabulary. This builds the expensive table of merges."""
    rule = vocab.rule
    if rule is None:
        return TextEncoder(_space_splitter(vocab), _sentencepiece(vocab))
    split = PreTokenizer(rule).split
    if not rule.escape_spaces:
        return TextEncoder(split, _bpe(vocab, rule))
    finer = _space_splitter(vocab)
    return TextEncoder(lambda text: [word for line in split(text) for word in finer(line)], _bpe(vocab, rule))


def _space_splitter(vocab: Vocab) -> Callable[[str], list[str]]:
    """Return a function that escapes spaces and splits before each run of them. No id changes, because no merge
    crosses.

    If a token does contain an inner space, do not split after a character that precedes one in any token.
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
    """Return the ranks of pairs. A few invalid merges do no harm; a sample shows whether all are invalid."""
    merges = vocab.merges.to_list() if isinstance(vocab.merges, StringArray) else list(vocab.merges)
    for i in range(0, len(merges), len(merges) // _SAMPLE + 1):
        if not isinstance(merges[i], str) or " " not in merges[i]:
            raise TokenizerError(
                f"tokenizer.ggml.merges: entry {i}, {merges[i]!r:.60}, is not two tokens with a space between them"
            )
    ranks = dict(zip(merges, range(len(merges)), strict=True))
    if len(ranks) < len(merges):  # of duplicates, the first counts
        ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
    get = ranks.get
    return lambda left, right: get(f"{left} {right}", NEVER)


def _sentencepiece(vocab: Vocab) -> Callable[[str], list[int]]:
    ids, scores, unknown = vocab.ids, vocab.scores, vocab.unknown
    assert unknown is not None  # this kind of vocabulary has a default

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
