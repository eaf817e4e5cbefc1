"""`localllm explain`: answer one prompt, and show how the answer was generated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import load
from localllm.base.files.outputs import check_target, new_file
from localllm.cli.commands.explain_view import view
from localllm.cli.commands.run import AskedReply, ask
from localllm.cli.naming import title
from localllm.cli.options import ExplainOptions, KeepingOptions, OpeningOptions
from localllm.cli.terminal.answer import interruptible, tell
from localllm.cli.terminal.console import LoadProgress, say
from localllm.cli.terminal.keeping import PromptCache, check_place
from localllm.explain.account import Account, best, measure_roofs
from localllm.explain.explanation import Explanation
from localllm.explain.facts import facts
from localllm.explain.page import page
from localllm.explain.recorder import AnswerRecorder
from localllm.options import AnswerOptions

if TYPE_CHECKING:
    from localllm.template import Family


def explain(
    where: Mapping[str, str],
    own: ExplainOptions,
    name: str,
    prompt: str,
    opening: OpeningOptions,
    answering: AnswerOptions,
    keeping: KeepingOptions,
    sampling: Mapping[str, Any],
    format_: Family | None = None,
) -> None:
    """Answer `prompt` like `run`, then print the explanation. Raise KeyboardInterrupt if Ctrl-C stopped the answer.

    `where` is the source of each option that is not on the command line.
    """
    from localllm.template import renderer

    target = Path(own.html) if own.html else None
    if target is not None:  # fail before the model loads
        check_target(target, opening.force, reading=[name, *([own.file] if own.file else [])])
    check_place(keeping)
    with renderer() as confined:
        if not own.raw:
            confined.start()
        with LoadProgress() as progress:
            model = load(name, opening.options, progress=progress)
        with model, interruptible() as cancel:
            tell(model)
            cache, before = PromptCache(keeping, model, opening.force), measure_roofs(model)
            cache.take_up()
            recorder = AnswerRecorder(model, own.candidates)
            asked = ask(own.raw, model, prompt, confined, answering, sampling, format_, cancel, where, recorder)
            answer = _answer(own, recorder, asked)
            end = asked.reply.end
            account = Account(recorder.record, model, best(before, measure_roofs(model)), end)
            it = Explanation(title(name), model.device, prompt, answer, account, model.tokenizer)
            if own.json:
                print(json.dumps(facts(it), indent=2))
            else:
                view(it)
            if target is not None:
                _write(target, it, opening.force)
            cache.keep(asked.evaluated()[: end.usage.prompt_tokens], [])
    if end.reason == "cancelled":
        raise KeyboardInterrupt


def _answer(own: ExplainOptions, recorder: AnswerRecorder, asked: AskedReply) -> str:
    """Stream the answer and record its steps. Control characters are escaped in pipes too, because the output is a
    report.
    """
    parts = list[str]()
    with recorder.watching():
        for piece in asked.reply:
            parts.append(piece.raw if asked.conversation is None else asked.conversation.shown(piece))
            if not own.json:
                print(parts[-1], end="", flush=True)
    if not own.json:
        print()
    return "".join(parts)


def _write(target: Path, it: Explanation, overwrite: bool) -> None:
    with new_file(target, overwrite) as file:
        file.write(page(it).encode())
    say(f"{target}: {file.size} bytes written")
