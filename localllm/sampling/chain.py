"""The samplers of the chain. Each is a pure function that removes or reweights candidates.

They behave like llama.cpp's src/llama-sampler.cpp (2026-10). Logits are float32 as in llama.cpp; probabilities are
float64. Equal logits are ordered by token id, which llama.cpp leaves undefined. `SAMPLERS` lists all samplers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.engine.top_k import FIRST, Doubles, Floats, Ids, Indices, descending, leading, top_k_indices
from localllm.options import SamplingOptions
from localllm.sampling.errors import SamplingError
from localllm.sampling.feedback import FITTED, Feedback, toward, zipf_count
from localllm.sampling.infill import Spellings, continuations_of
from localllm.sampling.repetition import Breakers, continuations, window_counts

HIGHEST = 1e20  # far above the largest logit of any working model; below it, no computation in this module overflows
COLDEST = 1e-10  # lower temperatures count as 0
# Error bound of a total probability computed from float32 weights: 88 * 2^-24 from rounding exponents, 3 * 2^-24 from
# np.exp, and 40 * 2^-24 from the pairwise sum, doubled.
_DOUBT = 2e-5
_RUN = 8192  # candidates whose float32 weights are summed at a time: they fit in the CPU cache and need no new pages


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates for the next token, by descending logit (ties by id) if `descending`, otherwise by id.

    A logit of -inf means probability zero.
    """

    ids: Ids  # (n,)
    logits: Floats  # (n,)
    descending: bool = False

    @property
    def peak(self) -> float:
        """Return the largest logit."""
        return float(self.logits[0] if self.descending else self.logits.max())

    def take(self, rows: Indices | NDArray[np.bool_] | slice, descending: bool) -> Candidates:
        return Candidates(self.ids[rows], self.logits[rows], descending)


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """The inputs of a sampler besides its options.

    They are the tokens so far, DRY's sequence breakers, XTC's seed, the token texts for infill, whether the constraint
    allows a token, and the feedback state of Mirostat and adaptive-p.
    """

    history: Sequence[int] = ()
    dry_breakers: Breakers = field(default_factory=dict)
    seed: int = 0
    spellings: Spellings | None = None
    allows: Callable[[int], bool] = lambda token: True
    feedback: Feedback = field(default_factory=lambda: Feedback.start(SamplingOptions()))


def softmax(candidates: Candidates) -> Doubles:
    """Return probabilities (n,); at least one logit must be finite."""
    weights: Doubles = candidates.logits.astype(np.float64)
    weights -= candidates.peak  # in place: allocating new pages for a whole vocabulary takes as long as the arithmetic
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def surprise(candidates: Candidates) -> tuple[Doubles, Doubles, float]:
    """Return the probabilities p (n,), the surprisals -log p (n,) in nats (about 1000 if p is 0), and the entropy."""
    below = np.maximum(candidates.logits.astype(np.float64) - candidates.peak, -1000.0)
    weights = np.exp(below)
    total = float(weights.sum())
    p = weights / total
    surprises = math.log(total) - below
    return p, surprises, float((p * surprises).sum())


def changed(candidates: Candidates, ids: Ids, change: Callable[[Doubles, Indices], Doubles]) -> Candidates:
    """Return the candidates ordered by id, with `change(logits, which)` applied to the logits of `ids[which]`.

    Raises SamplingError if no token remains.
    """
    if candidates.descending:
        candidates = candidates.take(np.argsort(candidates.ids), descending=False)
    rows = np.searchsorted(candidates.ids, ids)
    which = np.flatnonzero(candidates.ids[np.minimum(rows, len(candidates.ids) - 1)] == ids)
    rows = rows[which]
    logits = candidates.logits.copy()
    with np.errstate(over="ignore"):  # values below float32's range become -inf, which removes the token
        logits[rows] = change(logits[rows].astype(np.float64), which)
    result = Candidates(candidates.ids, logits)
    if not abs(result.peak) < HIGHEST:
        raise SamplingError(
            f"logit_bias and penalties bring the largest logit to {result.peak}, so that no token can be chosen: "
            "use smaller ones"
        )
    return result


def penalties(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Apply repeat (CTRL, arXiv 1909.05858, fixed for negative logits), frequency and presence penalties."""
    tokens, counts = window_counts(context.history, options.repeat_last_n)
    subtract = counts * options.frequency_penalty + options.presence_penalty
    factor = options.repeat_penalty

    def change(logits: Doubles, which: Indices) -> Doubles:
        repeated: Doubles = np.where(logits <= 0, logits * factor, logits / factor)
        return repeated - subtract[which]

    return changed(candidates, tokens, change)


def dry(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Don't Repeat Yourself: a token that extends a repetition of n tokens is penalized by multiplier * base^(n -
    allowed).
    """
    longest = continuations(
        context.history, options.dry_penalty_last_n, options.dry_allowed_length, context.dry_breakers
    )
    if not longest:
        return candidates
    # A penalty of e^80 already excludes a token and is still finite in float32.
    most = int(80 / math.log(options.dry_base)) if options.dry_base > 1.000001 else 0
    penalty = np.array(
        [
            options.dry_multiplier * options.dry_base ** min(n - options.dry_allowed_length, most)
            for n in longest.values()
        ]
    )
    tokens = np.array(list(longest), np.int32)
    return changed(candidates, tokens, lambda logits, which: logits - penalty[which])


def top_n_sigma(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Remove tokens more than n standard deviations of the logits below the largest (arXiv 2411.07641)."""
    logits = candidates.logits
    finite = logits if logits.min() > -math.inf else logits[logits > -math.inf]
    floor = max(candidates.peak - options.top_n_sigma * float(finite.std(dtype=np.float64)), -3e38)  # finite in float32
    kept = logits.copy()
    np.putmask(kept, kept < floor, -math.inf)
    return Candidates(candidates.ids, kept, candidates.descending)


def top_k(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Keep the k most likely tokens."""
    if candidates.descending:
        return candidates.take(slice(options.top_k), descending=True)
    return candidates.take(top_k_indices(candidates.logits, options.top_k), descending=True)


def typ_p(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Keep the tokens with surprisal closest to the entropy until their total probability exceeds p
    (arXiv 2202.00666)."""
    p, surprises, entropy = surprise(candidates)
    rows = leading(-np.abs(surprises - entropy).astype(np.float32), p, options.typical_p, "right", options.min_keep)
    return candidates.take(np.sort(rows), candidates.descending)


def top_p(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Keep the most likely tokens until their total probability reaches p (nucleus sampling, arXiv 1904.09751)."""
    if candidates.descending:
        needed = int(softmax(candidates).cumsum().searchsorted(options.top_p)) + 1
        return candidates.take(slice(max(needed, options.min_keep)), descending=True)
    rows = top_k_indices(candidates.logits, max(FIRST, options.min_keep))
    sums = _sums(candidates, rows)
    needed = int(sums.searchsorted(options.top_p)) + 1
    if needed <= len(rows) and _certain(sums, needed, options.top_p):
        return candidates.take(rows[: max(needed, options.min_keep)], descending=True)
    p = softmax(candidates)
    return candidates.take(leading(candidates.logits, p, options.top_p, "left", options.min_keep), descending=True)


def min_p(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Keep tokens at least `min_p` times as likely as the top token (arXiv 2407.01082)."""
    kept = _likely(candidates, options)
    if np.count_nonzero(kept) >= options.min_keep:
        return candidates.take(kept, candidates.descending)
    return candidates.take(top_k_indices(candidates.logits, options.min_keep), descending=True)


def top_p_min_p(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Return the result of `top_p` followed by `min_p`, searching only the few tokens that `min_p` keeps."""
    if not candidates.descending:
        rows = np.flatnonzero(_likely(candidates, options))
        if len(rows) >= options.min_keep:
            rows = rows[descending(candidates.logits[rows])]
            sums = _sums(candidates, rows)
            needed = int(sums.searchsorted(options.top_p)) + 1
            if _certain(sums, needed, options.top_p):
                return candidates.take(rows[: max(needed, options.min_keep)], descending=True)
    return min_p(top_p(candidates, options, context), options, context)


def _likely(candidates: Candidates, options: SamplingOptions) -> NDArray[np.bool_]:
    """Return the mask (n,) of candidates that `min_p` keeps."""
    return candidates.logits >= candidates.peak + math.log(options.min_p)


def _sums(candidates: Candidates, rows: Indices) -> Doubles:
    """Return cumulative probabilities (n,) of `rows` (n,), with an error below _DOUBT. The total is summed in float32,
    which takes a tenth of the time.
    """
    total = _run_sums(candidates).sum()
    sums: Doubles = np.exp(candidates.logits[rows].astype(np.float64) - candidates.peak).cumsum() / total
    return sums


def _run_sums(candidates: Candidates) -> Doubles:
    """Return the sums (runs,) of unnormalized float32 probabilities of _RUN candidates each.

    Their cumulative sums have an error below _DOUBT of the total.
    """
    count, peak = len(candidates.logits), np.float32(candidates.peak)
    buffer = np.empty(min(_RUN, count), np.float32)
    return np.array([_weights(candidates, start, peak, buffer).sum() for start in range(0, count, _RUN)], np.float64)


def _weights(candidates: Candidates, start: int, peak: np.float32, buffer: Floats) -> Floats:
    """Return the unnormalized probabilities of a run of candidates, in `buffer`."""
    logits = candidates.logits[start : start + _RUN]
    weights = np.subtract(logits, peak, out=buffer[: len(logits)])
    return np.exp(weights, out=weights)


def quick_draw(candidates: Candidates, uniform: float) -> int | None:
    """Return the token at which the cumulative probability, in candidate order, exceeds `uniform`.

    Return None if float32 is too imprecise to decide. `softmax` is exact enough but takes five times as long.
    """
    ends = _run_sums(candidates).cumsum()
    target, doubt = uniform * ends[-1], _DOUBT * ends[-1]
    run = int(ends.searchsorted(target, side="right"))
    if run == len(ends):
        return None
    first = run * _RUN
    weights = _weights(candidates, first, np.float32(candidates.peak), np.empty(_RUN, np.float32))
    sums = (ends[run - 1] if run else 0.0) + weights.cumsum(dtype=np.float64)
    at = int(sums.searchsorted(target, side="right"))
    if at == len(sums) or sums[at] - target < doubt:
        return None
    before = sums[at] - weights[at]
    if first + at and target - before < doubt:
        return None
    return int(candidates.ids[first + at])


def _certain(sums: Doubles, needed: int, share: float) -> bool:
    """Return whether exact sums would first reach `share` at the same index, which may be past the end."""
    below = needed < 2 or sums[needed - 2] < share - _DOUBT
    return bool(below and (needed > len(sums) or sums[needed - 1] > share + _DOUBT))


def xtc(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Exclude Top Choices: with some probability, remove all tokens above the threshold except the least likely of
    them.

    The decision depends only on the seed and the number of tokens so far. A repeated call, or a call after a rollback,
    therefore gives the same distribution.
    """
    if len(candidates.ids) < 2 or _roll(context) > options.xtc_probability:
        return candidates
    p = softmax(candidates)
    likely = np.flatnonzero((p >= options.xtc_threshold) & (p > 0))
    if len(likely) < 2 or len(p) - (len(likely) - 1) < options.min_keep:
        return candidates
    kept = np.ones(len(p), np.bool_)
    kept[likely[top_k_indices(candidates.logits[likely], len(likely))[:-1]]] = False
    return candidates.take(kept, candidates.descending)


def temperature(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Divide logits by the temperature; at 0 and below, keep only the largest logit (ties: the lowest id)."""
    degree = options.temperature
    if options.dynatemp_range > 0 and not options.mirostat and len(candidates.ids) > 1:
        entropy = surprise(candidates)[2] / math.log(len(candidates.ids))  # normalized to 0 ... 1
        low, high = max(0.0, degree - options.dynatemp_range), degree + options.dynatemp_range
        degree = low + (high - low) * max(0.0, entropy) ** options.dynatemp_exp
    if degree < COLDEST:
        peak = int(candidates.logits.argmax())
        return candidates.take(slice(peak, peak + 1), descending=True)
    if degree == 1:
        return candidates
    with np.errstate(over="ignore"):  # an overflow gives -inf
        return Candidates(candidates.ids, candidates.logits / np.float32(degree), candidates.descending)


def infill(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Keep the end-of-generation tokens, or the continuations shared by enough candidates; otherwise end the answer."""
    if context.spellings is None:
        raise SamplingError("the infill sampler needs a tokenizer, which this model lacks: leave it out")
    if not candidates.descending:
        candidates = candidates.take(descending(candidates.logits), descending=True)
    rows = continuations_of(candidates.ids, softmax(candidates), context.spellings)
    if rows is not None:
        return candidates.take(rows, descending=True)
    end = context.spellings.end
    if end is None or not context.allows(end):
        return candidates.take(slice(1), descending=True)
    return Candidates(np.array([end], np.int32), np.ones(1, np.float32), descending=True)


def mirostat(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Keep tokens with surprisal below an adaptive limit. Version 1 estimates surprisals by fitting Zipf's law; version
    2 computes each token's surprisal.
    """
    mu = context.feedback.mu
    if options.mirostat == 1:
        rows = top_k_indices(candidates.logits, FITTED)
        count = zipf_count(softmax(candidates)[rows], len(candidates.ids), mu)
        return candidates.take(top_k_indices(candidates.logits, count), descending=True)
    likely = np.flatnonzero(surprise(candidates)[1] <= mu * math.log(2))
    return candidates.take(likely if len(likely) else top_k_indices(candidates.logits, 1), candidates.descending)


def _surprised(before: Candidates, after: Candidates, token: int, options: SamplingOptions, feedback: Feedback) -> None:
    feedback.surprised(_probability(after, token), options)


def adaptive_p(candidates: Candidates, options: SamplingOptions, context: SamplingContext) -> Candidates:
    """Prefer tokens whose probability is near the target, corrected by the mean probability of the tokens chosen so
    far.
    """
    if candidates.descending:
        candidates = candidates.take(np.argsort(candidates.ids), descending=False)
    logits = toward(softmax(candidates), options.adaptive_target, context.feedback.mean).astype(np.float32)
    return Candidates(candidates.ids, np.where(candidates.logits > -np.inf, logits, np.float32(-np.inf)))


def _took(before: Candidates, after: Candidates, token: int, options: SamplingOptions, feedback: Feedback) -> None:
    feedback.took(_probability(before, token), options)


def _probability(candidates: Candidates, token: int) -> float:
    return float(softmax(candidates)[candidates.ids == token].sum())


def _roll(context: SamplingContext) -> float:
    """Return a uniform random number in [0, 1), determined by seed and position."""
    return (np.random.Philox(key=context.seed, counter=len(context.history)).random_raw() >> 11) * 2.0**-53


class SamplerStage(NamedTuple):
    """A sampler: its function, the condition that enables it, and whether it preserves the largest logit.

    `learn` receives the candidates before and after the sampler, and the chosen token.
    """

    run: Callable[[Candidates, SamplingOptions, SamplingContext], Candidates]
    wanted: Callable[[SamplingOptions], bool]
    keeps_peak: bool
    learn: Callable[[Candidates, Candidates, int, SamplingOptions, Feedback], None] | None = None


def _penalizes(options: SamplingOptions) -> bool:
    neutral = (options.repeat_penalty, options.frequency_penalty, options.presence_penalty) == (1, 0, 0)
    return options.repeat_last_n > 0 and not neutral


SAMPLERS: dict[str, SamplerStage] = {
    "penalties": SamplerStage(penalties, _penalizes, keeps_peak=False),
    "dry": SamplerStage(dry, lambda o: o.dry_multiplier > 0 and o.dry_penalty_last_n > 0, keeps_peak=False),
    "top_n_sigma": SamplerStage(top_n_sigma, lambda o: o.top_n_sigma > 0, keeps_peak=True),
    "top_k": SamplerStage(top_k, lambda o: o.top_k > 0, keeps_peak=True),
    "typ_p": SamplerStage(typ_p, lambda o: o.typical_p < 1, keeps_peak=False),
    "top_p": SamplerStage(top_p, lambda o: o.top_p < 1, keeps_peak=True),
    "min_p": SamplerStage(min_p, lambda o: o.min_p > 0, keeps_peak=True),
    "xtc": SamplerStage(xtc, lambda o: o.xtc_probability > 0 and o.xtc_threshold <= 0.5, keeps_peak=False),
    "temperature": SamplerStage(temperature, lambda o: True, keeps_peak=True),
    "infill": SamplerStage(infill, lambda o: True, keeps_peak=False),
    "adaptive_p": SamplerStage(adaptive_p, lambda o: o.adaptive_target >= 0, keeps_peak=False, learn=_took),
    "mirostat": SamplerStage(mirostat, lambda o: o.mirostat > 0, keeps_peak=True, learn=_surprised),
}


def enabled_names(options: SamplingOptions) -> list[str]:
    """Return the names of the enabled samplers in order. Greedy sampling skips samplers that preserve the largest
    logit.

    Mirostat replaces all samplers except temperature; adaptive-p is always last.
    """
    order = [name for name in options.samplers if name != "adaptive_p"]
    order += ["adaptive_p"] if len(order) < len(options.samplers) else []
    order = ["temperature", "mirostat"] if options.mirostat else order
    names = [name for name in order if SAMPLERS[name].wanted(options)]
    if options.greedy:
        names = names[: names.index("temperature")]
        while names and SAMPLERS[names[-1]].keeps_peak:
            names.pop()
        names.append("temperature")
    return names


def enabled(options: SamplingOptions) -> tuple[SamplerStage, ...]:
    """Return the enabled samplers; top_p followed by min_p is fused into one function."""
    names = enabled_names(options)
    chain = [SAMPLERS[name] for name in names]
    for at, pair in enumerate(pairwise(names)):
        if pair == ("top_p", "min_p"):
            chain[at : at + 2] = [SamplerStage(top_p_min_p, lambda o: True, keeps_peak=True)]
            break
    return tuple(chain)
