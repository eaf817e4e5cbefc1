"""Choose a format per tensor to reach a size or a divergence, instead of following a named type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from localllm.base.notices import Notice, Setting
from localllm.base.units import size
from localllm.quant import FORMATS
from localllm.quant.mixes import MixOptions, role
from localllm.quantize.calibration.imatrix import Imatrix
from localllm.quantize.calibration.mix import best
from localllm.quantize.calibration.sensitivity import Trial, fit_kld
from localllm.quantize.jobs import Job, QuantizeError, check_jobs, copy_jobs, given_jobs, quantizable, size_of
from localllm.quantize.source import Source

# Candidate formats, which occur in good mixes. Rows whose length is not a multiple of 256 use the second list.
WIDE = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
WIDE_WITH_IMATRIX = ("IQ2_XS", "IQ3_XXS", "IQ3_S", *WIDE)
NARROW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
CONTEXT, WINDOWS = 512, 8


@dataclass(frozen=True, slots=True)
class Goal:
    """The size or the divergence to reach. One of the two fields is set, and the other is 0."""

    max_bytes: int = 0
    max_kld: float = 0.0


def candidates(source: Source, options: MixOptions, imatrix: bool) -> dict[str, tuple[str, ...]]:
    """Return the formats to try for each tensor: the current format and smaller formats, or the user's choice."""
    found = {}
    for name, shape, now in quantizable(source):
        what = role(name)
        named = next((to for pattern, to in options.overrides if pattern.search(name)), None)
        given = {"output": options.output, "embedding": options.embedding}.get(what) or named
        if options.leave_output and what == "output":
            given = now
        finest = "F16" if now in ("F32", "F64") else now
        choice = NARROW if shape[-1] % 256 else WIDE_WITH_IMATRIX if imatrix else WIDE
        limit = _bits(finest)
        smaller = [
            f for f in choice if _bits(f) < limit and FORMATS[f].quantize and not shape[-1] % FORMATS[f].block_values
        ]
        found[name] = (given,) if given else (*smaller, finest)
    return found


def _bits(format_name: str) -> float:
    fmt = FORMATS[format_name]
    return 8 * fmt.block_bytes / fmt.block_values


def jobs_for(
    source: Source,
    goal: Goal,
    options: MixOptions,
    text: str,
    imatrix: Imatrix | None,
    threads: int | None,
    windows: int = WINDOWS,
    progress: Callable[[str, int, int], None] | None = None,
    force: bool = False,
    allow_requantize: bool = False,
) -> tuple[list[Job], float | None]:
    """Return the jobs that reach the goal, and their measured divergence on the text. `force` is as in LoadOptions.

    A file that already fits keeps every tensor, and nothing is measured (None). Otherwise quantized tensors raise
    QuantizeError, unless `allow_requantize`.
    """
    if _fits(source, goal, options):
        return copy_jobs(source), None
    choices = candidates(source, options, imatrix is not None)
    coarsest = {name: min(formats, key=_bits) for name, formats in choices.items()}
    check_jobs(given_jobs(source, coarsest), list(coarsest), allow_requantize)  # check before anything is measured
    _check_possible(source, goal, coarsest)
    with Trial(
        source.path, text, ctx_size=CONTEXT, windows=windows, imatrix=imatrix, threads=threads, progress=progress,
        force=force,
    ) as trial:  # fmt: skip
        known = set(trial.names)
        effects = trial.effects({name: formats for name, formats in choices.items() if name in known})
        if goal.max_bytes:
            kept = {name: format_name for name, format_name in coarsest.items() if name not in known}
            formats = best(effects, goal.max_bytes - _rest(source, kept, list(effects)))
            kld = trial.kld(formats)
        else:
            formats, kld = fit_kld(trial, effects, goal.max_kld)
    return given_jobs(source, {**coarsest, **formats}), kld


def _fits(source: Source, goal: Goal, options: MixOptions) -> bool:
    """Return whether a file already fits the size, and no option sets formats."""
    asked = options.output or options.embedding or options.overrides
    return bool(goal.max_bytes) and not asked and size_of(source, copy_jobs(source)) <= goal.max_bytes


def _check_possible(source: Source, goal: Goal, coarsest: Mapping[str, str]) -> None:
    least = size_of(source, given_jobs(source, coarsest))
    if goal.max_bytes and least > goal.max_bytes:
        problem = f"{source.path}: the smallest possible file is {size(least)}, and the limit is {size(goal.max_bytes)}"
        raise QuantizeError(Notice(f"{problem}; raise ", Setting("fit")))


def _rest(source: Source, kept: Mapping[str, str], chosen: list[str]) -> int:
    """Return the bytes of the file except the tensors whose formats are chosen, but with the padding of every
    tensor."""
    jobs = given_jobs(source, kept)
    own = {job.name: job.bytes_after for job in jobs}
    return size_of(source, jobs) - sum(own[name] for name in chosen) + 32 * len(chosen)
