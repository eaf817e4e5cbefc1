"""Make external text safe to display: names and values from files, model output, typed input. The command line prints
through this function (`localllm.cli.terminal.console`), and all errors use it, so every package may import this
file."""

from __future__ import annotations

import re

# C0, DEL and C1; bidirectional controls, which can disguise a line; line and paragraph separators; lone surrogates,
# which represent bytes that are not UTF-8.
_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, limit: int | None = 80, keep: str = "") -> str:
    """Return `text` as one line that is safe to display. Terminal control characters are escaped as in Python, except
    characters in `keep`. The text is truncated to `limit` characters.
    """
    if limit is not None and len(text) > limit:
        text = text[:limit] + "..."
    return _STEERING.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)
