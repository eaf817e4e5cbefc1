"""Apply a derived model's system prompt, messages and parameters to requests. Parameters have Ollama's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from localllm.hub.stored_model import DerivedModel
from localllm.server.errors import NotSupported
from localllm.server.sampling import OLLAMA, OllamaSamplers, checked, samplers_of
from localllm.server.structs import MAX_INT, ShortText, listed, read
from localllm.server.turn import Completion, Generation, Turn

A = TypeVar("A", Turn, Completion)


class OllamaOptions(OllamaSamplers):
    """The options of the model. Unknown options only affect loading, and are ignored as in Ollama."""

    seed: int | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None  # -1: the whole context
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_INT)] = -1
    stop: ShortText | Annotated[list[ShortText], Meta(max_length=256)] = ""
    tfs_z: float = 1  # obsolete; 1 disables it


def read_options(parameters: Mapping[str, Any]) -> OllamaOptions:
    """Return a derived model's parameters; raise BadRequest or NotSupported for an invalid one."""
    options = read(dict(parameters), OllamaOptions, "parameters")
    sampling_of(options, 0, "parameters")
    return options


def sampling_of(options: OllamaOptions, context: int, where: str = "options") -> dict[str, Any]:
    """Return the fields of SamplingOptions that the options set."""
    if options.tfs_z != 1:
        raise NotSupported(f"{where}.tfs_z is not supported; leave it out")
    sampling = samplers_of(options, OLLAMA, where)
    if options.seed is not None:
        sampling["seed"] = checked("seed", options.seed, False, where, "seed")
    if options.repeat_last_n is not None:
        sampling["repeat_last_n"] = context if options.repeat_last_n == -1 else options.repeat_last_n
    return sampling


def stops_of(options: OllamaOptions) -> tuple[str, ...]:
    return tuple(filter(None, listed(options.stop)))


def with_parameters(generation: Generation, model: DerivedModel, context: int) -> Generation:
    """Return the options of a request, completed with a derived model's."""
    options = read_options(model.parameters)
    most = options.num_predict if options.num_predict > 0 else None
    return replace(
        generation,
        sampling={**sampling_of(options, context, "parameters"), **generation.sampling},
        max_tokens=most if generation.max_tokens is None else generation.max_tokens,
        stops=generation.stops or stops_of(options),
    )


def with_derived(asked: A, model: DerivedModel | None, context: int) -> A:
    """Add a derived model's system prompt, messages and parameters to a request, which may override them."""
    if model is None:
        return asked
    asked = replace(asked, generation=with_parameters(asked.generation, model, context))
    return replace(asked, messages=_begun(asked.messages, model)) if isinstance(asked, Turn) else asked


def _begun(messages: Sequence[Mapping[str, Any]], model: DerivedModel) -> list[Mapping[str, Any]]:
    """Return messages after the system prompt and the messages of a derived model."""
    system = [each for each in messages[:1] if each.get("role") in ("system", "developer")]
    own: list[Mapping[str, Any]] = [{"role": "system", "content": model.system}] if model.system else []
    return [*(system or own), *model.messages, *messages[len(system) :]]
