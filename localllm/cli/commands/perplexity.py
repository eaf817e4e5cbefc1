"""`localllm perplexity`: the perplexity of a model on a text, computed as in llama.cpp, and its divergence from a base
model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from localllm import load
from localllm.base.errors import LocalLLMError
from localllm.base.files import regular
from localllm.base.files.outputs import check_target
from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.cli.options import MeasuringOptions
from localllm.cli.terminal.answer import tell
from localllm.cli.terminal.console import YELLOW, room, say
from localllm.cli.terminal.formatting import in_columns
from localllm.cli.terminal.running import RunningPerplexity, RunningProgress
from localllm.cli.tool_options import PerplexityOptions
from localllm.evaluation import (
    LogitsFile,
    LogitsSource,
    ModelSource,
    Scores,
    Windows,
    cut_windows,
    evaluate,
    save_base,
    statistics,
    strided_size,
)
from localllm.evaluation.likelihood import Divergence, Mean
from localllm.evaluation.likelihood import Perplexity as Result
from localllm.evaluation.logits_file import is_logits_file
from localllm.gguf import open_gguf
from localllm.loading.resolve import resolve
from localllm.model import Model

if TYPE_CHECKING:
    from localllm.backends.base import Progress


_STRIDE = Setting("ppl_stride")


def perplexity(own: PerplexityOptions, name: str, opening: MeasuringOptions) -> None:
    """Evaluate the text and print the results. On Ctrl-C, print the results so far and raise KeyboardInterrupt."""
    target = Path(own.save_base) if own.save_base else None
    if own.ppl_stride and target is not None:
        raise LocalLLMError(Notice(Setting("save_base"), " cannot store overlapping windows; leave out ", _STRIDE))
    if target is not None:
        check_target(target, own.force, [own.file, *model_files(name), *model_files(own.kld)])
    with ExitStack() as open_things, RunningProgress() as progress:
        stored = open_things.enter_context(_logits_file(own.kld))
        ctx_size = strided_size(opening.ctx_size, own.ppl_stride) if own.ppl_stride else opening.ctx_size
        ctx_size = stored.windows.ctx_size if stored is not None else ctx_size
        model = open_things.enter_context(_load(name, opening, own, ctx_size, progress))
        windows = _windows(model, ctx_size, own, stored)
        base: LogitsSource | None = stored
        if own.kld and stored is None:
            base = ModelSource(open_things.enter_context(_load(own.kld, opening, own, ctx_size, progress)), windows)
        source = ModelSource(model, windows)
        saving = nullcontext(None) if target is None else save_base(target, windows, source.vocabulary, own.force)
        parts, running = list[Scores](), RunningPerplexity(progress)
        interrupted = False
        try:
            with saving as keep:  # after Ctrl-C, no base-logits file is written
                for part in evaluate(windows, source, base, progress, keep):
                    parts.append(part)
                    running.add(float(part.nll.sum()), len(part.nll))
        except KeyboardInterrupt:
            if not parts:
                raise
            interrupted = True
        device = model.device
    _report(name, device, own, windows, Scores.join(parts), len(parts))
    if interrupted:
        unwritten = f"; {printable(str(target), None)} was not written" if target is not None else ""
        say(f"stopped: the numbers cover {len(parts)} of {len(windows.tokens)} windows{unwritten}", YELLOW)
        raise KeyboardInterrupt


def _report(name: str, device: str, own: PerplexityOptions, windows: Windows, scores: Scores, done: int) -> None:
    """Print the results over the first `done` windows."""
    result, divergence = statistics(scores)
    if own.json:
        print(json.dumps(_as_json(name, device, own, windows, done, result, divergence), indent=2))
    else:
        print(in_columns(_lines(name, device, windows, done, result, divergence), indent=0, room=room()))


def read_evaluation_text(file: str) -> str:
    """Return the text to evaluate, from a file or from stdin."""
    if file:
        return regular.read_text(file)
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    if not text:
        raise LocalLLMError("no text: give one with -f FILE or through a pipe")
    return text


def model_files(name: str) -> tuple[Path, ...]:
    """Return all files (parts) of a model, or the base-logits file with this name."""
    if not name:
        return ()
    path = resolve(name)
    if not path.is_file() or is_logits_file(path):
        return (path,)
    with open_gguf(path) as file:
        return file.paths


def _load(name: str, opening: MeasuringOptions, own: PerplexityOptions, ctx_size: int, progress: Progress) -> Model:
    model = load(name, opening.options, progress=progress, ctx_size=ctx_size, force=own.force)
    tell(model)
    return model


@contextmanager
def _logits_file(name: str) -> Iterator[LogitsFile | None]:
    """Yield the opened base-logits file, or None if the base is a model or is not given."""
    path = resolve(name) if name else None
    if path is None or not path.is_file() or not is_logits_file(path):
        yield None
        return
    file = LogitsFile(path)
    try:
        yield file
    finally:
        file.close()


def _windows(model: Model, ctx_size: int, own: PerplexityOptions, stored: LogitsFile | None) -> Windows:
    """Return the windows to evaluate. A base-logits file contains its windows; if a text is given too, it must
    match."""
    limit = own.chunks or None
    if stored is None:
        return cut_windows(model, read_evaluation_text(own.file), ctx_size, limit, own.ppl_stride)
    if own.ppl_stride:
        raise LocalLLMError(Notice(f"{own.kld}: defines its own windows; leave out ", _STRIDE))
    windows = Windows(stored.windows.tokens[:limit])
    if own.file and not np.array_equal(
        cut_windows(model, read_evaluation_text(own.file), ctx_size, len(windows.tokens)).tokens, windows.tokens
    ):
        raise LocalLLMError(f"{own.kld}: made from another text or vocabulary; omit -f to use the text in it")
    return windows


def _as_json(
    name: str,
    device: str,
    own: PerplexityOptions,
    windows: Windows,
    done: int,
    result: Result,
    divergence: Divergence | None,
) -> dict[str, object]:
    return {
        "model": name,
        "device": device,
        "text": own.file,
        "base": own.kld,
        "ctx": windows.ctx_size,
        "stride": windows.stride,
        "windows": done,
        "windows_of_text": len(windows.tokens),
        **asdict(result),
        "divergence": asdict(divergence) if divergence is not None else None,
    }


def _lines(
    name: str, device: str, windows: Windows, done: int, result: Result, divergence: Divergence | None
) -> list[tuple[str, str]]:
    """Return (label, value) pairs, with values to the same number of digits as in llama.cpp."""
    of_all = f" of {len(windows.tokens)}" if done < len(windows.tokens) else ""
    strided = f", {windows.stride} apart" if windows.stride else ""
    lines = [
        ("model", f"{name} ({device})"),
        ("text", f"{done}{of_all} windows of {windows.ctx_size} tokens{strided}, {result.tokens} predictions"),
        ("perplexity", mean(result.perplexity, 4, 5)),
    ]
    if divergence is None:
        return lines
    shown = {p: f"{value:.6f}" for p, value in divergence.kld_percentiles.items()}
    return [
        *lines,
        ("perplexity of the base", mean(divergence.base.perplexity, 4, 5)),
        ("ln(perplexity / base)", mean(divergence.log_ratio, 6, 6)),
        ("KL divergence", mean(divergence.kld, 6, 6)),
        ("  maximum", f"{divergence.kld_maximum:.6f}"),
        *((f"  {p} %" if p != "50" else "  median", value) for p, value in shown.items()),
        ("  minimum", f"{divergence.kld_minimum:.6f}"),
        ("same top token", mean(divergence.same_top, 3, 3, 100, " %")),
        ("change of p(token)", mean(divergence.p_difference, 3, 3, 100, " %")),
        ("  root mean square", f"{100 * divergence.p_difference_rms:.3f} %"),
    ]


def mean(value: Mean, digits: int, error_digits: int, factor: float = 1.0, unit: str = "") -> str:
    return f"{factor * value.value:.{digits}f} ± {factor * value.error:.{error_digits}f}{unit}"
