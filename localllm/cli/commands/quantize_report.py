"""The output of `localllm quantize`: the job and the error of every tensor, and the effect on a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, said
from localllm.cli.commands.perplexity import mean
from localllm.cli.terminal.console import YELLOW, RateProgress, room, say
from localllm.cli.terminal.formatting import in_columns, size, text_table
from localllm.cli.tool_options import QuantizeOptions
from localllm.evaluation import ModelSource, Scores, cut_windows, evaluate, statistics
from localllm.model import load
from localllm.quantize.calibration.imatrix import Imatrix
from localllm.quantize.conversion import Error
from localllm.quantize.jobs import Job, check_jobs, size_of
from localllm.quantize.source import Source
from localllm.quantize.target import CONTEXT


def show_report(source: Source, jobs: Sequence[Job], imatrix: Imatrix | None, own: QuantizeOptions) -> None:
    """Print the jobs, the file size, and warnings about the jobs."""
    print(job_table(jobs))
    print(f"{summary(jobs)}; a file of {size(size_of(source, jobs))}")
    for note in _notes(jobs, imatrix, own):
        say(note, YELLOW)


def job_table(jobs: Sequence[Job]) -> str:
    rows = [
        (
            job.name,
            " x ".join(map(str, job.shape)),
            job.before,
            job.after if job.after == job.wanted else f"{job.after} (rows do not fit {job.wanted})",
            size(job.bytes_before),
            size(job.bytes_after),
        )
        for job in jobs
    ]
    return text_table(
        ("tensor", "shape", "from", "to", "size", "becomes"), rows, right=("size", "becomes"), room=room()
    )


def summary(jobs: Sequence[Job]) -> str:
    """Return the total tensor size, the bits per weight, and the formats."""
    before, after = sum(s.bytes_before for s in jobs), sum(s.bytes_after for s in jobs)
    values = sum(s.values for s in jobs)
    formats = sorted({job.after for job in jobs if job.changes}) or ["unchanged"]
    return f"{size(before)} -> {size(after)}, {8 * after / values:.2f} bits per weight ({', '.join(formats)})"


def _notes(jobs: Sequence[Job], imatrix: Imatrix | None, own: QuantizeOptions) -> Iterator[str]:
    if not (own.imatrix or own.method) and any(job.needs_imatrix for job in jobs):
        yield "note: this type needs --imatrix FILE, or --imatrix auto"
    known = imatrix.entries if imatrix is not None else [job.name for job in jobs]
    try:
        check_jobs(jobs, known, own.allow_requantize)
    except LocalLLMError as problem:
        yield Notice("note: ", said(problem))


def error_table(jobs: Sequence[Job], errors: Mapping[str, Error]) -> str:
    """Return, per tensor, the root mean square error, relative error, weighted relative error and largest error."""
    rows = []
    for job in jobs:
        error = errors.get(job.name)
        if error is not None:
            weighted = "" if error.weighted is None else f"{100 * error.weighted:.3f} %"
            numbers = (f"{error.rmse:.3g}", f"{100 * error.relative:.3f} %", weighted, f"{error.largest:.3g}")
            rows.append((job.name, job.after, *numbers))
    right = ("RMSE", "relative", "weighted", "largest")
    return text_table(("tensor", "format", *right), rows, right, room()) if rows else "no tensor changed its format"


def text_report(before: Path, after: Path, text: str, own: QuantizeOptions, progress: RateProgress) -> str:
    """Return the perplexity of the text (--test or -f) before and after quantization, and the divergence of the
    distributions."""
    name = own.test or own.file
    with ExitStack() as stack:
        models = [
            stack.enter_context(load(path, ctx_size=CONTEXT, threads=own.threads, progress=progress, force=own.force))
            for path in (before, after)
        ]
        windows = cut_windows(models[0], text, CONTEXT, own.chunks or None)
        base, changed = (ModelSource(model, windows) for model in models)
        result, divergence = statistics(Scores.join(list(evaluate(windows, changed, base, progress))))
    assert divergence is not None
    rows = [
        (f"perplexity on {name}, before", mean(divergence.base.perplexity, 4, 4)),
        ("  after", mean(result.perplexity, 4, 4)),
        ("KL divergence", mean(divergence.kld, 6, 6)),
        ("same top token", mean(divergence.same_top, 3, 3, 100, " %")),
    ]
    return in_columns(rows, indent=0)
