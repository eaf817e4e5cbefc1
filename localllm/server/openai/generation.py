"""The fields that chat, completions and responses share: sampling, limits and stop strings.

Fields keep the names that OpenAI, llama.cpp and vLLM use. Unknown fields are ignored, as in compatible servers; known
fields with an invalid value are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.options import SamplingOptions
from localllm.options.declare import declared
from localllm.options.sampling import LETTERS, NAMES, sampler_name
from localllm.server.fields import Fields
from localllm.server.interface import Service
from localllm.server.openai.structure import read_structure
from localllm.server.turn import Generation

# Numeric request fields and the matching field of SamplingOptions.
NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "top_n_sigma": "top_n_sigma",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "repetition_penalty": "repeat_penalty",
    "repeat_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base",
    "dynatemp_range": "dynatemp_range",
    "dynatemp_exponent": "dynatemp_exp",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "adaptive_target": "adaptive_target",
    "adaptive_decay": "adaptive_decay",
}
COUNTS = {
    "top_k": "top_k",
    "repeat_last_n": "repeat_last_n",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_penalty_last_n",
    "min_keep": "min_keep",
    "mirostat": "mirostat",
}
KINDS = {each.name: each.option.kind for each in declared(SamplingOptions)}
PRIORITIES = {"flex": -1, "priority": 1, "fast": 1}  # value of `service_tier` -> priority of the request
CLIENTS = ("safety_identifier", "user", "prompt_cache_key")
MAX_STOPS = 128
MAX_ALTERNATIVES = 100  # maximum number of top log probabilities per token
MAX_ANSWERS = 128
MAX_BIASES = 1000  # maximum number of biases given as text, since each text is tokenized
MAX_INT = 2**31 - 1
CLIENT_LENGTH = 256


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The common fields of a request. `bias_texts` must be tokenized before they become token biases."""

    generation: Generation
    bias_texts: Mapping[str, float] = field(default_factory=dict)


def read_generation(fields: Fields, client: str, most: int | None = None) -> GenerationRequest:
    """Read the common fields except `logprobs`, which differs between chat and completions.

    `most` is the token limit for requests that set none.
    """
    biases, texts = read_biases(fields)
    sampling = read_sampling(fields) | ({"logit_bias": biases} if biases else {})
    made = Generation(
        sampling=sampling,
        max_tokens=read_max_tokens(fields, ("n_predict", "max_completion_tokens", "max_tokens"), most),
        stops=read_stops(fields, "stop"),
        ignore_eos=fields.flag("ignore_eos", False),
        sampled=fields.flag("post_sampling_probs", False),
        structure=read_structure(fields),
        n=fields.integer("n", fields.integer("n_cmpl", 1, 1, MAX_ANSWERS), 1, MAX_ANSWERS),
        reuse=fields.flag("cache_prompt", True),
        priority=PRIORITIES.get(fields.text("service_tier", ""), 0),
        client=read_client(fields, client),
    )
    return GenerationRequest(made, texts)


def read_sampling(fields: Fields) -> dict[str, Any]:
    """Return the fields of SamplingOptions that the request sets."""
    found: dict[str, Any] = {}
    for name, option in NUMBERS.items():
        if fields.has(name):
            found[option] = _checked(fields, name, option, fields.number(name))
    for name, option in COUNTS.items():
        if fields.has(name):
            found[option] = _checked(fields, name, option, fields.integer(name, None, -MAX_INT, MAX_INT))
    if fields.has("seed"):
        seed = fields.integer("seed", None, -(2**63), 2**64 - 1)
        found["seed"] = seed if seed >= -1 else seed % 2**64
    if fields.has("samplers"):
        found["samplers"] = _samplers(fields)
    if fields.has("dry_sequence_breakers"):
        breakers = fields.short_texts("dry_sequence_breakers", MAX_STOPS)
        found["dry_sequence_breaker"] = _checked(fields, "dry_sequence_breakers", "dry_sequence_breaker", breakers)
    if fields.list("lora", ()):
        raise fields.wrong("lora", "adapters are not supported; leave it empty")
    return found


def _checked(fields: Fields, name: str, option: str, value: Any) -> Any:
    problem = KINDS[option].problem(value)
    if problem:
        raise fields.wrong(name, problem)
    return value


def _samplers(fields: Fields) -> tuple[str, ...]:
    """Return the names of samplers. The request may also use llama.cpp's single letters."""
    value = fields.data["samplers"]
    letters = isinstance(value, str) and sampler_name(value) is None
    spelled = tuple(value) if letters else fields.texts("samplers")
    if len(spelled) > len(NAMES):
        raise fields.wrong("samplers", f"has {len(spelled)} samplers; there are {len(NAMES)}")
    found = [LETTERS.get(spelling.lower()) or sampler_name(spelling) for spelling in spelled]
    for spelling, name in zip(spelled, found, strict=True):
        if name is None:
            raise fields.wrong("samplers", f"no sampler {spelling!r}; supported: {', '.join(NAMES)}")
    return tuple(name for name in found if name is not None)


def read_max_tokens(fields: Fields, names: Sequence[str], most: int | None) -> int | None:
    """Return the first limit that is set, None if it is -1, or `most` if no field is set."""
    for name in names:
        if fields.has(name):
            value = fields.integer(name, None, -1)
            return None if value == -1 else min(value, MAX_INT)
    return most


def read_stops(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the stop strings, without duplicates and empty strings."""
    stops = fields.short_texts(name, MAX_STOPS)
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def read_client(fields: Fields, client: str, *names: str) -> str:
    """Return the client of a request: the client of the connection and the user that the request names."""
    found = next((name for each in names or CLIENTS if (name := fields.text(each, ""))), "")
    return f"{client}/{found}"[:CLIENT_LENGTH] if found else client


# -- biases ----------------------------------------------------------------------------------------------------------


def read_biases(fields: Fields) -> tuple[dict[int, float], dict[str, float]]:
    """Return the biases of tokens and of texts: {"15043": 1.5}, [[15043, 1.5]] and [["text", false]]."""
    value = fields.data.get("logit_bias")
    pairs = list(value.items()) if isinstance(value, dict) else _pairs(fields)
    tokens: dict[int, float] = {}
    texts: dict[str, float] = {}
    for key, bias in pairs:
        number = _token(key)
        if number is None:
            texts[key] = _bias(fields, bias)
        else:
            tokens[number] = _bias(fields, bias)
    if len(texts) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"has {len(texts)} texts; the limit is {MAX_BIASES}")
    return tokens, texts


def _pairs(fields: Fields) -> list[tuple[Any, Any]]:
    found = []
    for number, pair in enumerate(fields.list("logit_bias", ())):
        token_or_text = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | str)
        if not token_or_text or isinstance(pair[0], bool):
            raise fields.wrong(f"logit_bias[{number}]", "expected a pair: a token id or a text, and its bias")
        found.append((pair[0], pair[1]))
    return found


def _token(key: int | str) -> int | None:
    if isinstance(key, int):
        return key
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else None


def _bias(fields: Fields, bias: Any) -> float:
    if bias is False:
        return -math.inf
    if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > 1e6:
        raise fields.wrong("logit_bias", "a bias must be a number from -1000000 to 1000000, or false to ban the token")
    return float(bias)


async def settled(asked: GenerationRequest, service: Service, model: str, vocabulary: int) -> Generation:
    """Return the generation with all biases by token id. Ids outside the vocabulary are dropped."""
    generation = asked.generation
    given = generation.sampling.get("logit_bias", {})
    if not given and not asked.bias_texts:
        return generation
    biases = {token: bias for token, bias in given.items() if 0 <= token < (vocabulary or MAX_INT)}
    texts = list(asked.bias_texts)
    made = await service.tokenize_all(model, texts, False, False) if texts else []
    for tokens, bias in zip(made, asked.bias_texts.values(), strict=True):
        biases |= dict.fromkeys(tokens, bias)
    return replace(generation, sampling={**generation.sampling, "logit_bias": biases})
