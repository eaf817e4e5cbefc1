"""Short names of popular models, such as `llama3.2:1b`, in Ollama's style.

File sizes on the hub in November 2026, rounded. A pull reports the actual size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import MappingProxyType

from localllm.base.spelling import closest, either
from localllm.hub.errors import StoreError
from localllm.hub.reference import Reference, reference


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model on the hub with a short name."""

    name: str
    repo: str
    quant: str
    bytes: int  # size of the file
    licence: str
    read: float = 1.0  # share of the weights that decoding one token reads; below 1 for mixtures of experts

    @property
    def reference(self) -> str:
        return f"{self.repo}:{self.quant}"


_LLAMA, _GEMMA, _APACHE, _MIT = "Llama community licence", "Gemma terms of use", "Apache-2.0", "MIT"
_MB = 10**6
_SHOWN = 3  # maximum suggestions
_BEGINNING = 3  # minimum letters of the beginning of a family
_ALIKE = 0.85  # minimum similarity of letters: "lama" is llama, "llava" is another model
# The first model of a family is also found without its tag.
KNOWN = (
    KnownModel("qwen3.5:2b", "unsloth/Qwen3.5-2B-GGUF", "Q4_K_M", 1281 * _MB, _APACHE),
    KnownModel("qwen3.5:4b", "unsloth/Qwen3.5-4B-GGUF", "Q4_K_M", 2740 * _MB, _APACHE),
    KnownModel("qwen3.5:9b", "unsloth/Qwen3.5-9B-GGUF", "Q4_K_M", 5680 * _MB, _APACHE),
    KnownModel("qwen3.5:35b", "unsloth/Qwen3.5-35B-A3B-GGUF", "Q4_K_M", 22016 * _MB, _APACHE, 0.1),
    KnownModel("qwen3:0.6b", "unsloth/Qwen3-0.6B-GGUF", "Q4_K_M", 397 * _MB, _APACHE),
    KnownModel("qwen3:1.7b", "unsloth/Qwen3-1.7B-GGUF", "Q4_K_M", 1107 * _MB, _APACHE),
    KnownModel("qwen3:4b", "unsloth/Qwen3-4B-Instruct-2507-GGUF", "Q4_K_M", 2497 * _MB, _APACHE),
    KnownModel("qwen3:8b", "unsloth/Qwen3-8B-GGUF", "Q4_K_M", 5028 * _MB, _APACHE),
    KnownModel("qwen3:14b", "unsloth/Qwen3-14B-GGUF", "Q4_K_M", 9002 * _MB, _APACHE),
    KnownModel("qwen3:30b", "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF", "Q4_K_M", 18557 * _MB, _APACHE, 0.12),
    KnownModel("qwen2.5-coder:7b", "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF", "Q4_K_M", 4683 * _MB, _APACHE),
    KnownModel("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF", "Q4_K_M", 808 * _MB, _LLAMA),
    KnownModel("llama3.2:3b", "bartowski/Llama-3.2-3B-Instruct-GGUF", "Q4_K_M", 2019 * _MB, _LLAMA),
    KnownModel("llama3.1:8b", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Q4_K_M", 4921 * _MB, _LLAMA),
    KnownModel("gemma3:1b", "ggml-org/gemma-3-1b-it-GGUF", "Q4_K_M", 806 * _MB, _GEMMA),
    KnownModel("gemma3:4b", "ggml-org/gemma-3-4b-it-GGUF", "Q4_K_M", 2490 * _MB, _GEMMA),
    KnownModel("gemma3:12b", "ggml-org/gemma-3-12b-it-GGUF", "Q4_K_M", 7301 * _MB, _GEMMA),
    KnownModel("phi4:14b", "bartowski/phi-4-GGUF", "Q4_K_M", 9053 * _MB, _MIT),
    KnownModel("gpt-oss:20b", "ggml-org/gpt-oss-20b-GGUF", "MXFP4", 12110 * _MB, _APACHE, 0.2),
    KnownModel("smollm2:360m", "bartowski/SmolLM2-360M-Instruct-GGUF", "Q8_0", 386 * _MB, _APACHE),
)


def full_name(name: str) -> str:
    """Return USER/REPO[:QUANT] for a short name, or "" for other names. Capitals make no difference."""
    known = known_model(name)
    return known.reference if known is not None else ""


def known_model(name: str) -> KnownModel | None:
    """Return the model in our table with this name. A name without a tag returns the first model of its family."""
    wanted = name.strip().lower().removesuffix(":latest")
    return next((each for each in KNOWN if wanted in (each.name, each.name.partition(":")[0])), None)


def wanted_reference(text: str, own: Mapping[str, str] = MappingProxyType({})) -> Reference:
    """Parse a short name or USER/REPO[:QUANT]; raise StoreError for other texts. `own` has the user's short names."""
    name = text.strip().lower().removesuffix(":latest")
    try:
        return reference(own.get(name, "") or full_name(text) or text)
    except StoreError as error:
        near = closest(name, own)
        meant = [near] if near else known_like(name)
        raise StoreError(f"{error}; did you mean {either(meant)}?" if meant else str(error)) from None


def known_like(name: str) -> list[str]:
    """Return the short names in our table that a misspelled name may mean, at most three.

    The letters of the family must be similar, or be its beginning. Its digits must begin with the given ones, since
    another number is another model. Models with the given tag replace the others.
    """
    family, _, tag = name.lower().partition(":")
    found = [each.name for each in KNOWN if _bare(name) == _bare(each.name) or _like(family, each.name)]
    return ([each for each in found if tag == each.partition(":")[2]] or found)[:_SHOWN]


def _like(family: str, known: str) -> bool:
    known = known.partition(":")[0]
    letters, full = (re.sub(r"[^a-z]", "", each) for each in (family, known))
    digits, number = (re.sub(r"[^0-9]", "", each) for each in (family, known))
    if not number.startswith(digits):
        return False
    begins = len(letters) >= _BEGINNING and full.startswith(letters)
    same = sorted(letters) == sorted(full)  # two letters in the wrong order
    return begins or same or SequenceMatcher(None, letters, full).ratio() >= _ALIKE


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def named_like(words: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the short names, ours and the user's, that contain all words themselves or in what they mean."""
    known = {each.name: each.reference for each in KNOWN} | dict(own)
    wanted = [part for word in words for part in word.lower().split()]
    return {name: full for name, full in known.items() if all(part in f"{name} {full}".lower() for part in wanted)}
