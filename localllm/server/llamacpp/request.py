"""The body of llama.cpp's /completion, with the rules of its server-schema.cpp: values out of range are clamped or
refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from localllm.options import SamplingOptions
from localllm.options.sampling import LETTERS, sampler_name
from localllm.server.errors import NotSupported
from localllm.server.openai.generation import schema_structure
from localllm.server.sampling import LLAMACPP, LlamaCppSamplers, Seed, checked, samplers_of
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.structs import MAX_INT, Body, Count, ShortText, listed, wrong
from localllm.server.turn import Generation, Json, Structure

RANDOM = 2**32 - 1  # llama.cpp's value for a random seed
MAX_BIASES = 10_000
MAX_PROBS = 100

Texts = ShortText | Annotated[list[ShortText], Meta(max_length=256)]
Names = str | Annotated[list[str], Meta(max_length=256)]
Limit = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Probs = Annotated[int, Meta(ge=0, le=MAX_PROBS)]
Answers = Annotated[int, Meta(ge=1)]


class Adapter(Body):
    """A LoRA adapter of a request. Its scale must be 0, since adapters are not supported."""

    scale: float = 0


class CompletionBody(LlamaCppSamplers):
    """The body of a completion request."""

    model: str = ""
    prompt: Any = None
    seed: Seed | None = None
    samplers: str | Annotated[list[str], Meta(max_length=64)] | None = None
    dry_sequence_breakers: Texts | None = None
    logit_bias: Json | list[Any] | None = None
    n_predict: Limit | None = None
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    stop: Texts = ""
    ignore_eos: bool = False
    n_probs: Probs | None = None
    logprobs: Probs | None = None
    post_sampling_probs: bool = False
    grammar: str | None = None
    json_schema: Json | None = None
    grammar_lazy: bool = False
    lora: Annotated[list[Adapter], Meta(max_length=256)] = []
    n: Answers | None = None
    n_cmpl: Answers | None = None
    cache_prompt: bool = True
    id_slot: Limit = -1
    stream: bool = False
    return_tokens: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    response_fields: Names = []
    n_keep: Limit = 0
    n_discard: Count = 0
    n_indent: Count = 0
    t_max_predict_ms: Annotated[int, Meta(ge=-1)] = -1  # time limit of the output in milliseconds; 0 or less: no limit
    sse_ping_interval: Limit | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants, except its prompt. `sampling` is merged with the model's defaults."""

    body: CompletionBody
    generation: Generation
    sampling: SamplingOptions


async def wanted(body: CompletionBody, service: Service, model: str, settings: ServerSettings, client: str) -> Wanted:
    """Return what a completion request wants; raise NotSupported for options that would change the output."""
    for name, asked in (("lora", any(each.scale for each in body.lora)), ("grammar_lazy", body.grammar_lazy)):
        if asked:
            raise NotSupported(f"{name} is not supported; leave it out")
    sampling = _sampling(body) | await _biases(body.logit_bias, service, model)
    for name, count in (("n_cmpl", body.n_cmpl), ("n", body.n)):
        if count is not None and count > settings.parallel:
            raise wrong(f"expected at most {settings.parallel}, got {count}", name)
    limits = (body.n_predict, body.max_completion_tokens, body.max_tokens, settings.max_tokens)
    limit = next((each for each in limits if each is not None), None)
    generation = Generation(
        sampling=sampling,
        max_tokens=None if limit == -1 else limit,
        stops=tuple(filter(None, listed(body.stop))),
        ignore_eos=body.ignore_eos,
        logprobs=(body.logprobs if body.n_probs is None else body.n_probs) or None,
        sampled=body.post_sampling_probs,
        structure=_structure(body),
        n=body.n_cmpl or body.n or 1,
        reuse=body.cache_prompt,
        slot=body.id_slot,
        client=client,
    )
    return Wanted(body, generation, service.sampling_defaults(model).changed(sampling))


def _sampling(body: CompletionBody) -> Json:
    if body.dry_base is not None and body.dry_base < 1:
        body.dry_base = None  # ignored, as in llama.cpp
    found = samplers_of(body, LLAMACPP, clamps=True)
    if body.seed is not None:
        seed = body.seed if body.seed >= -1 else body.seed % 2**64
        found["seed"] = -1 if seed == RANDOM else checked("seed", seed, False, "seed")
    if body.dry_sequence_breakers is not None:
        breakers = listed(body.dry_sequence_breakers)
        if not breakers:
            raise wrong("expected a list of texts that is not empty", "dry_sequence_breakers")
        found["dry_sequence_breaker"] = checked("dry_sequence_breaker", breakers, False, "dry_sequence_breakers")
    if body.samplers is not None:
        found["samplers"] = _samplers(body.samplers)
    return found


def _samplers(value: str | list[str]) -> tuple[str, ...]:
    """Return samplers from a list of names or a string of letters. Unknown samplers are skipped, as in llama.cpp."""
    if isinstance(value, str):
        return tuple(LETTERS[letter] for letter in value[:64] if letter in LETTERS)
    return tuple(name for spelling in value if (name := sampler_name(spelling)))


def _structure(body: CompletionBody) -> Structure | None:
    """Return the structure. A grammar overrides a schema, as in llama.cpp."""
    if body.grammar is not None:
        return Structure(gbnf=body.grammar) if body.grammar.strip() else None
    return schema_structure(body.json_schema)


async def _biases(value: Json | list[Any] | None, service: Service, model: str) -> Json:
    """Read `logit_bias`: [token or text, bias] pairs, or an object from tokens to biases. False bans a token."""
    if value is None:
        return {}
    pairs = list(value.items()) if isinstance(value, dict) else value
    if len(pairs) > MAX_BIASES:
        raise wrong(f"has {len(pairs)} entries; the limit is {MAX_BIASES}", "logit_bias")
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
    body, sampling, generation = wanted.body, wanted.sampling, wanted.generation
    values = sampling.values()
    most = -1 if generation.max_tokens is None else generation.max_tokens
    found: Json = {"seed": RANDOM if sampling.seed == -1 else sampling.seed}
    found |= {name: values[each.name] for name, each in LLAMACPP.items()}
    if not short:
        found |= {
            "dry_sequence_breakers": list(sampling.dry_sequence_breaker),
            "stop": list(generation.stops),
            "logit_bias": _bias_list(wanted, end_tokens),
            "grammar": generation.structure.gbnf if generation.structure else "",
            "grammar_lazy": False,
            "grammar_triggers": [],
            "preserved_tokens": [],
        }
    return found | {
        "max_tokens": most,
        "n_predict": most,
        "n_keep": body.n_keep,
        "n_discard": body.n_discard,
        "ignore_eos": generation.ignore_eos,
        "stream": body.stream,
        "n_probs": generation.logprobs or 0,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": list(sampling.samplers),
        "speculative.types": "none",
        "timings_per_token": body.timings_per_token,
        "post_sampling_probs": generation.sampled,
        "backend_sampling": False,
        "lora": [],
    }


def _bias_list(wanted: Wanted, end_tokens: Sequence[int]) -> list[Json]:
    biases = dict(wanted.sampling.logit_bias)
    if wanted.generation.ignore_eos:
        biases |= dict.fromkeys(end_tokens, -math.inf)
    return [{"bias": None if bias == -math.inf else bias, "token": token} for token, bias in biases.items()]
