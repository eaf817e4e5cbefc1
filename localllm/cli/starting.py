"""Start the commands that name a model: each function resolves the name, builds the options, and starts a module in
`localllm.cli.commands`.

The modules are imported after the name is resolved, so a wrong name fails before NumPy is loaded. The table of commands
(`localllm.cli.table`) names these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from localllm.cli import options, tool_options
from localllm.cli.app import UsageError
from localllm.cli.commands.asking import Asking, asking
from localllm.cli.naming import BUNDLED, model_and_words, one_model, several_models
from localllm.cli.terminal.asking import on_terminal
from localllm.cli.terminal.console import room, say
from localllm.options import ServeOptions

Prompted = TypeVar("Prompted", bound=options.PromptOptions)


def chat(model: options.ModelName, own: options.ChatOptions, *rest: Any) -> None:
    from localllm.cli.commands.chat import chat, last_talked

    asked = asking({}, own, "", *rest)
    going_on = last_talked(own, asked.keeping)
    if going_on is None and not model.named and on_terminal():
        from localllm.cli.commands.first_model import first_model

        return chat(first_model(model.changed_file) or BUNDLED, None, asked)
    chat(one_model(model, going_on.model if going_on is not None else BUNDLED), going_on, asked)


def run(where: Mapping[str, str], own: options.RunOptions, *rest: Any) -> None:
    from localllm.cli.commands.run import run

    run(*_prompted(where, own, *rest))


def explain(where: Mapping[str, str], own: options.ExplainOptions, *rest: Any) -> None:
    from localllm.cli.commands.explain import explain

    explain(*_prompted(where, own, *rest))


def _prompted(where: Mapping[str, str], own: Prompted, *rest: Any) -> tuple[str, Asking[Prompted]]:
    """Return the model and the request of a command that answers one prompt."""
    from localllm.cli.commands.run import read_prompt

    name, words = model_and_words(own, required=False)
    prompt = read_prompt([" ".join(words), own.prompt], own.file)
    if not name:
        say(f"note: no default model, so the bundled toy ({BUNDLED}) answers; `localllm pull` finds a real one")
    return name or BUNDLED, asking(where, own, prompt, *rest)


def embed(own: options.EmbedOptions, opening: options.OpeningOptions) -> None:
    from localllm.cli.commands.embed import embed

    embed(own, *model_and_words(own), opening)


def serve(
    model: options.ModelName, own: ServeOptions, opening: options.OpeningOptions, sampling: Mapping[str, Any]
) -> None:
    from localllm.cli.commands.serve import serve

    name = one_model(model) if model.named else ""
    serve(own, name, opening, sampling, default=model.default_model, names=model.own_names)


def web(
    model: options.ModelName, own: ServeOptions, opening: options.OpeningOptions, sampling: Mapping[str, Any]
) -> None:
    from localllm.cli.commands.serve import serve

    if own.no_web:
        raise UsageError("localllm web opens the page that --no-web leaves out; give one of them")
    name = one_model(model) if model.named else ""
    serve(own, name, opening, sampling, browser=True, default=model.default_model, names=model.own_names)


def pull(own: options.PullOptions) -> None:
    """Download a model. Without a name, on a terminal, offer a suitable one."""
    if not own.words and on_terminal():
        from localllm.cli.commands.first_model import offer_again

        offer_again(own.changed_file)
        return
    from localllm.cli.commands.pull import pull

    pull(own)


def show(model: options.ModelName, own: options.ShowOptions) -> None:
    if own.formats or own.archs:
        from localllm.cli.commands import tables

        wanted = ((own.formats, tables.formats), (own.archs, tables.architectures))
        print("\n\n".join(table(room()) for asked, table in wanted if asked))
        return
    from localllm.cli.commands.show import show

    show(own, one_model(model))


def bench(models: options.ModelNames, own: tool_options.BenchOptions) -> None:
    from localllm.cli.commands.bench import bench

    bench(own, several_models(models))


def perplexity(
    model: options.ModelName, own: tool_options.PerplexityOptions, opening: options.MeasuringOptions
) -> None:
    from localllm.cli.commands.perplexity import perplexity

    perplexity(own, one_model(model), opening)


def imatrix(model: options.ModelName, own: tool_options.ImatrixOptions, opening: options.MeasuringOptions) -> None:
    from localllm.cli.commands.imatrix import imatrix

    imatrix(own, one_model(model), opening)
