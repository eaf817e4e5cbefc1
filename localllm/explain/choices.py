"""The effect of each sampler: the candidates before and after it, compared over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.engine.top_k import Doubles, top_k_indices
from localllm.explain.record import Candidate, StageRecord
from localllm.options import SamplingOptions
from localllm.sampling.chain import Candidates, enabled_names, softmax


class Seen(NamedTuple):
    """Statistics of the candidates for one token. The fields match `record.TokenChoice`."""

    candidates: tuple[Candidate, ...]
    others: int
    others_mass: float
    stages: tuple[StageRecord, ...]


# The settings of each sampler, under the names in `SamplingOptions`.
_SETTINGS = {
    "penalties": ("repeat_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    "typ_p": ("typical_p",),
    "infill": (),
    "adaptive_p": ("adaptive_target", "adaptive_decay"),
    "mirostat": ("mirostat", "mirostat_tau", "mirostat_eta"),
    "xtc": ("xtc_probability", "xtc_threshold"),
}


def chain_of(options: SamplingOptions) -> tuple[str, ...]:
    """Return the samplers that run, in order, with their settings: "top_k 40"."""
    found = []
    for name in enabled_names(options):
        settings = _SETTINGS.get(name, (name,))
        if name == "temperature" and options.dynatemp_range > 0 and not options.mirostat:
            settings = (*settings, "dynatemp_range", "dynatemp_exp")
        found.append(" ".join([name, *(f"{getattr(options, setting):g}" for setting in settings)]))
    return tuple(found)


class _Spread(NamedTuple):
    """The logits and probabilities of the candidates, expanded to the whole vocabulary."""

    name: str
    logits: NDArray[np.float32]  # (vocabulary,), -inf for removed tokens
    p: Doubles  # (vocabulary,), probabilities; 0 for removed tokens

    @property
    def alive(self) -> NDArray[np.bool_]:
        return self.logits > -np.inf


def seen(stages: Iterable[tuple[str, Candidates]], most: int, also: Iterable[int]) -> Seen:
    """Compare the stages that `Sampler.stages` yields. List the `most` likely tokens of the model, and the tokens in
    `also`."""
    spread = list(_spread(stages))
    first, last = spread[0], spread[-1]
    listed = top_k_indices(first.logits, most).tolist()
    listed += [token for token in dict.fromkeys(also) if token not in listed]
    listed.sort(key=lambda token: (-first.p[token], token))
    outs = {token: next((each.name for each in spread if not each.alive[token]), "") for token in listed}
    rest = np.ones(len(first.p), np.bool_)
    rest[listed] = False
    return Seen(
        tuple([Candidate(token, float(first.p[token]), float(last.p[token]), outs[token]) for token in listed]),
        int(rest.sum()),
        float(first.p[rest].sum()),
        tuple(_stage(before, after) for before, after in pairwise(spread)),
    )


def _spread(stages: Iterable[tuple[str, Candidates]]) -> Iterator[_Spread]:
    size = 0
    for name, candidates in stages:
        size = size or len(candidates.ids)
        logits, p = np.full(size, -np.inf, np.float32), np.zeros(size)
        logits[candidates.ids] = candidates.logits
        p[candidates.ids] = softmax(candidates)
        yield _Spread(name, logits, p)


def _stage(before: _Spread, after: _Spread) -> StageRecord:
    alive = after.alive
    gone = before.alive & ~alive
    changed = alive & (after.logits != before.logits)
    return StageRecord(after.name, int(alive.sum()), int(gone.sum()), float(before.p[gone].sum()), int(changed.sum()))
