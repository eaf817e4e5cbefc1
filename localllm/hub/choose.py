"""Choose the model of a repository to download: the named model, or the best common quantization that fits in
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from localllm.base.printable import printable
from localllm.base.units import size
from localllm.hub.errors import StoreError
from localllm.hub.labels import Variant, is_encoders, label_of, matching, titles

# Quantizations that most repositories offer. F16 and BF16 are left out, since they have Q8_0's quality and take twice
# the time per token.
USUAL = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "MXFP4", "MXFP4_MOE", "IQ4_XS", "Q4_0", "Q3_K_M", "IQ3_M", "Q2_K", "IQ2_M")
SHARE = 0.8  # share of the free memory for weights and KV cache
CACHE_SHARE, LEAST_CACHE = 1 / 8, 512 << 20  # room for the KV cache: a share of the file, and a minimum in bytes
ENCODERS = ("F16", "BF16", "Q8_0", "F32")  # formats of mmproj files, the best first
_SHOWN = 40  # maximum names in a list


class VariantChoice(NamedTuple):
    variant: Variant
    reason: str  # why this model was chosen, in one line, or "" if the user named it


def choose_variant(
    repo: str, given: Sequence[Variant], quant: str, size_of: Callable[[Variant], int], free: int, here: Sequence[str]
) -> VariantChoice:
    """Return the model to download; raise StoreError if `quant` matches no model or several.

    `free` is the free memory in bytes. `here` are labels that are already on this computer, which are preferred if
    `quant` is "".
    """
    whole = [each for each in given if not each.missing]
    found = matching(whole, quant)
    if not found:
        kind = "complete GGUF files" if not quant else f"{printable(quant)}"
        raise StoreError(f"{repo} has no {kind}; it has {_names(repo, whole or given)}")
    if quant and len(found) > 1:
        raise StoreError(f"{repo}:{printable(quant)} is ambiguous: give one of {_names(repo, found)}")
    if len(found) == 1:
        return VariantChoice(found[0], "" if quant else "the only model in the repository")
    known = [each for each in found if each.label in here]
    if known:
        return VariantChoice(max(known, key=size_of), "already on this computer")
    fitting = [each for each in found if needed(size_of(each)) <= SHARE * free]
    usual = [each for each in fitting if each.label in USUAL]
    memory = f"{size(free)} of free memory"
    if not fitting:
        return VariantChoice(min(found, key=size_of), f"the smallest, but too large for {memory}")
    kind = "usual type" if usual else "type"
    return VariantChoice(
        max(usual or fitting, key=size_of), f"the largest {kind} that fits in {memory} with room for the cache"
    )


def choose_encoders(files: Iterable[str], model: str) -> str:
    """Return the mmproj file that belongs to a model, or "": one in its folder or above it, of 16 bits if there are
    several."""
    folder = model.rpartition("/")[0]
    found = []
    for path in files:
        place, _, name = path.rpartition("/")
        if is_encoders(path) and f"{folder}/".startswith(f"{place}/" if place else ""):
            label = label_of(name)
            found.append((-len(place), ENCODERS.index(label) if label in ENCODERS else len(ENCODERS), name, path))
    return min(found)[-1] if found else ""


def needed(held: int) -> int:
    """Return the memory that a model with this number of bytes needs with a short context."""
    return held + max(LEAST_CACHE, int(CACHE_SHARE * held))


def _names(repo: str, given: Sequence[Variant]) -> str:
    """Return the valid suffixes of the repository's name as a list."""
    names = [title.removeprefix(f"{repo}:") for title in titles(repo, given).values()]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(each) for each in names[:_SHOWN]) + more
