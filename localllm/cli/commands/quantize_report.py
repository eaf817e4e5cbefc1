"""What `localllm quantize` prints: the plan of every tensor, its error, and the effect on a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from localllm.calibration.imatrix import Imatrix
from localllm.cli.commands.perplexity import mean
from localllm.cli.options import Quantize
from localllm.cli.terminal.console import YELLOW, RateProgress, say
from localllm.cli.terminal.text import columns, markdown, size
from localllm.errors import LocalLLMError
from localllm.evaluation import ModelSource, Scores, cut, evaluate, statistics
from localllm.model import load
from localllm.quantize.conversion import Error
from localllm.quantize.plan import Step, check, size_of
from localllm.quantize.source import Source
from localllm.quantize.target import CONTEXT


def show(source: Source, steps: Sequence[Step], imatrix: Imatrix | None, own: Quantize) -> None:
    """Print the plan, the file size, and what would prevent it."""
    print(plan_table(steps))
    print(f"{summary(steps)}; a file of {size(size_of(source, steps))}")
    for note in _notes(steps, imatrix, own):
        say(note, YELLOW)


def plan_table(steps: Sequence[Step]) -> str:
    rows = [
        (
            step.name,
            " x ".join(map(str, step.shape)),
            step.before,
            step.after if step.after == step.wanted else f"{step.after} (rows do not fit {step.wanted})",
            size(step.bytes_before),
            size(step.bytes_after),
        )
        for step in steps
    ]
    return markdown(("tensor", "shape", "from", "to", "size", "becomes"), rows, right=("size", "becomes"))


def summary(steps: Sequence[Step]) -> str:
    """Total size of all tensors, bits per weight, and the formats."""
    before, after = sum(s.bytes_before for s in steps), sum(s.bytes_after for s in steps)
    values = sum(s.values for s in steps)
    formats = sorted({step.after for step in steps if step.changes}) or ["as it was"]
    return f"{size(before)} -> {size(after)}, {8 * after / values:.2f} bits a weight ({', '.join(formats)})"


def _notes(steps: Sequence[Step], imatrix: Imatrix | None, own: Quantize) -> Iterator[str]:
    if not (own.imatrix or own.method) and any(step.needs_imatrix for step in steps):
        yield "note: this type needs --imatrix FILE, or --imatrix auto"
    known = imatrix.entries if imatrix is not None else [step.name for step in steps]
    try:
        check(steps, known, own.allow_requantize)
    except LocalLLMError as problem:
        yield f"note: {problem}"


def error_table(steps: Sequence[Step], errors: Mapping[str, Error]) -> str:
    """Per tensor: root mean square error, relative error, weighted relative error, largest error."""
    rows = []
    for step in steps:
        error = errors.get(step.name)
        if error is not None:
            weighted = "" if error.weighted is None else f"{100 * error.weighted:.3f} %"
            numbers = (f"{error.rmse:.3g}", f"{100 * error.relative:.3f} %", weighted, f"{error.largest:.3g}")
            rows.append((step.name, step.after, *numbers))
    right = ("RMSE", "relative", "weighted", "largest")
    return markdown(("tensor", "format", *right), rows, right=right) if rows else "no tensor changed its format"


def text_report(before: Path, after: Path, text: str, own: Quantize, progress: RateProgress) -> str:
    """Perplexity of the text (--test or -f) before and after, and the divergence of the distributions."""
    name = own.test or own.file
    with ExitStack() as stack:
        models = [
            stack.enter_context(load(path, ctx_size=CONTEXT, threads=own.threads, progress=progress))
            for path in (before, after)
        ]
        windows = cut(models[0], text, CONTEXT, own.chunks or None)
        base, changed = (ModelSource(model, windows) for model in models)
        result, divergence = statistics(Scores.join(list(evaluate(windows, changed, base, progress))))
    assert divergence is not None
    rows = [
        (f"perplexity on {name}, before", mean(divergence.base.perplexity, 4, 4)),
        ("  after", mean(result.perplexity, 4, 4)),
        ("KL divergence", mean(divergence.kld, 6, 6)),
        ("same top token", mean(divergence.same_top, 3, 3, 100, " %")),
    ]
    return columns(rows, indent=0)
