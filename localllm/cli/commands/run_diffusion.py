"""`localllm run` with a diffusion model. A terminal shows the canvas while it is filled; a pipe gets only the final
text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.cli.commands.asking import Asking, without_template
from localllm.cli.options import RunOptions
from localllm.cli.terminal.answer import interruptible, sampling_of, tell
from localllm.cli.terminal.console import YELLOW, raw, say
from localllm.cli.terminal.shown import shown_on
from localllm.diffusion.canvas import Canvas
from localllm.diffusion.choice import SAMPLED_BY
from localllm.diffusion.model import answer_text, diffuse
from localllm.model import Model

if TYPE_CHECKING:
    from localllm.sandbox import Confined

MASK = "\u2591"  # shown at masked positions


def run_diffusion(model: Model, confined: Confined, asked: Asking[RunOptions]) -> None:
    """Generate the answer and print it. On Ctrl-C, print nothing and raise KeyboardInterrupt."""
    _refuse(asked)
    with interruptible() as cancel:
        tell(model)
        ids, stops = _prompt(model, confined, asked)
        sampling = sampling_of(model, asked.sampling)
        for name in asked.sampling:
            if name not in SAMPLED_BY:
                say(Notice("note: ", Setting(name), " has no effect on a diffusion model"), YELLOW)
        begun, canvas = perf_counter(), None
        with _shown(model, asked) as show:
            for canvas in diffuse(model, ids, asked.diffusion, sampling, asked.answering.max_tokens):
                if cancel.is_set():
                    raise KeyboardInterrupt
                show(canvas)
        assert canvas is not None, "a canvas is shown before its first step"
        seconds = perf_counter() - begun
        _write(cut_at_stops(answer_text(model, canvas, asked.answering.ignore_eos), stops), asked)
    if asked.own.stats:
        if not model.placed:
            say(model.device)
        say(
            f"prompt {canvas.prompt} | answer {len(canvas.answer)} | {canvas.steps} steps | {seconds:.2f} s, "
            f"{len(canvas.answer) / seconds:.1f} tokens/s"
        )


def _refuse(asked: Asking[RunOptions]) -> None:
    """Raise LocalLLMError for typed options that need left-to-right generation. Configured options get a note."""
    cache = ["prompt_cache"] if asked.keeping.prompt_cache else []
    structure = [name for name in ("json_schema", "grammar") if asked.answering.values()[name] not in (None, "")]
    asked.leave_out(cache, "a diffusion model computes all tokens in each step", "a diffusion model")
    asked.leave_out(structure, "diffusion models do not support schemas and grammars", "a diffusion model")


def _prompt(model: Model, confined: Confined, asked: Asking[RunOptions]) -> tuple[list[int], tuple[str, ...]]:
    """Return the prompt's token ids and the stop strings. If there is a chat template, the prompt is a chat turn."""
    from localllm.chat import is_plain, template_of
    from localllm.template import ChatEncoder

    answering = asked.answering
    if not asked.own.raw:
        template, note = template_of(model, confined, asked.format_)
        if asked.format_ is not None or not is_plain(template):
            system = [{"role": "system", "content": answering.system_prompt}] if answering.system_prompt else []
            messages: list[dict[str, Any]] = [*system, {"role": "user", "content": asked.prompt}]
            rendered = template.render(messages, extra=answering.template_variables)
            for told in (*([note] if note else []), *rendered.notes):
                say(f"note: {told}", YELLOW)
            model.check_length(rendered.text)
            encoder = ChatEncoder(model.tokenizer, template.source, answering.parse_special_in_content)
            return encoder.encode(rendered.text), (*answering.stops, *template.stops)
        problem = "the file has no chat template; the model fills in what follows the prompt as plain text"
        say(f"note: {problem} (--raw hides this note)", YELLOW)
    without_template(answering, asked.where)
    return model.prompt_ids(asked.prompt, parse_special=True), answering.stops


def cut_at_stops(text: str, stops: tuple[str, ...]) -> str:
    """Return the text up to the first stop string."""
    return text[: min([found for stop in stops if (found := text.find(stop)) >= 0], default=len(text))]


def _write(text: str, asked: Asking[RunOptions]) -> None:
    shown = shown_on(sys.stdout, asked.display if not asked.own.raw else asked.display.changed({"plain": True}))
    try:
        shown.content(text)
    finally:
        shown.end()


@contextmanager
def _shown(model: Model, asked: Asking[RunOptions]) -> Iterator[Any]:
    """Yield a function that shows a canvas. On a terminal it shows the text so far on the alternate screen; elsewhere
    it does nothing.

    On the main screen, the canvas would leave a copy of itself whenever the terminal becomes narrower.
    """
    out = raw(sys.stdout)
    if not out.isatty() or os.environ.get("TERM", "dumb") == "dumb" or asked.display.plain:
        yield lambda canvas: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=out, highlight=False)
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:

        def show(canvas: Canvas) -> None:
            width, height = console.size
            lines = [str(line) for line in Text(picture(model, canvas)).wrap(console, width)]
            text = Text(f"step {canvas.step} of {canvas.steps}", style="dim")
            text.append("".join("\n" + line for line in around_first(lines, height - 1)), style="not dim")
            live.update(text, refresh=True)

        yield show


def around_first(lines: list[str], height: int) -> list[str]:
    """Return `height` lines around the first line with masked tokens, or the last lines if no token is masked."""
    first = next((number for number, line in enumerate(lines) if MASK in line), len(lines))
    start = max(0, min(first - height // 2, len(lines) - height))
    return lines[start : start + height]


def picture(model: Model, canvas: Canvas) -> str:
    """Return the answer so far as printable text, with MASK at masked positions."""
    parts: list[str] = []
    run: list[int] = []
    ended = False
    for token in canvas.answer:
        ended = ended or token in model.tokenizer.eog
        if token == canvas.mask:
            parts += [model.tokenizer.decode(run, drop_space=not parts), MASK]
            run = []
        elif not ended:
            run.append(token)
    parts.append(model.tokenizer.decode(run, drop_space=not parts))
    return printable("".join(parts), None, keep="\n\t")
