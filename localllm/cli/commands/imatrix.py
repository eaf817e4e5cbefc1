"""`localllm imatrix`: measure the importance of every matrix column on a text, for quantize and llama-quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from localllm import load
from localllm.base.files.outputs import check_target
from localllm.base.printable import printable
from localllm.cli.commands.perplexity import model_files, read_evaluation_text
from localllm.cli.options import MeasuringOptions
from localllm.cli.terminal.answer import tell
from localllm.cli.terminal.console import YELLOW, say
from localllm.cli.terminal.running import RunningPerplexity, RunningProgress, stoppable
from localllm.cli.tool_options import ImatrixOptions
from localllm.evaluation import Windows, cut_windows, log_softmax, score
from localllm.plan import F32
from localllm.quantize.calibration.imatrix import Imatrix as Found
from localllm.quantize.calibration.imatrix import measure_imatrix, write_imatrix


def imatrix(own: ImatrixOptions, name: str, opening: MeasuringOptions) -> None:
    """Evaluate the text, write the file, and print a summary.

    Raise KeyboardInterrupt after Ctrl-C, once the file with the finished windows is written.
    """
    target = Path(own.output)
    check_target(target, own.force, [own.file, *model_files(name)])
    with RunningProgress() as progress:
        model = load(name, opening.options, progress=progress, observe=True, force=own.force)
        with model:
            tell(model)
            windows = cut_windows(model, read_evaluation_text(own.file), opening.ctx_size, own.chunks or None)
            seen = _perplexity(windows, progress) if progress.shown else None
            with stoppable(progress) as stopped:
                found = measure_imatrix(model, windows, own.file, own.process_output, progress, stopped, seen)
                interrupted = stopped() and found.chunks < len(windows.tokens)
    write_imatrix(target, found, overwrite=own.force)
    shown = printable(str(target), None)
    of_all = f" of {len(windows.tokens)}" if interrupted else ""
    print(f"{shown}: {len(found.entries)} tensors, {found.chunks}{of_all} windows of {found.chunk_size} tokens")
    _tell_unseen(found)
    if interrupted:
        raise KeyboardInterrupt


def _perplexity(windows: Windows, progress: RunningProgress) -> Callable[[int, int, F32], None]:
    """Return a callback that shows the perplexity so far, computed as in `localllm perplexity`."""
    running = RunningPerplexity(progress)

    def seen(window: int, start: int, logits: F32) -> None:
        begin, end = max(windows.first - start, 0), min(len(logits), windows.ctx_size - 1 - start)
        if begin < end:
            targets = windows.tokens[window, start + begin + 1 : start + end + 1]
            found = score(log_softmax(logits[begin:end]), targets)
            running.add(float(found.nll.sum()), end - begin)

    return seen


def _tell_unseen(found: Found) -> None:
    unseen = {n: int((e.counts == 0).sum()) for n, e in found.entries.items() if not e.counts.all()}
    if unseen:
        say(
            f"note: {sum(unseen.values())} expert matrices in {len(unseen)} tensors received no token of this text, so "
            "all their columns have the same weight; a longer text covers more",
            YELLOW,
        )
