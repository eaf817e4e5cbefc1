"""Reads the diffusion settings of a GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.base.errors import LocalLLMError

_MASK = "tokenizer.ggml.mask_token_id"
_SHIFTED = "diffusion.shift_logits"


@dataclass(frozen=True, slots=True)
class Masking:
    """The mask token id, and whether logits predict the next position's token (Dream, RND1)."""

    mask: int
    shifted: bool


def masking_of(metadata: Mapping[str, Any], vocabulary: int) -> Masking:
    """Return the GGUF's diffusion settings. Raise LocalLLMError naming an invalid or missing key."""
    mask, shifted = metadata.get(_MASK), metadata.get(_SHIFTED, True)
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocabulary:
        found = "the key is missing" if mask is None else f"expected a token from 0 to {vocabulary - 1}, found {mask!r}"
        raise LocalLLMError(f"{_MASK}: {found}; a diffusion model fills in this token, so convert the file again")
    if not isinstance(shifted, bool):
        raise LocalLLMError(f"{_SHIFTED}: expected true or false, found {str(shifted)[:60]!r}; convert the file again")
    return Masking(mask, shifted)
