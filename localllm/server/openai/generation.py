"""The fields that chat, completions and responses share: structure of the output, sampling, limits, stop strings and
reasoning.

Fields keep the names that OpenAI, llama.cpp and vLLM use. Unknown fields are ignored, as in compatible servers; known
fields with an invalid value are refused.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from localllm.server.sampling import SamplingBody, Stops, read_sampling
from localllm.server.structs import MAX_INT, Body, Wrong, listed, read, wrong
from localllm.server.turn import Generation, Json, Structure, Thinking

CHOICES = 1000
CHOICES_LENGTH = 1_000_000  # maximum characters of all choices together
_ESCAPED = str.maketrans({character: f"\\{character}" for character in r"\.+*?()|[]{}^$#&-~"})
_GBNF = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)
Choices = str | Annotated[list[str], Meta(max_length=CHOICES)]


class SchemaBody(Body):
    """A JSON schema. An empty or missing schema allows any object, as in llama.cpp; null is refused."""

    NULLS = ("schema",)
    schema: Json | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if self.schema is None:
            raise Wrong("schema", "expected a JSON schema, which is an object")


class ResponseFormat(SchemaBody, kw_only=True):
    """The format of the output. Its schema is in `json_schema` or, as in /v1/responses, in the object itself."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            SchemaBody.__post_init__(self)

    @property
    def structure(self) -> Structure | None:
        """The required structure, or None for any text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return schema_structure(self.schema or {})
            case "json_schema":
                return schema_structure((self.json_schema or self).schema or {})


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json: Json | None = None
    json_object: bool = False
    regex: str = ""
    choice: Choices | None = None
    grammar: str = ""
    structural_tag: Any = None


class StructureBody(SamplingBody):
    """The fields that require a structure; a request may have one of them."""

    response_format: ResponseFormat | None = None
    json_schema: Json | None = None
    grammar: str = ""
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | None = None
    guided_regex: str = ""
    guided_choice: Choices | None = None
    guided_grammar: str = ""


def read_structure(body: StructureBody) -> Structure | None:
    """Return the required structure of the output, or None if unconstrained. Raise BadRequest for contradicting
    fields."""
    given = {
        "response_format": body.response_format.structure if body.response_format else None,
        "json_schema": schema_structure(body.json_schema),
        "grammar": Structure(gbnf=body.grammar) if body.grammar else None,
        "structured_outputs": _structured(body.structured_outputs) if body.structured_outputs else None,
        "guided_json": schema_structure(body.guided_json),
        "guided_regex": Structure(regex=body.guided_regex) if body.guided_regex else None,
        "guided_choice": _choice_structure(body.guided_choice, "guided_choice"),
        "guided_grammar": _grammar_structure(body.guided_grammar),
    }
    found = {name: structure for name, structure in given.items() if structure is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise wrong(f"the request has {first}, too; give one of them", second)
    return next(iter(found.values()), None)


def schema_structure(schema: Json | None) -> Structure | None:
    """Return the structure of a JSON schema."""
    if schema is None:
        return None
    return Structure(schema=schema) if schema else Structure(any_object=True)


def _grammar_structure(source: str) -> Structure | None:
    """Return the structure of a grammar in llama.cpp's format or, if it has no `name ::= ...`, in Lark's."""
    if not source:
        return None
    return Structure(gbnf=source) if _GBNF.search(source) else Structure(lark=source)


def _choice_structure(given: str | list[str] | None, *path: str) -> Structure | None:
    """Return the structure of a choice between texts."""
    if given is None:
        return None
    choices = listed(given)
    if not choices:
        raise wrong("expected at least one text", *path)
    if sum(map(len, choices)) > CHOICES_LENGTH:
        raise wrong(f"the texts have more than {CHOICES_LENGTH} characters together", *path)
    return Structure(regex="|".join(text.translate(_ESCAPED) for text in choices))


def _structured(body: StructuredOutputs) -> Structure | None:
    given = {
        "json": schema_structure(body.json),
        "json_object": Structure(any_object=True) if body.json_object else None,
        "regex": Structure(regex=body.regex) if body.regex else None,
        "choice": _choice_structure(body.choice, "structured_outputs", "choice"),
        "grammar": _grammar_structure(body.grammar),
    }
    found = {name: structure for name, structure in given.items() if structure is not None}
    if len(found) > 1:
        raise wrong(f"has {' and '.join(found)}; give one of them", "structured_outputs")
    if body.structural_tag is not None:
        raise wrong("not supported; give a schema or a grammar", "structured_outputs", "structural_tag")
    return next(iter(found.values()), None)


PRIORITIES = {"flex": -1, "priority": 1, "fast": 1}  # value of `service_tier` -> priority of the request
MAX_ALTERNATIVES = 100  # maximum number of top log probabilities per token
MAX_ANSWERS = 128
MAX_BIASES = 1000  # maximum number of biases given as text, since each text is tokenized
CLIENT_LENGTH = 256

Limit = Annotated[int, Meta(ge=-1)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]
Answers = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]


class StreamOptions(Body):
    """The options of a stream."""

    include_usage: bool = False


class GenerationBody(StructureBody):
    """The fields that all requests for text share."""

    model: str = ""
    logit_bias: Json | list[Any] | None = None
    n_predict: Limit | None = None
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    stop: Stops = ()  # type: ignore[assignment]
    ignore_eos: bool = False
    post_sampling_probs: bool = False
    n: Answers | None = None
    n_cmpl: Answers | None = None
    cache_prompt: bool = True
    service_tier: str = ""
    safety_identifier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    timings_per_token: bool = False
    return_progress: bool = False
    sse_ping_interval: Annotated[int, Meta(ge=-1, le=3600)] | None = None

    @property
    def shows_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options.include_usage


def read_generation(body: GenerationBody, client: str, most: int | None = None) -> Generation:
    """Read the common fields except `logprobs`, which differs between chat and completions.

    `most` is the token limit for requests that set none.
    """
    biases, texts = read_biases(body)
    return Generation(
        sampling=read_sampling(body) | ({"logit_bias": biases} if biases else {}),
        biases=texts,
        max_tokens=token_limit(most, body.n_predict, body.max_completion_tokens, body.max_tokens),
        stops=read_stops(body.stop),
        ignore_eos=body.ignore_eos,
        sampled=body.post_sampling_probs,
        structure=read_structure(body),
        n=body.n or body.n_cmpl or 1,
        reuse=body.cache_prompt,
        priority=PRIORITIES.get(body.service_tier, 0),
        client=named_client(client, body.safety_identifier, body.user, body.prompt_cache_key),
    )


def token_limit(most: int | None, *limits: int | None) -> int | None:
    """Return the first limit that is set, None if it is -1, or `most` if none is set."""
    value = next((limit for limit in limits if limit is not None), most)
    return None if value is None or value < 0 else min(value, MAX_INT)


def read_stops(stops: str | list[str]) -> tuple[str, ...]:
    """Return the stop strings, without duplicates and empty strings."""
    return tuple(dict.fromkeys(stop for stop in listed(stops) if stop))


def named_client(client: str, *names: str | None) -> str:
    """Return the client of a request: the client of the connection and the user that the request names."""
    found = next(filter(None, names), "")
    return f"{client}/{found}"[:CLIENT_LENGTH] if found else client


# -- biases ----------------------------------------------------------------------------------------------------------


def read_biases(body: GenerationBody) -> tuple[dict[int, float], dict[str, float]]:
    """Return the biases of tokens and of texts: {"15043": 1.5}, [[15043, 1.5]] and [["text", false]]."""
    value = body.logit_bias or {}
    pairs = list(value.items()) if isinstance(value, dict) else [_pair(*each) for each in enumerate(value)]
    biases = [(_token(key), _bias(bias)) for key, bias in pairs]
    tokens = {key: bias for key, bias in biases if isinstance(key, int)}
    texts = {key: bias for key, bias in biases if isinstance(key, str)}
    if len(texts) > MAX_BIASES:
        raise wrong(f"has {len(texts)} texts; the limit is {MAX_BIASES}", "logit_bias")
    return tokens, texts


def _pair(number: int, pair: Any) -> tuple[int | str, Any]:
    if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str)):
        raise wrong("expected a pair: a token id or a text, and its bias", f"logit_bias[{number}]")
    return pair[0], pair[1]


def _token(key: int | str) -> int | str:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
        return int(key)
    return key


def _bias(bias: Any) -> float:
    if bias is False:
        return -math.inf
    if type(bias) not in (int, float) or abs(bias) > 1e6:
        raise wrong("a bias must be a number from -1000000 to 1000000, or false to ban the token", "logit_bias")
    return float(bias)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: dict[Effort, str] = {"none": "", "minimal": "low", "xhigh": "high", "max": "high"}  # others stay
SWITCHES = {"enabled": True, "disabled": False}  # values of `thinking`; others leave the choice to the model
# value of `reasoning_format` -> whether reasoning stays in the content
FORMATS = {"auto": None, "deepseek": False, "deepseek-legacy": False, "none": True}
Budget = Annotated[int, Meta(ge=-1, le=MAX_INT)]


class Switch(Body):
    """Whether the model reasons."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class Variables(Body):
    """The template variables that decide whether the model reasons."""

    enable_thinking: bool | None = None


class ThinkingBody(GenerationBody):
    """The reasoning fields of chat completions."""

    reasoning_format: Literal["auto", "deepseek", "deepseek-legacy", "none"] = "auto"
    enable_thinking: bool | None = None
    thinking: Switch | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    reasoning_budget: Budget | None = None
    reasoning_effort: Effort | None = None


def read_thinking(body: ThinkingBody, variables: Json) -> Thinking:
    """Read the reasoning fields of chat completions. The template `variables` may have `enable_thinking`."""
    enabled = read(variables, Variables, "chat_template_kwargs").enable_thinking
    if body.enable_thinking is not None:
        enabled = body.enable_thinking
    if body.thinking is not None:
        enabled = SWITCHES.get(body.thinking.type)
    budgets = (body.thinking_budget_tokens, body.reasoning_budget_tokens, body.reasoning_budget)
    budget = next((each for each in budgets if each is not None), -1)
    inline = FORMATS[body.reasoning_format]
    return with_effort(body.reasoning_effort, enabled, None if budget == -1 else budget, inline)


def with_effort(
    effort: Effort | None, enabled: bool | None = None, budget: int | None = None, inline: bool | None = None
) -> Thinking:
    """Return the options for a reasoning effort: "none" disables reasoning, other values enable it."""
    if effort is None:
        return Thinking(enabled, "", budget, inline)
    level = EFFORTS.get(effort, effort)
    return Thinking(bool(level) if enabled is None else enabled, level, budget, inline)
