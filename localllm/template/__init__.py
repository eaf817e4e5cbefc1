"""Chat templates, which render messages to a prompt, and the reasoning and tool call format of each model family.

May import: base, options, sandbox, tokenizer.
Begin with: chat_template.py, then encode.py (control tokens) and formats.py (the table of formats).
"""

from __future__ import annotations

from localllm.template.chat_template import ROLES, ChatTemplate, Message, Rendered, renderer
from localllm.template.encode import ChatEncoder, encode_chat
from localllm.template.errors import TemplateError, TemplateLimit, TemplateRejected
from localllm.template.families import FAMILIES, Family, choose_template, given_template

__all__ = [
    "FAMILIES",
    "ROLES",
    "ChatEncoder",
    "ChatTemplate",
    "Family",
    "Message",
    "Rendered",
    "TemplateError",
    "TemplateLimit",
    "TemplateRejected",
    "choose_template",
    "encode_chat",
    "given_template",
    "renderer",
]
