"""The content alone of an answer that may begin with a thought."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from localllm.answer.grammars import Format
from localllm.answer.parts import Content, Part
from localllm.answer.reader import AnswerReader
from localllm.generation.statistics import Piece
from localllm.generation.text import AnswerText
from localllm.tokenizer import Tokenizer


def content_only(
    pieces: Iterator[Piece], tokenizer: Tokenizer, format_: Format, prompt_tail: str, stops: tuple[str, ...]
) -> Iterator[Piece]:
    """Yield the pieces of an answer with the text of its content only."""
    text = AnswerText(tokenizer, stops, visible=format_.visible(tokenizer.special))
    reader = AnswerReader(format_, prompt_tail=prompt_tail)
    for piece in pieces:
        if piece.token is not None:
            yield replace(piece, text=_content(reader.push(text.push(piece.token))))
        else:
            rest = reader.push("" if text.stopped else text.finish())
            yield replace(piece, text=_content((*rest, *reader.finish())))


def _content(parts: tuple[Part, ...]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))
