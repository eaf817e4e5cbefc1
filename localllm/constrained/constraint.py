"""Grammars over the tokens of a vocabulary, with llguidance: the mask of allowed next tokens.

vocabulary = GrammarVocabulary(model.tokenizer, model.vocabulary)  # once per model: it reads all tokens
make = vocabulary.begin(compile_structure(Structure(schema=...)))
constraint = make()                                                # once per answer
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localllm.constrained.compiling import converted, matcher_of, told
from localllm.constrained.grammar import Grammar
from localllm.options.structure import NotFinished, StructureError
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from localllm.constrained.child import GrammarChild

Mask = NDArray[np.bool_]  # (V,)

_KEPT = 16  # number of compiled grammars kept
_KEPT_BYTES = 48 << 20  # maximum bytes of kept grammars, including estimated lexer states, which grow with every mask
_MASK_BYTES = 4 << 10  # assumed growth per mask: up to 6 KB for hostile patterns; under 1 MB in total for usual ones
_KEPT_REFUSALS = 1000
_MARK = "\x02"  # absorbs the space that some vocabularies prepend to a text; no token merges it with later text


class GrammarVocabulary:
    """The tokens of a model, for grammars. Thread-safe.

    `width` is the number of logits, which can exceed the number of tokens. Raises StructureError if no token ends a
    text.
    """

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self.tokenizer, self.width = tokenizer, width
        if not tokenizer.eog:
            raise StructureError("the model's vocabulary has no token that ends a text, so no grammar can end")
        self._compiled = _Compiled()

    def begin(self, grammar: Grammar) -> Callable[[], GrammarConstraint]:
        """Compile a grammar and return a factory for its decoding states; raise a one-line StructureError on
        failure."""
        source = grammar.source
        kept = self._compiled.find(source) or self._compile(source)
        failed = partial(self._compiled.drop, source)  # copies share the states of the lexer, whose number is limited

        def make() -> GrammarConstraint:
            return GrammarConstraint(kept.matcher.deep_copy(), self.tokenizer.vocab_size, self.ends, failed, kept.count)

        return make

    def _compile(self, source: str) -> _Kept:
        try:
            ready, size = self._checked(source)
            matcher = matcher_of(self._tokens, ready)
        except StructureError as error:
            if not isinstance(error, NotFinished):
                self._compiled.refuse(source, str(error))
            raise
        return self._compiled.keep(source, _Kept(matcher, size))

    def _checked(self, source: str) -> tuple[str, int]:
        """Return a grammar that is ready to be compiled in this process, and its memory in bytes if known."""
        return converted(source), 0

    def known(self) -> GrammarVocabulary:
        """Return a view of this vocabulary that only starts compiled grammars. For other grammars it raises
        NotCompiled."""
        return _Known(self)

    def checked(self, child: GrammarChild, stop: threading.Event) -> GrammarVocabulary:
        """Return a view of this vocabulary for untrusted grammars. The process `child` compiles each grammar first;
        setting `stop` ends this.
        """
        return _Checked(self, child, stop)

    def new_child(self) -> GrammarChild:
        """Return a child process for `checked`. The caller closes it."""
        from localllm.constrained.child import GrammarChild

        words = self._words
        return GrammarChild(words.tokens, words.special_token_ids, sorted(self.tokenizer.eog))

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, including control tokens. The result is empty for logits without a token."""
        return self.tokenizer.piece(token) if token < self.tokenizer.vocab_size else b""

    def spelled(self, text: str) -> str:
        """Return `text` as a sequence in a grammar rule: control tokens by id, and all other text as strings."""
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
        """Split a text at the control tokens in it."""
        if self._marks is None:
            return [text] if text else []
        special = self.tokenizer.special
        cut = self._marks.split(text)  # alternating texts and control tokens
        return [special[part] if number % 2 else part for number, part in enumerate(cut) if part]

    @cached_property
    def _marks(self) -> re.Pattern[str] | None:
        """A pattern that matches control tokens, the longest first, or None without control tokens."""
        tokenizer = self.tokenizer
        marks = [text for text, id_ in tokenizer.special.items() if text and tokenizer.is_control(id_)]
        marks.sort(key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, marks))})") if marks else None

    @cached_property
    def ends(self) -> Mask:
        """The mask of end-of-generation tokens, (V,)."""
        mask = np.zeros(self.width, np.bool_)
        mask[[token for token in self.tokenizer.eog if token < self.width]] = True
        mask.flags.writeable = False
        return mask

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self._words), eos_token=sorted(self.tokenizer.eog))

    @cached_property
    def _words(self) -> _Words:
        return _Words(self.tokenizer, min(self.tokenizer.eog))


class NotCompiled(Exception):
    """The grammar is not compiled yet."""


class _View(GrammarVocabulary):
    """A vocabulary with a different compiler. It shares the cache of compiled and refused grammars."""

    def __init__(self, of: GrammarVocabulary) -> None:
        self.tokenizer, self.width, self._compiled, self._of = of.tokenizer, of.width, of._compiled, of

    @property
    def ends(self) -> Mask:
        return self._of.ends

    @property
    def _marks(self) -> re.Pattern[str] | None:
        return self._of._marks

    @property
    def _tokens(self) -> LLTokenizer:
        return self._of._tokens


class _Known(_View):
    def _compile(self, source: str) -> _Kept:
        raise NotCompiled


class _Checked(_View):
    def __init__(self, of: GrammarVocabulary, child: GrammarChild, stop: threading.Event) -> None:
        super().__init__(of)
        self._child, self._stop = child, stop

    def _checked(self, source: str) -> tuple[str, int]:
        return self._child.compile(source, self._stop)


class _Kept:
    """A compiled grammar, and its estimated current memory in bytes."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self.matcher, self.size = matcher, size

    def count(self) -> None:
        """Add the estimated memory that a computed mask takes in the lexer's states."""
        self.size += _MASK_BYTES


class _Compiled:
    """A cache of compiled grammars, and of the reasons why other grammars were refused. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # key: digest of the grammar; value: reason

    def find(self, source: str) -> _Kept | None:
        """Return a compiled grammar, or None. Raise StructureError if it was refused before."""
        with self._lock:
            self._limit()
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
            message = self._refused.get(_digest(source))
        if message is not None:
            raise StructureError(message)
        return None

    def keep(self, source: str, kept: _Kept) -> _Kept:
        with self._lock:
            self._kept[source] = kept
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            self._limit()
        return kept

    def _limit(self) -> None:
        """Drop the largest grammars until the others fit the limit. The next request for a dropped grammar compiles it
        again."""
        while sum(kept.size for kept in self._kept.values()) > _KEPT_BYTES:
            del self._kept[max(self._kept, key=lambda source: self._kept[source].size)]

    def drop(self, source: str) -> None:
        with self._lock:
            self._kept.pop(source, None)

    def refuse(self, source: str, message: str) -> None:
        with self._lock:
            self._refused[_digest(source)] = message
            while len(self._refused) > _KEPT_REFUSALS:
                self._refused.popitem(last=False)


def _digest(source: str) -> bytes:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()


class _Words:
    """A tokenizer for llguidance."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos
        self.tokens = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        hidden = (token for token in tokenizer.special.values() if tokenizer.is_control(token))
        self.special_token_ids = sorted({*hidden, *tokenizer.eog})

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of exactly this text, even if the vocabulary prepends a space to the first word."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._exact(text, text) or self._exact(_MARK + text, text) or []

    def _exact(self, source: str, text: str) -> list[int]:
        """Return the last tokens of `source` that spell `text`. The result is empty if a token crosses the start of
        `text`."""
        ids, left = self._tokenizer.encode(source, add_special=False), len(text.encode())
        first = len(ids)
        while left > 0 and first > 0:
            first -= 1
            left -= len(self.tokens[ids[first]])
        return ids[first:] if not left and (source != text or not first) else []


class GrammarConstraint:
    """The state of a grammar during decoding: a `localllm.sampling.constraint.Constraint`."""

    def __init__(
        self, matcher: LLMatcher, tokens: int, ends: Mask, failed: Callable[[], None], count: Callable[[], None]
    ) -> None:
        """Create the state. `failed` is called when the grammar exceeds llguidance's limits, and `count` for every
        mask."""
        self._matcher, self._ends, self._failed, self._count = matcher, ends, failed, count
        self._bits = np.zeros((tokens + 31) // 32, np.int32)
        self._known = min(tokens, len(ends))  # there can be more logits than tokens
        self._allowed: Mask | None = None

    def allowed(self) -> Mask:
        """Return the mask (V,) of allowed next tokens; raise StructureError if computing it exceeds a limit."""
        if self.finished:
            return self._ends
        if self._allowed is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
            self._count()
            allowed = np.unpackbits(self._bits.view(np.uint8), count=self._known, bitorder="little").view(np.bool_)
            rest = len(self._ends) - self._known
            self._allowed = np.concatenate((allowed, np.zeros(rest, np.bool_))) if rest else allowed
        return self._allowed

    def accept(self, token: int) -> None:
        """Advance by an allowed token. An end-of-text token changes nothing."""
        if token < len(self._ends) and self._ends[token]:
            return
        self._allowed = None
        if not self._matcher.consume_token(token):
            self._check()

    def validate(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that are allowed."""
        return 0 if self.finished else int(self._matcher.validate_tokens(list(tokens)))

    @property
    def finished(self) -> bool:
        """Whether only an end-of-text token is allowed."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._failed()
            raise StructureError(f"the grammar failed: {told(self._matcher.get_error())}")


def _quoted(text: str) -> str:
    """Return a text as a string literal in a grammar."""
    return json.dumps(text, ensure_ascii=False)
