"""Encode a text with the tokenizer.json of a Hugging Face checkpoint, as a task of the confined child process.

The tokenizers library trusts such files. A normalizer that expands one letter to a thousand, four times over, aborts
the process after allocating gigabytes, and a regular expression may never finish.
"""

from __future__ import annotations

import os
from typing import Any

from localllm.sandbox.process import ResourceLimits


def limits(json: str) -> ResourceLimits:
    """Return the limits for loading a tokenizer.json. A file with 256,000 tokens and 500,000 merges (10 MB) takes 1.3 s
    and 350 MB.
    """
    return ResourceLimits(seconds=60, wall=180, memory=(512 << 20) + 64 * len(json))


def prepare() -> None:
    """Load the library while files can still be opened."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE())


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids of `request["text"]` by the tokenizer `request["json"]`: plain, and with special tokens
    added.

    If the library cannot read the file, return the error.
    """
    import tokenizers

    try:
        theirs = tokenizers.Tokenizer.from_str(request["json"])
        theirs.no_truncation()
        plain, whole = (theirs.encode(request["text"], add_special_tokens=special).ids for special in (False, True))
    except BaseException as error:  # the package raises nothing more specific, and its panics are not Exceptions
        if isinstance(error, MemoryError):
            raise
        return {"error": str(error)}
    return {"plain": plain, "whole": whole}
