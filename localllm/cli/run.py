"""`localllm run`: one prompt, one answer on stdout and nothing else there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from localllm import load
from localllm.cli.answer import Roof, converse, explain_end, interruptible, sampling_of, statistics_line, write
from localllm.cli.console import YELLOW, LoadProgress, say
from localllm.cli.options import Answering, Loading, Run
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.model import Model
    from localllm.session import Piece


def read_prompt(given: Sequence[str], file: str) -> str:
    """The prompt from the command line, a file and what is piped in: those there are, in this order, a line each."""
    parts = [text for text in given if text]
    if file:
        parts.append(Path(file).read_text(encoding="utf-8", errors="replace"))
    if not sys.stdin.isatty():
        parts.append(sys.stdin.read())
    prompt = "\n".join(part.removesuffix("\n") for part in parts if part)
    if not prompt:
        raise LocalLLMError("no prompt: give one after MODEL, with -f FILE, or through a pipe; `localllm chat` talks")
    return prompt


def run(own: Run, name: str, prompt: str, loading: Loading, answering: Answering, sampling: Mapping[str, Any]) -> None:
    """Answer `prompt`. KeyboardInterrupt after an answer that Ctrl-C stopped."""
    with LoadProgress() as progress:
        model = load(name, **loading.of_load(), progress=progress)
    with model, interruptible() as cancel:
        statistics = write(_answer(own.raw, model, prompt, answering, sampling, cancel))
        if statistics.reason == "context":
            say(explain_end(model), YELLOW)
        if own.stats:
            say(statistics_line(statistics, Roof(model).measure()))
    if statistics.reason == "cancelled":
        raise KeyboardInterrupt


def _answer(
    raw: bool, model: Model, prompt: str, answering: Answering, sampling: Mapping[str, Any], cancel: Event
) -> Iterator[Piece]:
    if not raw:
        from localllm.chat import is_plain, template_of

        template, note = template_of(model)
        if not is_plain(template):
            if note:
                say(f"note: {note}", YELLOW)
            return converse(model, template, answering, sampling).say(prompt, cancel)
        say(
            "note: the file has no chat template; the prompt is continued as plain text (--raw: without this note)",
            YELLOW,
        )
    if answering.system_prompt:
        raise LocalLLMError("-sys/--system-prompt: plain text has no system prompt; put it into the prompt")
    ids = model.tokenize(prompt, parse_special=True)  # control tokens written in it count as such
    return model.session().generate(
        ids,
        model.sampler(sampling_of(model, sampling)),
        answering.max_tokens,
        answering.stop,
        cancel,
        answering.ignore_eos,
    )
