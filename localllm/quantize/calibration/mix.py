"""Choose a format for every tensor by its quality loss: the best mix for a size, or the smallest mix for a quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of storing a tensor in a format."""

    format: str
    bytes: int
    error: float  # squared error of the outputs relative to their squares; for an embedding table, of the values
    kld: float  # expected mean KL divergence if only this tensor is changed


Effects = Mapping[str, Sequence[Effect]]


def best(effects: Effects, max_bytes: int) -> dict[str, str]:
    """Return the formats with the least expected divergence within `max_bytes`; raise LocalLLMError if no formats
    fit."""
    chosen, steps = _ladder(effects)
    size = sum(_of(effects, name, format_name).bytes for name, format_name in chosen.items())
    if size > max_bytes:
        raise LocalLLMError(
            Notice(f"the smallest mix needs {size:,} bytes, and {max_bytes:,} are left; raise ", Setting("fit"))
        )
    for _, name, effect in steps:
        more = effect.bytes - _of(effects, name, chosen[name]).bytes
        if size + more <= max_bytes:
            size += more
            chosen[name] = effect.format
    return chosen


def smallest(effects: Effects, max_kld: float) -> dict[str, str]:
    """Return the formats with the fewest bytes whose expected divergences add up to at most `max_kld`.

    Raises LocalLLMError if even the finest formats exceed it.
    """
    chosen, steps = _ladder(effects)
    cost = sum(_of(effects, name, format_name).kld for name, format_name in chosen.items())
    for _, name, effect in steps:
        if cost <= max_kld:
            break
        cost += effect.kld - _of(effects, name, chosen[name]).kld
        chosen[name] = effect.format
    if cost > max_kld:
        problem = f"even the finest formats have a divergence of {cost:.2g}, and the limit is {max_kld:g}"
        raise LocalLLMError(Notice(f"{problem}; raise ", Setting("max_kld")))
    for name in dict.fromkeys(name for _, name, _ in reversed(steps)):  # the last step often overshoots
        at = _of(effects, name, chosen[name])
        coarser = [e for e in effects[name] if e.bytes < at.bytes and cost - at.kld + e.kld <= max_kld]
        if coarser:
            least = min(coarser, key=lambda e: e.bytes)
            cost += least.kld - at.kld
            chosen[name] = least.format
    return chosen


def _of(effects: Effects, name: str, format_name: str) -> Effect:
    return next(effect for effect in effects[name] if effect.format == format_name)


def finest(effects: Effects) -> list[Effect]:
    """Return the format with the lowest loss for every tensor."""
    return [min(options, key=lambda e: e.kld) for options in effects.values()]


def _ladder(effects: Effects) -> tuple[dict[str, str], list[tuple[float, str, Effect]]]:
    """Return the coarsest formats, and the steps up from them, ordered by divergence gained per byte.

    The steps of a tensor follow the lower convex hull of its effects, so each step gains less per byte than the
    previous one.
    """
    chosen, steps = {}, []
    for name, options in effects.items():
        at, *rest = sorted(options, key=lambda e: (e.bytes, e.kld))
        chosen[name] = at.format
        while finer := [e for e in rest if e.bytes > at.bytes and e.kld < at.kld]:
            step = max(finer, key=lambda e: (at.kld - e.kld) / (e.bytes - at.bytes))
            steps.append(((at.kld - step.kld) / (step.bytes - at.bytes), name, step))
            at = step
    return chosen, sorted(steps, key=lambda step: -step[0])
