"""Parse the fields of llama.cpp's /completion with the rules of its server-schema.cpp: values out of range are clamped
or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from localllm.options import SamplingOptions
from localllm.options.sampling import LETTERS, sampler_name
from localllm.server.errors import NotSupported
from localllm.server.fields import Fields
from localllm.server.interface import Service
from localllm.server.settings import ServerSettings
from localllm.server.turn import Generation, Json, Structure

MOST = 2**31 - 1
RANDOM = 2**32 - 1  # llama.cpp's value for a random seed
MAX_STOPS = 256
MAX_BIASES = 10_000
MAX_PROBS = 100
MAX_BREAKERS = 256


class Knob(NamedTuple):
    """A sampling field. A value outside the range is clamped or, if the range is `hard`, refused."""

    name: str  # llama.cpp's name
    option: str  # name in SamplingOptions
    whole: bool = False
    least: float = -math.inf
    most: float = math.inf
    hard: bool = False


KNOBS = (
    Knob("temperature", "temperature", least=0),
    Knob("dynatemp_range", "dynatemp_range", least=0),
    Knob("dynatemp_exponent", "dynatemp_exp", least=0),
    Knob("top_k", "top_k", whole=True, least=0, most=MOST),
    Knob("top_p", "top_p", least=0, most=1),
    Knob("min_p", "min_p", least=0, most=1),
    Knob("top_n_sigma", "top_n_sigma"),
    Knob("xtc_probability", "xtc_probability", least=0, most=1),
    Knob("xtc_threshold", "xtc_threshold", least=0, most=1),
    Knob("typical_p", "typical_p", least=0, most=1),
    Knob("repeat_last_n", "repeat_last_n", whole=True, least=0, most=MOST, hard=True),
    Knob("repeat_penalty", "repeat_penalty"),
    Knob("presence_penalty", "presence_penalty"),
    Knob("frequency_penalty", "frequency_penalty"),
    Knob("dry_multiplier", "dry_multiplier", least=0),
    Knob("dry_allowed_length", "dry_allowed_length", whole=True, least=0, most=MOST, hard=True),
    Knob("dry_penalty_last_n", "dry_penalty_last_n", whole=True, least=0, most=MOST, hard=True),
    Knob("mirostat", "mirostat", whole=True),
    Knob("mirostat_tau", "mirostat_tau"),
    Knob("mirostat_eta", "mirostat_eta"),
    Knob("adaptive_target", "adaptive_target", most=1),
    Knob("adaptive_decay", "adaptive_decay", least=0, most=0.99, hard=True),
    Knob("min_keep", "min_keep", whole=True, least=0, most=MOST, hard=True),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a request, without the prompt."""

    generation: Generation
    sampling: SamplingOptions  # merged with the model's defaults
    stream: bool
    return_tokens: bool
    timings_per_token: bool
    return_progress: bool
    response_fields: tuple[str, ...]
    probs: int
    slot: int
    keep: int
    discard: int
    indent: int
    milliseconds: int  # time limit of the output in milliseconds; 0 or less: no limit
    ping: int | None
    grammar: str


async def wanted(fields: Fields, service: Service, model: str, settings: ServerSettings, client: str) -> Wanted:
    """Read the fields of a completion request."""
    _refuse(fields)
    sampling = _sampling(fields) | await _biases(fields, service, model)
    whole = service.sampling_defaults(model).changed(sampling)  # OptionError for values that SamplingOptions rejects
    probs = fields.integer("n_probs", fields.integer("logprobs", 0, 0, MAX_PROBS), 0, MAX_PROBS)
    structure = _structure(fields)
    generation = Generation(
        sampling=sampling,
        max_tokens=_limit(fields, settings),
        stops=_stops(fields),
        ignore_eos=fields.flag("ignore_eos", False),
        logprobs=probs or None,
        sampled=fields.flag("post_sampling_probs", False),
        structure=structure,
        n=fields.integer("n_cmpl", fields.integer("n", 1, 1, settings.parallel), 1, settings.parallel),
        reuse=fields.flag("cache_prompt", True),
        slot=fields.integer("id_slot", -1, -1, MOST),
        client=client,
    )
    return Wanted(
        generation=generation,
        sampling=whole,
        stream=fields.flag("stream", False),
        return_tokens=fields.flag("return_tokens", False),
        timings_per_token=fields.flag("timings_per_token", False),
        return_progress=fields.flag("return_progress", False),
        response_fields=fields.texts("response_fields", 256),
        probs=probs,
        slot=generation.slot,
        keep=fields.integer("n_keep", 0, -1, MOST),
        discard=fields.integer("n_discard", 0, 0, MOST),
        indent=fields.integer("n_indent", 0, 0, MOST),
        milliseconds=fields.integer("t_max_predict_ms", -1, -1),
        ping=fields.optional_integer("sse_ping_interval", -1, MOST),
        grammar=structure.gbnf if structure else "",
    )


def _refuse(fields: Fields) -> None:
    """Refuse unsupported options that would change the output."""
    unsupported = {
        "lora": any(each.number("scale", 0) for each in fields.each("lora", 256)),
        "grammar_lazy": fields.flag("grammar_lazy", False),
    }
    for name, asked in unsupported.items():
        if asked:
            raise NotSupported(f"{name} is not supported; leave it out")


def _sampling(fields: Fields) -> Json:
    found: Json = {}
    for knob in KNOBS:
        if fields.has(knob.name):
            found[knob.option] = _value(fields, knob)
    if fields.has("seed"):
        seed = fields.integer("seed", most=2**64 - 1)
        found["seed"] = -1 if seed in (-1, RANDOM) else seed % 2**64
    if (base := fields.optional_number("dry_base")) is not None and base >= 1:
        found["dry_base"] = base
    if fields.has("dry_sequence_breakers"):
        found["dry_sequence_breaker"] = _breakers(fields)
    if fields.has("samplers"):
        found["samplers"] = _samplers(fields)
    return found


def _value(fields: Fields, knob: Knob) -> float:
    if knob.hard:
        if not knob.whole:
            return fields.number(knob.name, None, knob.least, knob.most)
        return fields.integer(knob.name, None, int(knob.least), int(knob.most))
    value = fields.integer(knob.name) if knob.whole else fields.number(knob.name)
    return type(value)(min(max(value, knob.least), knob.most))


def _breakers(fields: Fields) -> tuple[str, ...]:
    found = fields.short_texts("dry_sequence_breakers", MAX_BREAKERS)
    if not found:
        raise fields.wrong("dry_sequence_breakers", "expected a list of texts that is not empty")
    return found


def _samplers(fields: Fields) -> tuple[str, ...]:
    """Return samplers from a list of names or a string of letters. Unknown samplers are skipped, as in llama.cpp."""
    value = fields.data["samplers"]
    if isinstance(value, str):
        return tuple(LETTERS[letter] for letter in value[:64] if letter in LETTERS)
    return tuple(name for spelling in fields.texts("samplers", 64) if (name := sampler_name(spelling)))


def _limit(fields: Fields, settings: ServerSettings) -> int | None:
    names = ("n_predict", "max_completion_tokens", "max_tokens")
    name = next((name for name in names if fields.has(name)), "")
    if not name:
        return settings.max_tokens
    found = fields.integer(name, None, -1, MOST)
    return found if found >= 0 else None


def _stops(fields: Fields) -> tuple[str, ...]:
    return tuple(stop for stop in fields.short_texts("stop", MAX_STOPS) if stop)


def _structure(fields: Fields) -> Structure | None:
    """Return the structure. A grammar overrides a schema, as in llama.cpp. An empty schema allows any object."""
    if fields.has("grammar"):
        grammar = fields.text("grammar")
        return Structure(gbnf=grammar) if grammar.strip() else None
    schema = fields.optional_object("json_schema")
    if schema is None:
        return None
    return Structure(schema=schema) if schema else Structure(any_object=True)


async def _biases(fields: Fields, service: Service, model: str) -> Json:
    """Read `logit_bias`: [token or text, bias] pairs, or an object from tokens to biases. False bans a token."""
    value: Any = fields.data.get("logit_bias")
    if value is None:
        return {}
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise fields.wrong("logit_bias", "expected a list of pairs [token, bias], or an object")
    if len(pairs) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"has {len(pairs)} entries; the limit is {MAX_BIASES}")
    found: dict[int, float] = {}
    vocabulary = service.find(model).vocabulary
    read: list[tuple[int | str, float]] = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            continue  # llama.cpp skips invalid entries
        token, bias = _token(pair[0]), _bias(pair[1])
        if token is not None and bias is not None:
            read.append((token, bias))
    texts = [token for token, _ in read if isinstance(token, str)]
    made = iter(await service.tokenize_all(model, texts, False, False) if texts else ())
    for token, bias in read:
        for each in next(made) if isinstance(token, str) else (token,):
            if 0 <= each < vocabulary:
                found[each] = found.get(each, 0.0) + bias
    return {"logit_bias": found}


def _bias(value: Any) -> float | None:
    if value is False:
        return -math.inf
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if numeric and abs(value) < 1e30 else None


def _token(token: Any) -> int | str | None:
    """Return the key of a bias: a token id, or a text to be tokenized. Return None for any other value."""
    if isinstance(token, int) and not isinstance(token, bool):
        return token
    if not isinstance(token, str):
        return None
    number = token.removeprefix("-")
    return int(token) if number.isascii() and number.isdigit() and len(token) < 20 else token


def described(wanted: Wanted, end_tokens: Sequence[int], *, short: bool = False) -> Json:
    """Return llama.cpp's `generation_settings`, or the `short` form for /props and /slots."""
    sampling, generation = wanted.sampling, wanted.generation
    values: Mapping[str, Any] = sampling.values()
    most = -1 if generation.max_tokens is None else generation.max_tokens
    found: Json = {"seed": RANDOM if sampling.seed == -1 else sampling.seed}
    found |= {knob.name: values[knob.option] for knob in KNOBS if knob.name != "min_keep"}
    found |= {"dry_base": sampling.dry_base}
    if not short:
        found |= {
            "dry_sequence_breakers": list(sampling.dry_sequence_breaker),
            "stop": list(generation.stops),
            "logit_bias": _bias_list(wanted, end_tokens),
            "grammar": wanted.grammar,
            "grammar_lazy": False,
            "grammar_triggers": [],
            "preserved_tokens": [],
        }
    return found | {
        "max_tokens": most,
        "n_predict": most,
        "n_keep": wanted.keep,
        "n_discard": wanted.discard,
        "ignore_eos": generation.ignore_eos,
        "stream": wanted.stream,
        "n_probs": wanted.probs,
        "min_keep": sampling.min_keep,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": list(sampling.samplers),
        "speculative.types": "none",
        "timings_per_token": wanted.timings_per_token,
        "post_sampling_probs": generation.sampled,
        "backend_sampling": False,
        "lora": [],
    }


def _bias_list(wanted: Wanted, end_tokens: Sequence[int]) -> list[Json]:
    biases = dict(wanted.sampling.logit_bias)
    if wanted.generation.ignore_eos:
        biases |= dict.fromkeys(end_tokens, -math.inf)
    return [{"bias": None if bias == -math.inf else bias, "token": token} for token, bias in biases.items()]
