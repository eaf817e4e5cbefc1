"""Chat templates: a conversation as the text, and the tokens, that a model was trained on."""

from __future__ import annotations

from typing import Protocol

from localllm.template.chat import ChatTemplate, Message, Rendered
from localllm.template.errors import TemplateError, TemplateLimit, TemplateRejected
from localllm.template.families import FAMILIES, choose_template

__all__ = [
    "FAMILIES",
    "ChatTemplate",
    "Message",
    "Rendered",
    "TemplateError",
    "TemplateLimit",
    "TemplateRejected",
    "choose_template",
    "encode_chat",
]


class _Encoder(Protocol):
    @property
    def bos(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...
    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]: ...


def encode_chat(tokenizer: _Encoder, text: str) -> list[int]:
    """Ids of a rendered conversation: its special tokens parsed, one BOS where the file wants one, no EOS.

    A template that writes BOS itself and a file that adds it give one BOS, not two.
    """
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    return ids
