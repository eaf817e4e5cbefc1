"""`localllm imatrix`: measure which columns of every matrix matter on a text, for quantize and llama-quantize."""

from __future__ import annotations

from pathlib import Path

from localllm import load
from localllm.calibration.imatrix import measure, write
from localllm.cli.commands.perplexity import model_files, read_text
from localllm.cli.options import Imatrix, Measuring
from localllm.cli.terminal.answer import tell
from localllm.cli.terminal.console import YELLOW, LoadProgress, say
from localllm.evaluation import cut
from localllm.outputs import check_target
from localllm.printable import printable


def imatrix(own: Imatrix, name: str, opening: Measuring) -> None:
    """Evaluate the text, write the file, and print a summary."""
    target = Path(own.output)
    check_target(target, own.force, [own.file, *model_files(name)])
    with LoadProgress() as progress:
        model = load(name, opening.options, progress=progress, observe=True, force=own.force)
        with model:
            tell(model)
            windows = cut(model, read_text(own.file), opening.ctx_size, own.chunks or None)
            found = measure(model, windows, own.file, own.process_output, progress)
    write(target, found, force=own.force)
    shown = printable(str(target), None)
    print(f"{shown}: {len(found.entries)} tensors, {found.chunks} windows of {found.chunk_size} tokens")
    unseen = {n: int((e.counts == 0).sum()) for n, e in found.entries.items() if not e.counts.all()}
    if unseen:
        say(
            f"note: {sum(unseen.values())} matrices of experts in {len(unseen)} tensors saw no token of this text, so "
            "all their columns count alike; a longer text reaches more",
            YELLOW,
        )
