"""The requests of `soak.py` in all four APIs: whole, streamed and invalid requests, and checks of the responses.

Each generator takes a random number generator and returns a `Wanted`. `check` raises `Wrong` for a wrong response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

TEXT = (
    "please book a table for two at the little red restaurant near the old river in San Jose tonight and tell me "
    "what the weather will be on Friday when the girl and her dog walk to the park to find a ball under the tree"
)
WORDS = TEXT.split()
FINISHED = ("stop", "length", "tool_calls", "end_turn", "max_tokens", "tool_use", "stop_sequence")
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": CITY}
OPENAI_TOOL = {"type": "function", "function": FUNCTION}


class Wrong(Exception):
    """Raised for a wrong response."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request and the expected kind of response.

    `refused` means that it must be rejected with an error in its API's format. `parse` checks the text of the answer.
    """

    kind: str
    path: str
    body: Mapping[str, Any] | bytes
    refused: bool = False
    parse: Callable[[Any], object] | None = None

    @property
    def api(self) -> str:
        return next(api for start, api in PATHS if self.path.startswith(start))

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    @property
    def stream(self) -> bool:
        return not isinstance(self.body, bytes) and bool(self.body.get("stream"))


PATHS = (  # (path prefix, API); the first match applies
    ("/v1/messages", "anthropic"),
    ("/v1/responses", "responses"),
    ("/v1/", "openai"),
    ("/api/", "ollama"),
    ("/", "llamacpp"),
)

# -- prompts ---------------------------------------------------------------------------------------------------------

SHARED = [" ".join(Random(length).choices(WORDS, k=length)) for length in (40, 150, 400)]


def text(chance: Random) -> str:
    """Return a text of 1 to 450 words. Two in three texts share prefixes with others."""
    own = " ".join(chance.choices(WORDS, k=chance.randrange(1, 50)))
    return f"{chance.choice(SHARED)} {own}" if chance.random() < 0.66 else own


def messages(chance: Random) -> list[dict[str, Any]]:
    """Return a conversation with one to three user turns."""
    made = [{"role": "user", "content": text(chance)}]
    for number in range(chance.choice((0, 0, 1, 2))):
        made += [{"role": "assistant", "content": "Certainly."}, {"role": "user", "content": f"And then, {number}?"}]
    return made


def usual(chance: Random) -> dict[str, Any]:
    return {
        "stream": chance.random() < 0.5,
        "temperature": chance.choice((0, 0.9)),
        "max_tokens": chance.randrange(1, 60),
        "user": f"user{chance.randrange(40)}",
    }


def schema(chance: Random) -> dict[str, Any]:
    """Return a JSON schema that is rarely repeated: grammars are cached, and the cache must stay bounded."""
    key = f"key{chance.randrange(10_000)}"
    shape = {"type": "object", "properties": {key: {"enum": [1, 2, 3]}}, "required": [key]}
    return {**shape, "additionalProperties": False}


# -- valid requests
# -----------------------------------------------------------------------------------------------------


def openai_chat(chance: Random) -> Wanted:
    extra = chance.choice(({}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["you"]}))
    options = {"stream_options": {"include_usage": True}}
    body = {"messages": messages(chance), **usual(chance), **extra, **options}
    return Wanted("openai chat", "/v1/chat/completions", body)


def openai_tool(chance: Random) -> Wanted:
    body = {"messages": messages(chance), **usual(chance), "tools": [OPENAI_TOOL], "tool_choice": "required"}
    return Wanted("openai tool", "/v1/chat/completions", body | {"max_tokens": 60}, parse=json.loads)


def openai_schema(chance: Random) -> Wanted:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(chance)}}
    body = {"messages": messages(chance), **usual(chance), "response_format": form, "max_tokens": 60}
    return Wanted("openai schema", "/v1/chat/completions", body, parse=json.loads)


def openai_completion(chance: Random) -> Wanted:
    extra = chance.choice(({}, {"echo": True}, {"logprobs": 2}, {"best_of": 1}))
    return Wanted("openai completion", "/v1/completions", {"prompt": text(chance), **usual(chance), **extra})


def openai_response(chance: Random) -> Wanted:
    tool = {"type": "function", **FUNCTION}
    body = {"input": messages(chance), "max_output_tokens": chance.randrange(16, 60), "stream": chance.random() < 0.5}
    return Wanted("openai response", "/v1/responses", body | chance.choice(({}, {"tools": [tool]})))


def anthropic_message(chance: Random) -> Wanted:
    body: dict[str, Any] = {"model": "any", "messages": messages(chance), "system": "Be brief.", **usual(chance)}
    return Wanted("anthropic message", "/v1/messages", body)


def anthropic_tool(chance: Random) -> Wanted:
    tool = {"name": "weather", "description": "The weather", "input_schema": CITY}
    body = {"model": "any", "messages": messages(chance), "tools": [tool], "tool_choice": {"type": "any"}}
    return Wanted("anthropic tool", "/v1/messages", body | {"max_tokens": 60, "stream": chance.random() < 0.5})


def _ollama(chance: Random) -> dict[str, Any]:
    settings = {"num_predict": chance.randrange(1, 60), "temperature": chance.choice((0, 0.9))}
    return {"model": "demo", "stream": chance.random() < 0.5, "options": settings}


def ollama_chat(chance: Random) -> Wanted:
    """Return an Ollama chat request without tools, which the API rejects if the model's template lacks them."""
    return Wanted("ollama chat", "/api/chat", {"messages": messages(chance), **_ollama(chance)})


def ollama_generate(chance: Random) -> Wanted:
    return Wanted("ollama generate", "/api/generate", {"prompt": text(chance), **_ollama(chance)})


def ollama_schema(chance: Random) -> Wanted:
    body = {"messages": messages(chance), **_ollama(chance), "format": schema(chance)}
    return Wanted("ollama schema", "/api/chat", body)


def llama_completion(chance: Random) -> Wanted:
    extra = chance.choice(({}, {"n_probs": 3}, {"cache_prompt": False}, {"return_tokens": True}))
    body = {"prompt": text(chance), "n_predict": chance.randrange(1, 60), "stream": chance.random() < 0.5, **extra}
    return Wanted("llama.cpp completion", "/completion", body)


def llama_schema(chance: Random) -> Wanted:
    body = {"prompt": text(chance), "n_predict": 60, "json_schema": schema(chance), "stream": chance.random() < 0.5}
    return Wanted("llama.cpp schema", "/completion", body)


# -- invalid requests
# ---------------------------------------------------------------------------------------------------

VECTORS = (
    ("/v1/embeddings", {"input": "a cat"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/api/embed", {"model": "demo", "input": "a cat"}),
    ("/embedding", {"content": "a cat"}),
)
BROKEN: tuple[tuple[str, Mapping[str, Any] | bytes], ...] = (
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"'),
    ("/v1/chat/completions", b"\xff\xfe"),
    ("/v1/chat/completions", {"messages": "hello"}),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 3000}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
    ("/v1/completions", {"prompt": [99999999]}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
    ("/v1/messages", {"model": "any", "max_tokens": 5, "messages": []}),
    ("/v1/messages", {"model": "any", "max_tokens": "many", "messages": [{"role": "user", "content": "x"}]}),
    ("/api/chat", {"model": "demo", "messages": [{"role": "user", "content": 7}]}),
    ("/api/chat", b"[]"),
    ("/completion", {"prompt": {"no": "text"}}),
    ("/completion", {"prompt": "x", "grammar": "root ::= ("}),
    ("/completion", {"prompt": "x", "json_schema": {"type": "nonsense"}}),
)


def vectors(chance: Random) -> Wanted:
    path, body = chance.choice(VECTORS)
    return Wanted("embeddings refused", path, body, refused=True)


def broken(chance: Random) -> Wanted:
    path, body = chance.choice(BROKEN)
    if isinstance(body, Mapping) and chance.random() < 0.5:
        body = {**body, "stream": True}
    return Wanted("broken refused", path, body, refused=True)


MAKERS: Sequence[Callable[[Random], Wanted]] = (
    *(openai_chat, openai_chat, openai_tool, openai_schema, openai_completion, openai_response),
    *(anthropic_message, anthropic_message, anthropic_tool, ollama_chat, ollama_generate, ollama_schema),
    *(llama_completion, llama_schema, vectors, broken),
)

# -- checks ----------------------------------------------------------------------------------------------------------


def check(one: Wanted, status: int, body: bytes) -> None:
    """Raise Wrong unless this is a correct response to the request."""
    if one.refused:
        if not 400 <= status < 500 and status != 501:
            raise Wrong(f"status {status}, where a refusal was due: {body[:300]!r}")
        if not _is_error(one.api, json.loads(body)):
            raise Wrong(f"the error has not the shape of the API: {body[:300]!r}")
        return
    if status != 200:
        raise Wrong(f"status {status}: {body[:300]!r}")
    found = events(body) if one.stream else [json.loads(body)]
    for event in found:
        if isinstance(event, dict) and (event.get("error") or event.get("type") in ("error", "response.failed")):
            raise Wrong(f"an error in the answer: {event}")
    ended = (STREAM_ENDS if one.stream else WHOLE_ENDS)[one.api]
    if not found or not ended(found):
        raise Wrong(f"the answer has no end: {body[-300:]!r}")
    if one.parse is not None:
        _parsed(one, found)


def _is_error(api: str, body: Any) -> bool:
    """Return whether this is an error in the API's format: of OpenAI and llama.cpp, Anthropic, or Ollama."""
    error = body.get("error")
    if api == "ollama":
        return isinstance(error, str) and bool(error)
    return isinstance(error, dict) and bool(error.get("message")) and (api != "anthropic" or body["type"] == "error")


def events(body: bytes) -> list[Any]:
    """Return the events of a stream: the data of server-sent events, or JSON lines."""
    lines = body.decode().splitlines()
    if any(line.startswith("data:") for line in lines):
        lines = [line[5:].strip() for line in lines if line.startswith("data:")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines if line]


def _finishes(found: list[Any]) -> list[str]:
    """Return the finish reasons of OpenAI's choices."""
    choices = [choice for event in found if isinstance(event, dict) for choice in event.get("choices", ())]
    return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]


def _all_finish(found: list[Any]) -> bool:
    ends = _finishes(found)
    return bool(ends) and all(end in FINISHED for end in ends)


STREAM_ENDS: Mapping[str, Callable[[list[Any]], bool]] = {
    "openai": lambda found: found[-1] == "[DONE]" and _all_finish(found),
    "responses": lambda found: found[-1]["type"] in ("response.completed", "response.incomplete"),
    "anthropic": lambda found: found[-1]["type"] == "message_stop",
    "ollama": lambda found: found[-1]["done"] is True,
    "llamacpp": lambda found: next(each for each in reversed(found) if each != "[DONE]")["stop"] is True,
}
WHOLE_ENDS: Mapping[str, Callable[[list[Any]], bool]] = {
    "openai": _all_finish,
    "responses": lambda found: found[0]["status"] in ("completed", "incomplete"),
    "anthropic": lambda found: found[0]["stop_reason"] in FINISHED,
    "ollama": lambda found: found[0]["done"] is True,
    "llamacpp": lambda found: found[0]["stop"] is True,
}


def _parsed(one: Wanted, found: list[Any]) -> None:
    """Parse the text or the call arguments of an answer that was not cut off."""
    if "length" in _finishes(found):
        return
    assert one.parse is not None
    said, called = "", dict[int, str]()
    for event in found:
        for choice in event.get("choices", ()) if isinstance(event, dict) else ():
            message = choice.get("message") or choice.get("delta") or {}
            said += message.get("content") or ""
            for number, call in enumerate(message.get("tool_calls") or ()):
                at = call.get("index", number)
                called[at] = called.get(at, "") + (call["function"].get("arguments") or "")
    try:
        for piece in called.values() or [said]:
            one.parse(piece)
    except ValueError as error:
        raise Wrong(f"{error}: said {said!r}, called {called}") from None
