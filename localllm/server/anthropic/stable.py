"""Remove text that agents change in every request, so that the cached prefix of the prompt can be reused.

Claude Code puts a line with a checksum of the request at the top of its system prompt:

    x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;

and markers with the number of remaining tokens: `<total_tokens>184921 tokens left</total_tokens>`. A local model needs
neither, and a prompt that differs in its first line would lose the cached KV entries of all 20 thousand tokens.
"""

from __future__ import annotations

import re

# The header, with name=value pairs, up to the end of the line. Text may follow the last semicolon.
_HEADER = re.compile(r"x-anthropic-billing-header:(?:[ \t]*+[A-Za-z_][\w-]*+=[^;\n]*+(?:;|(?=\n)|\Z))*+[ \t]*+\n?")
_COUNTER = re.compile(
    r"<total_tokens>\s{0,8}[\d,._]{1,20}(?: tokens?)?(?: (?:left|remaining))?\s{0,8}</total_tokens>[ \t]*+\n?"
)


def stable_prompt(text: str) -> str:
    """Return the text without a billing header at its start and without markers of remaining tokens."""
    header = _HEADER.match(text)
    rest = text[header.end() :] if header else text
    return _COUNTER.sub("", rest) if "<total_tokens>" in rest else rest
