"""The parts of an answer that may begin with a thought, or its content alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from localllm.answer.grammars import Format
from localllm.answer.parts import Content, Part
from localllm.answer.reader import AnswerReader
from localllm.generation.statistics import Piece
from localllm.generation.text import AnswerText
from localllm.tokenizer import Tokenizer


class Parted:
    """Cuts the pieces of an answer into parts; its first tokens, `begun`, belong to an earlier part of it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        format_: Format,
        prompt_tail: str,
        stops: tuple[str, ...],
        begun: Sequence[int] = (),
    ) -> None:
        self._text = AnswerText(tokenizer, stops, visible=format_.visible(tokenizer.special))
        self._reader = AnswerReader(format_, prompt_tail=prompt_tail)
        for token in begun:
            self._reader.push(self._text.push(token))

    def push(self, piece: Piece) -> tuple[Part, ...]:
        """Return the parts that a piece completes; the last piece ends the answer."""
        if piece.token is not None:
            return self._reader.push(self._text.push(piece.token))
        rest = self._reader.push("" if self._text.stopped else self._text.finish())
        return (*rest, *self._reader.finish())


def content_only(
    pieces: Iterator[Piece], tokenizer: Tokenizer, format_: Format, prompt_tail: str, stops: tuple[str, ...]
) -> Iterator[Piece]:
    """Yield the pieces of an answer with the text of its content only."""
    parted = Parted(tokenizer, format_, prompt_tail, stops)
    for piece in pieces:
        yield replace(piece, text=_content(parted.push(piece)))


def _content(parts: tuple[Part, ...]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))
