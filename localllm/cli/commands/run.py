"""`localllm run`: answer one prompt. Only the answer goes to stdout."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from localllm import load
from localllm.base.files.regular import read_text
from localllm.cli.app import UsageError
from localllm.cli.commands.asking import Asking, without_template
from localllm.cli.commands.splitting import splitting
from localllm.cli.options import DisplayOptions, PromptOptions, RunOptions
from localllm.cli.terminal.answer import (
    MeasuredRoof,
    converse,
    explain_end,
    full_statistics,
    interruptible,
    sampling_of,
    tell,
    write,
)
from localllm.cli.terminal.console import YELLOW, LoadProgress, say
from localllm.cli.terminal.keeping import PromptCache, check_place
from localllm.constrained.request import text_constraint
from localllm.generation.request import Request
from localllm.generation.speculation.errors import NoDrafts
from localllm.loading.media_parts import MARKER, WORDS, Medium, file_kind, of_marked, part_of
from localllm.loading.numbered import NumberedSpans
from localllm.reply import Reply, pieces_of

if TYPE_CHECKING:
    from localllm.chat import Conversation
    from localllm.generation.request import AnswerObserver
    from localllm.loading.splitting import Splitter
    from localllm.model import Model
    from localllm.sandbox import Confined

Prompted = TypeVar("Prompted", bound=PromptOptions)


def read_prompt(given: Sequence[str], file: str) -> str:
    """Return the prompt: the text on the command line, the file and stdin, as far as given, joined by newlines."""
    parts = [text for text in given if text]
    if file and file != "-":
        parts.append(read_text(file))
    if file == "-" or not sys.stdin.isatty():
        parts.append(sys.stdin.read())
    prompt = "\n".join(part.removesuffix("\n") for part in parts if part)
    if not prompt:
        raise UsageError("no prompt: give one after MODEL, with -f FILE or through a pipe, or use `localllm chat`")
    return prompt


def run(name: str, asked: Asking[RunOptions]) -> None:
    """Answer a prompt. Raise KeyboardInterrupt if Ctrl-C stopped the answer."""
    from localllm.template import renderer

    check_place(asked.keeping)
    media = media_of(asked.own)
    with renderer() as confined:
        if not asked.own.raw:
            confined.start()  # start while the model loads
        with splitting(asked.opening.machines) as split, _loaded(name, asked, split) as model:
            if media:
                _ = model.encoders  # raises an error for a model without encoders
            if model.diffuses:
                from localllm.cli.commands.run_diffusion import run_diffusion

                return run_diffusion(model, confined, asked)
            asked.leave_out(asked.diffusion.given_names, f"{name}: not a diffusion model", "this model")
            _answer(model, confined, asked)


def _loaded(name: str, asked: Asking[RunOptions], split: Splitter | None) -> Model:
    """Load a model. If the model does not support speculation, and only the configuration asks for it, load it without
    speculation."""
    options = asked.opening.options
    try:
        with LoadProgress() as progress:
            return load(name, options, progress=progress, split=split)
    except NoDrafts as problem:
        names = [each for each in ("spec", "model_draft") if options.values()[each]]
        asked.leave_out(names, f"{problem.what} does not support drafts", problem.what)
    with LoadProgress() as progress:
        return load(name, options.changed({"spec": None, "model_draft": ""}), progress=progress, split=split)


class AskedReply(NamedTuple):
    """A submitted request. Iterating over `reply` generates the answer."""

    reply: Reply
    prompt: list[int]  # prompt tokens, if the prompt is continued as plain text
    conversation: Conversation | None  # None if the prompt is continued as plain text

    def evaluated(self) -> list[int]:
        """Return the tokens of prompt and answer in the KV cache; valid once the answer has ended."""
        if self.conversation is not None:
            return self.conversation.tokens
        return [*self.prompt, *self.reply.tokens][: self.reply.end.cached_tokens]


def ask(
    asked: Asking[Prompted],
    model: Model,
    confined: Confined,
    cancel: threading.Event,
    observer: AnswerObserver | None = None,
) -> AskedReply:
    """Submit the prompt to a model, as one turn of a chat or, with --raw, as plain text."""
    answering = asked.answering
    conversation = None if asked.own.raw or model.encodes else _conversation(model, confined, asked)
    media = media_of(asked.own)
    parts = of_marked(asked.prompt if MARKER in asked.prompt else MARKER * len(media) + asked.prompt, media)
    if conversation is not None:
        conversation.observer = observer
        said = [part_of(each) for each in parts if each] if media else asked.prompt
        return AskedReply(conversation.say(said, cancel), [], conversation)
    without_template(answering, asked.where)
    spans = NumberedSpans(lambda: model.engine)
    if media:
        ids = spans.numbered(model.encoders.prompt(parts, model.prompt_part, model.media_marks))
    else:
        ids = model.prompt_ids(asked.prompt, parse_special=True)  # parse control tokens in the prompt
    constraint = text_constraint(model, answering.structure)
    request = Request(
        spans.spanned(ids), sampling_of(model, asked.sampling), answering.max_tokens, answering.stops,
        answering.ignore_eos, constraint=constraint, observer=observer,
    )  # fmt: skip
    return AskedReply(Reply(pieces_of(model.stepper.stream(request, cancel))), ids, None)


def media_of(own: PromptOptions) -> list[Medium]:
    """Return the pictures and sounds on the command line."""
    for kind, names in (("image", own.image), ("audio", own.audio)):
        for name in names:
            if (found := file_kind(name)) not in (None, kind):
                raise UsageError(f"--{kind} {name}: is a {WORDS[found]}; use --{found} {name}")
    return [*(Medium("image", name, name) for name in own.image), *(Medium("audio", name, name) for name in own.audio)]


def _answer(model: Model, confined: Confined, asked: Asking[RunOptions]) -> None:
    own, keeping = asked.own, asked.keeping
    with interruptible() as cancel:
        tell(model)
        if own.prompt_cache_all and not keeping.prompt_cache:
            say("note: --prompt-cache-all has no effect without --prompt-cache FILE", YELLOW)
        cache = PromptCache(keeping, model, asked.opening.force)
        cache.take_up()
        question = ask(asked, model, confined, cancel)
        conversation = question.conversation
        end = write(question.reply, asked.display if conversation else DisplayOptions(plain=True), conversation)
        if end.reason == "context":
            say(explain_end(model), YELLOW)
        if own.stats:
            if not model.placed:
                say(model.device)
            say(full_statistics(end.usage, MeasuredRoof(model)))
        tokens = question.evaluated()
        if keeping.prompt_cache and not own.prompt_cache_all:
            tokens = tokens[: end.usage.prompt_tokens]
        if conversation and own.prompt_cache_all and keeping.prompt_cache:
            cache.keep(tokens, conversation.told, conversation.attachments())
        else:
            cache.keep(tokens, [])
    if end.reason == "cancelled":
        raise KeyboardInterrupt


def _conversation(model: Model, confined: Confined, asked: Asking[Prompted]) -> Conversation | None:
    """Return the conversation for the prompt, or None if the prompt is continued as plain text."""
    from localllm.chat import is_plain, template_of

    template, note = template_of(model, confined, asked.format_)
    if asked.format_ is None and is_plain(template):
        say(
            "note: the file has no chat template; the model continues the prompt as plain text (--raw hides this note)",
            YELLOW,
        )
        return None
    if note:
        say(f"note: {note}", YELLOW)
    return converse(model, template, asked.answering, asked.sampling, asked.first_messages)
