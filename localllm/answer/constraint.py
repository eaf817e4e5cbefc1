"""Grammars over the tokens of a vocabulary, by llguidance: which tokens may come next.

vocabulary = GrammarVocabulary(model.tokenizer, model.vocabulary)  # once per model: it reads all tokens
make = vocabulary.begin(compile_structure(Structure(schema=...)))
constraint = make()                                                # once per answer
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localllm.answer.structure import Grammar, StructureError
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]  # (V,)

_KEPT = 32  # number of compiled grammars kept
_MARK = "\x02"  # takes the space that a vocabulary puts before a text; no token joins it with what follows


class GrammarVocabulary:
    """The tokens of a model as grammars see them. Threads may share it.

    `width` is the number of logits, which may be more than there are tokens. StructureError if no token ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self.tokenizer, self.width = tokenizer, width
        if not tokenizer.eog:
            raise StructureError("the model's vocabulary has no token that ends a text, so no grammar can end")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def begin(self, grammar: Grammar) -> Callable[[], GrammarConstraint]:
        """Compile a grammar; return what makes the state of an answer. StructureError, in a line, if it is broken."""
        source = grammar.source
        with self._lock:
            matcher = self._compiled.get(source) or self._compile(source)
            self._compiled[source] = matcher
            self._compiled.move_to_end(source)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return lambda: GrammarConstraint(matcher.deep_copy(), self.tokenizer.vocab_size, self.ends)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, control tokens included; none for logits without a token."""
        return self.tokenizer.piece(token) if token < self.tokenizer.vocab_size else b""

    def spelled(self, text: str) -> str:
        """Return `text` as a sequence in a grammar's rule: control tokens by their ids, the rest as strings."""
        pieces: list[str] = []
        plain = ""
        for part in self.parts(text):
            if isinstance(part, int):
                pieces += [_quoted(plain)] if plain else []
                pieces.append(f"<[{part}]>")
                plain = ""
            else:
                plain += part
        return " ".join([*pieces, _quoted(plain)] if plain or not pieces else pieces)

    def parts(self, text: str) -> list[int | str]:
        """Cut a text at the control tokens in it."""
        found: list[int | str] = []
        while text:
            token = next(((mark, id_) for mark, id_ in self._marks if text.startswith(mark)), None)
            if token is not None:
                found.append(token[1])
                text = text[len(token[0]) :]
            else:
                found.append(text[0])
                text = text[1:]
        return found

    @cached_property
    def _marks(self) -> list[tuple[str, int]]:
        """Control tokens, the longest first."""
        tokenizer = self.tokenizer
        marks = [(text, id_) for text, id_ in tokenizer.special.items() if text and tokenizer.is_control(id_)]
        return sorted(marks, key=lambda mark: -len(mark[0]))

    @cached_property
    def ends(self) -> Mask:
        """The tokens that end an answer, (V,)."""
        mask = np.zeros(self.width, np.bool_)
        mask[[token for token in self.tokenizer.eog if token < self.width]] = True
        mask.flags.writeable = False
        return mask

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(self.tokenizer.eog)
        return LLTokenizer(TokenizerWrapper(_Words(self.tokenizer, ends[0])), eos_token=ends)

    def _compile(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise StructureError(f"the grammar cannot be used: {_told(matcher.get_error())}")
        GrammarConstraint(matcher.deep_copy(), self.tokenizer.vocab_size, self.ends).allowed()  # fails now, not later
        return matcher


class _Words:
    """A tokenizer in the form that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos
        self.tokens = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        hidden = (token for token in tokenizer.special.values() if tokenizer.is_control(token))
        self.special_token_ids = sorted({*hidden, *tokenizer.eog})

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens that are this text to the byte: a vocabulary may put a space before a first word."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._exact(text, text) or self._exact(_MARK + text, text) or []

    def _exact(self, source: str, text: str) -> list[int]:
        """Return the last tokens of `source` that make up `text`. Return none if the first of them begins before it."""
        ids, left = self._tokenizer.encode(source, add_special=False), len(text.encode())
        first = len(ids)
        while left > 0 and first > 0:
            first -= 1
            left -= len(self.tokens[ids[first]])
        return ids[first:] if not left and (source != text or not first) else []


class GrammarConstraint:
    """The state of a grammar over one answer: a `Constraint` of `localllm.scheduler.request`."""

    def __init__(self, matcher: LLMatcher, tokens: int, ends: Mask) -> None:
        self._matcher, self._ends = matcher, ends
        self._bits = np.zeros((tokens + 31) // 32, np.int32)
        self._known = min(tokens, len(ends))  # logits may be more than tokens
        self._allowed: Mask | None = None

    def allowed(self) -> Mask:
        """Return which tokens (V,) may come next. StructureError if the grammar takes too long to say."""
        if self.finished:
            return self._ends
        if self._allowed is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
            allowed = np.unpackbits(self._bits.view(np.uint8), count=self._known, bitorder="little").view(np.bool_)
            rest = len(self._ends) - self._known
            self._allowed = np.concatenate((allowed, np.zeros(rest, np.bool_))) if rest else allowed
        return self._allowed

    def accept(self, token: int) -> None:
        """Advance by a token that `allowed`; an end of the answer changes nothing."""
        if token < len(self._ends) and self._ends[token]:
            return
        self._allowed = None
        if not self._matcher.consume_token(token):
            self._check()

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, may follow."""
        return 0 if self.finished else int(self._matcher.validate_tokens(list(tokens)))

    @property
    def finished(self) -> bool:
        """Whether only an end-of-text token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StructureError(f"the grammar failed: {_told(self._matcher.get_error())}")


def _told(error: Any) -> str:
    """Return the first lines of llguidance's message as one, without the grammar and the place in it."""
    if "NoExtension" in str(error):
        return "no text matches it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if " | " not in line[:12] and line.strip("^ ")]
    return " ".join(kept).replace(" <non-verbose/>", "")[:300] or "unknown error"


def _quoted(text: str) -> str:
    """Return a text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)
