"""The fields that chat, completions and responses share: sampling, limits and stop strings.

Fields keep the names that OpenAI, llama.cpp and vLLM use. Unknown fields are ignored, as in compatible servers; known
fields with an invalid value are refused.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localllm.server.openai.structure import StructureBody, read_structure
from localllm.server.sampling import Stops, read_sampling
from localllm.server.structs import MAX_INT, Body, listed, wrong
from localllm.server.turn import Generation, Json

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
