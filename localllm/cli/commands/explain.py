"""`localllm explain`: answer one prompt, and show how the answer was generated."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from localllm import load
from localllm.base.files.outputs import check_target, new_file
from localllm.cli.commands.asking import Asking
from localllm.cli.commands.explain_view import view
from localllm.cli.commands.run import AskedReply, ask
from localllm.cli.commands.splitting import splitting
from localllm.cli.naming import title
from localllm.cli.options import ExplainOptions
from localllm.cli.terminal.answer import interruptible, tell
from localllm.cli.terminal.console import LoadProgress, say
from localllm.cli.terminal.keeping import PromptCache, check_place
from localllm.explain.account import Account, best, measure_roofs
from localllm.explain.explanation import Explanation
from localllm.explain.facts import facts
from localllm.explain.page import page
from localllm.explain.recorder import AnswerRecorder


def explain(name: str, asked: Asking[ExplainOptions]) -> None:
    """Answer a prompt like `run`, then print the explanation. Raise KeyboardInterrupt if Ctrl-C stopped the answer."""
    from localllm.template import renderer

    own, opening, keeping = asked.own, asked.opening, asked.keeping
    target = Path(own.html) if own.html else None
    if target is not None:  # fail before the model loads
        check_target(target, opening.force, reading=[name, *([own.file] if own.file else [])])
    check_place(keeping)
    with renderer() as confined:
        if not own.raw:
            confined.start()
        with splitting(opening.machines) as split, ExitStack() as stack:
            with LoadProgress() as progress:
                model = load(name, opening.options, progress=progress, split=split)
            stack.enter_context(model)
            cancel = stack.enter_context(interruptible())
            tell(model)
            cache, before = PromptCache(keeping, model, opening.force), measure_roofs(model)
            cache.take_up()
            recorder = AnswerRecorder(model, own.candidates)
            question = ask(asked, model, confined, cancel, recorder)
            answer = _answer(own, recorder, question)
            end = question.reply.end
            account = Account(recorder.record, model, best(before, measure_roofs(model)), end)
            it = Explanation(title(name), model.device, asked.prompt, answer, account, model.tokenizer)
            if own.json:
                print(json.dumps(facts(it), indent=2))
            else:
                view(it)
            if target is not None:
                _write(target, it, opening.force)
            cache.keep(question.evaluated()[: end.usage.prompt_tokens], [])
    if end.reason == "cancelled":
        raise KeyboardInterrupt


def _answer(own: ExplainOptions, recorder: AnswerRecorder, question: AskedReply) -> str:
    """Stream the answer and record its steps. Control characters are escaped in pipes too, because the output is a
    report.
    """
    parts = list[str]()
    with recorder.watching():
        for piece in question.reply:
            parts.append(piece.raw if question.conversation is None else question.conversation.shown(piece))
            if not own.json:
                print(parts[-1], end="", flush=True)
    if not own.json:
        print()
    return "".join(parts)


def _write(target: Path, it: Explanation, overwrite: bool) -> None:
    with new_file(target, overwrite) as file:
        file.write(page(it).encode())
    say(f"{target}: {file.size} bytes written")
