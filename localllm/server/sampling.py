"""The sampling fields of requests. The options (`options/sampling.py`) declare their names, types and ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from localllm.base.printable import printable
from localllm.options import SamplingOptions
from localllm.options.declare import DeclaredOption, declared
from localllm.options.sampling import LETTERS, NAMES, sampler_name
from localllm.server.structs import MAX_INT, Body, ShortText, Strings, listed, wrong

Samplers = dict[str, DeclaredOption]  # name in a request -> option
Stops = ShortText | Annotated[list[ShortText], Meta(max_length=128)]
Seed = Annotated[int, Meta(ge=-(2**63))]
OPTIONS = {each.name: each for each in declared(SamplingOptions)}
LLAMACPP: Samplers = {
    each.option.field or name: each
    for name, each in OPTIONS.items()
    if each.type in ("int", "float") and name != "seed"
}
OPENAI: Samplers = {each.option.vllm: each for each in LLAMACPP.values() if each.option.vllm} | LLAMACPP
OLLAMA: Samplers = {name: each for name, each in LLAMACPP.items() if each.option.ollama}


def _struct(name: str, samplers: Samplers, clamps: bool = False) -> Any:
    def kind(each: DeclaredOption) -> Any:
        if each.type == "float":
            return float
        return int if clamps and each.option.kind.clamp else Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]

    return msgspec.defstruct(
        name, [(field, kind(each) | None, None) for field, each in samplers.items()], bases=(Body,), module=__name__
    )


if TYPE_CHECKING:

    class OpenAISamplers(Body):
        """The samplers in OpenAI's format, with the names of llama.cpp and vLLM."""

    class LlamaCppSamplers(Body):
        """The samplers in llama.cpp's format. Values outside of some ranges are clamped."""

        dry_base: float | None = None

    class OllamaSamplers(Body):
        """The samplers in Ollama's format."""

else:
    OpenAISamplers = _struct("OpenAISamplers", OPENAI)
    LlamaCppSamplers = _struct("LlamaCppSamplers", LLAMACPP, clamps=True)
    OllamaSamplers = _struct("OllamaSamplers", OLLAMA)


def samplers_of(body: Body, samplers: Samplers, where: str = "", clamps: bool = False) -> dict[str, Any]:
    """Return the fields of SamplingOptions that a request sets; raise BadRequest for a value out of range."""
    found: dict[str, Any] = {}
    for name, each in samplers.items():
        value = getattr(body, name)
        if value is not None:
            found[each.name] = checked(each.name, value, clamps, where, name)
    return found


def checked(option: str, value: Any, clamps: bool, *path: str) -> Any:
    """Return the value of an option, clamped if the API does so; raise BadRequest if it is out of range."""
    kind = OPTIONS[option].option.kind
    if clamps and kind.clamp is not None:
        least, most = kind.clamp
        value = type(value)(min(max(value, least), most))
    if problem := kind.problem(value):
        raise wrong(printable(problem, 200), *path)
    return value


# -- OpenAI's format -------------------------------------------------------------------------------------------------


class SamplingBody(OpenAISamplers):
    """All sampling fields in OpenAI's format, which Anthropic's API shares."""

    seed: Seed | None = None
    samplers: str | Strings | None = None
    dry_sequence_breakers: Stops | None = None
    lora: list[Any] = []


def read_sampling(body: SamplingBody) -> dict[str, Any]:
    """Return the fields of SamplingOptions that the request sets."""
    if body.lora:
        raise wrong("adapters are not supported; leave it empty", "lora")
    found = samplers_of(body, OPENAI)
    if body.seed is not None:
        found["seed"] = checked("seed", body.seed if body.seed >= -1 else body.seed % 2**64, False, "seed")
    if body.samplers is not None:
        found["samplers"] = _samplers(body.samplers)
    if body.dry_sequence_breakers is not None:
        breakers = listed(body.dry_sequence_breakers)
        found["dry_sequence_breaker"] = checked("dry_sequence_breaker", breakers, False, "dry_sequence_breakers")
    return found


def _samplers(value: str | list[str]) -> tuple[str, ...]:
    """Return the names of samplers. The request may also use llama.cpp's single letters."""
    letters = isinstance(value, str) and sampler_name(value) is None
    spelled = tuple(value) if letters else listed(value)
    if len(spelled) > len(NAMES):
        raise wrong(f"has {len(spelled)} samplers; there are {len(NAMES)}", "samplers")
    found = [LETTERS.get(spelling.lower()) or sampler_name(spelling) or "" for spelling in spelled]
    if "" in found:
        unknown = spelled[found.index("")]
        raise wrong(f"no sampler {unknown!r}; supported: {', '.join(NAMES)}", "samplers")
    return tuple(found)
