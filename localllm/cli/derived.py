"""Derived models on the command line: their system prompt, first messages and parameters are the defaults of `run`,
`chat` and `explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localllm.base.printable import printable
from localllm.cli.app import CommandLine
from localllm.cli.terminal.console import say
from localllm.loading.resolve import BOX
from localllm.options import SamplingOptions, declared

if TYPE_CHECKING:
    from localllm.hub.stored_model import DerivedModel

_ANSWERING = ("run", "chat", "explain")
_OWN = {"num_predict": "max_tokens", "stop": "stop", "seed": "seed"}  # Ollama's names of other options


def with_derived(line: CommandLine) -> CommandLine:
    """Return the command line with the options of the derived model that it names."""
    words = line.values.get("words", ())
    name = line.values.get("model") or (words[0] if words else "")
    model = _named(name) if line.name in _ANSWERING and name else None
    if model is None:
        return line
    prompted = "system_prompt" in line.values or "system_prompt_file" in line.values
    own: dict[str, Any] = {"system_prompt": model.system} if model.system and not prompted else {}
    own = {**_options(model), **own, "first_messages": model.messages}
    where = {option: f"the model {printable(model.name)}" for option in own if option not in line.values}
    return line._replace(values={**own, **line.values}, where={**where, **line.where})


def _named(name: str) -> DerivedModel | None:
    """Return the derived model with this name, or None."""
    if name in BOX:  # `localllm run demo` need not import the hub
        return None
    from localllm.hub import StoreError, StoreFolders, everything, find

    places = StoreFolders.here()
    if not places.derived.is_dir():
        return None
    try:
        return find(name, everything(places)).derived
    except StoreError:
        return None


def _options(model: DerivedModel) -> dict[str, Any]:
    """Return the options that a model's parameters mean. Unknown and invalid ones are left out, which a note tells."""
    known = {each.option.field or each.name: each for each in declared(SamplingOptions) if each.option.ollama}
    found: dict[str, Any] = {}
    for name, value in model.parameters.items():
        if name in _OWN:
            found[_OWN[name]] = tuple(value) if isinstance(value, list) else value
        elif name in known and not known[name].option.kind.problem(value):
            found[known[name].name] = value
        else:
            say(f"note: the parameter {printable(name)} of {printable(model.name)} has no effect here")
    return {name: value for name, value in found.items() if name != "max_tokens" or _counts(value)}


def _counts(value: Any) -> bool:
    return isinstance(value, int) and value > 0
