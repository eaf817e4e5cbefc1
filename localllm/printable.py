"""The one function that external text passes before a person reads it: names and values from files, answers of models,
typed input. The command line prints through it (`localllm.cli.terminal.console`), and the errors of all packages use
it, so every package may import this file.
"""

from __future__ import annotations

import re

# C0, DEL and C1; controls of writing direction, which can disguise a line; line and paragraph separators; lone #
# surrogates, which stand for bytes that are not UTF-8.
_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, limit: int | None = 80, keep: str = "") -> str:
    """Return `text` as one harmless line. Characters that control a terminal are escaped as in Python, except those in
    `keep`. Characters from `limit` on are cut off."""
    if limit is not None and len(text) > limit:
        text = text[:limit] + "..."
    return _STEERING.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)
