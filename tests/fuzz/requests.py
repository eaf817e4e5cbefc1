"""Hostile requests to the server, one per case: API requests with changed fields, schemas, grammars, texts and bytes.

`make` returns the bytes for one connection, which depend only on the random number generator.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.localllm.server.test_hostile import HOSTILE, RAW, VALID, changed, places

SHORT: dict[str, Any] = {"max_tokens": 3, "n_predict": 3, "max_output_tokens": 3, "options": {"num_predict": 3}}
HOST = b"Host: 127.0.0.1\r\n"


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request. A "json" request gets a response, and a "wire" request may not."""

    kind: str
    path: str
    data: bytes
    form: str = "json"


def make(random: Random) -> Request:
    """Return the next hostile request."""
    kinds, weights = zip(*WEIGHTS.items(), strict=True)
    kind = random.choices(kinds, weights)[0]
    return MAKERS[kind](random)


def post(kind: str, path: str, body: Any, random: Random | None = None) -> Request:
    """Return a POST request with this body. With `random`, a few percent of the requests are damaged."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    if random is not None:
        data = _damaged(data, random)
    head = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n".encode()
    return Request(kind, path, head + HOST + b"Connection: close\r\n\r\n" + data)


def _damaged(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data) + 1)
    match random.randrange(40):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + bytes([random.randrange(256)]) + data[place:]
        case 2:
            return data.replace(b"1", b"NaN", 1)
        case 3:
            return data.replace(b"1", b"1e99999", 1)
        case 4:
            return data.replace(b"1", b"1" + b"0" * 500, 1)
        case 5:
            return data.replace(b'"', b'"\\ud800', 1)
        case 6:
            return data.decode("utf-8", "replace").encode("utf-16")
    return data


# -- bodies ------------------------------------------------------------------------------------------------------------


def _body(random: Random) -> Request:
    path = random.choice(sorted(VALID))
    body: Any = copy.deepcopy(VALID[path])
    if len(body) > 12:  # with all fields, most cases would end at the first conflict
        kept = {"messages", "prompt", "input", "model", "max_tokens", "max_output_tokens", "n_predict"}
        body = {name: value for name, value in body.items() if name in kept or random.random() < 0.2}
    for _ in range(random.choice((1, 1, 2, 3))):
        spots = list(places(body)) if body else []
        if not spots:
            break
        if random.random() < 0.75:
            body = changed(body, random.choice(spots), copy.deepcopy(random.choice(HOSTILE)))
        else:
            _remove_or_repeat(body, random.choice(spots))
    if isinstance(body, dict) and random.random() < 0.2:
        body["stream"] = random.random() < 0.7
    return post("body", path, _short(path, body), random)


def _remove_or_repeat(body: Any, spot: tuple[Any, ...]) -> None:
    """Remove a field, or append an item of a list to the list again."""
    *outer, key = spot
    for each in outer:
        body = body[each]
    if isinstance(body, list):
        body.append(copy.deepcopy(body[key]))
    else:
        del body[key]


def _short(path: str, body: Any) -> Any:
    """Return a body that limits the length of the answer."""
    name = "max_output_tokens" if "responses" in path else "options" if "/api/" in path else "max_tokens"
    return {**body, name: SHORT[name]} if isinstance(body, dict) and name not in body else body


def _raw(random: Random) -> Request:
    return post("raw", random.choice(sorted(VALID)), random.choice(RAW), random)


# -- schemas and grammars ----------------------------------------------------------------------------------------------


def schema(random: Random, depth: int = 0) -> Any:
    """Return a JSON schema in a common, rare, contradictory or expensive form."""
    if depth > 4 or random.random() < 0.02:
        return random.choice((True, False, {}, None, 5, [], {"type": "x"}, {"$ref": "#"}, {"$ref": "http://x/y"}))
    inner = [schema(random, depth + 1) for _ in range(random.choice((1, 2, 2, 3)))]
    large = random.choice((0, 1, 2, 7, 40, 1000, 10**6, 2**31, 2**63, -1, 0.5, 1e308, None, "x"))
    names = [
        random.choice(("a", "b", "", "é", "__proto__", "\x00", "a" * 300, f"k{random.randrange(99)}")) for _ in inner
    ]
    forms: tuple[Callable[[], Any], ...] = (
        lambda: {"type": random.choice(("string", "integer", "number", "boolean", "null", "object", "array"))},
        lambda: {"type": random.choices(("string", "integer", "null", "object"), k=random.randrange(4))},
        lambda: {"type": "object", "properties": dict(zip(names, inner, strict=True)), "required": names[:1] * 2},
        lambda: {"type": "object", "patternProperties": {_pattern(random): inner[0]}, "minProperties": large},
        lambda: {"type": "object", "additionalProperties": inner[0], "required": [f"r{i}" for i in range(40)]},
        lambda: {"type": "array", "items": inner[0], "minItems": large, "maxItems": large, "uniqueItems": True},
        lambda: {"type": "array", "prefixItems": inner * random.choice((1, 50)), "items": False},
        lambda: {"type": "string", "pattern": _pattern(random)},
        lambda: {"type": "string", "minLength": large, "maxLength": large},
        lambda: {"type": "string", "format": random.choice(("date-time", "uuid", "ipv6", "email", "regex", "x"))},
        lambda: {"type": random.choice(("integer", "number")), "minimum": large, "multipleOf": large},
        lambda: {"type": "integer", "multipleOf": random.randrange(1, 10 ** random.randrange(1, 9))},
        lambda: {"enum": [random.choice(HOSTILE) for _ in range(random.choice((0, 1, 3, 500)))]},
        lambda: {"const": random.choice(HOSTILE)},
        lambda: {random.choice(("anyOf", "oneOf", "allOf")): inner * random.choice((1, 1, 20))},
        lambda: {"not": inner[0]},
        lambda: {"if": inner[0], "then": inner[-1], "else": inner[0]},
        lambda: {
            "$defs": {"a": inner[0], "b": {"$ref": "#/$defs/a"}},
            "$ref": random.choice(("#/$defs/b", "#/x", "#")),
        },
        lambda: {"allOf": [{"multipleOf": n} for n in random.sample(range(2, 5000), random.choice((2, 8, 60)))]},
    )
    return random.choice(forms)()


def _pattern(random: Random) -> str:
    parts = (
        "a",
        ".",
        "[a-z]",
        "(a|b)",
        "(a|b)*",
        "a{2,9}",
        "a{1,5000}",
        "(a+)+",
        "\\d+",
        "^",
        "$",
        "(?=a)",
        "\\p{L}",
        "é",
    )
    return "".join(random.choices(parts, k=random.randrange(1, 9))) + random.choice(
        ("", "", "", "(", "[", "\\", "{9999999}")
    )


def _schema(random: Random) -> Request:
    made = schema(random)
    messages = [{"role": "user", "content": "x"}]
    paths: tuple[tuple[str, Any], ...] = (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 3,
         "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": made}}}),
        ("/completion", {"prompt": "x", "n_predict": 3, "json_schema": made}),
        ("/api/chat", {"messages": messages, "model": "demo", "format": made, "options": {"num_predict": 3}}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 3, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": made}}]}),
        ("/v1/messages", {"messages": messages, "model": "demo", "max_tokens": 3, "tool_choice": {"type": "any"},
         "tools": [{"name": "f", "input_schema": made}]}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3,
         "text": {"format": {"type": "json_schema", "name": "n", "schema": made}}}),
    )  # fmt: skip
    path, body = random.choice(paths)
    return post("schema", path, body)


def _grammar(random: Random) -> Request:
    names = ["root", *(f"r{i}" for i in range(random.choice((0, 1, 3, 30, 400))))]

    def item(depth: int = 0) -> str:
        if depth > 3:
            return '"a"'
        return random.choice(
            (
                lambda: random.choice(
                    ('"a"', '"\\n"', '"é"', "[a-z]", "[^\\]]", ".", '""', "[\\x00-\\xff]", '"' + "b" * 99 + '"')
                ),
                lambda: random.choice(names),
                lambda: f"({item(depth + 1)} | {item(depth + 1)})",
                lambda: item(depth + 1) + random.choice("*+?"),
                lambda: item(depth + 1) + random.choice(("{3}", "{0,9}", "{1,2000}", "{5,}", "{9999999999}", "{-1}")),
                lambda: random.choice(("nothing", "(", '"', "::=", "[", "# c\n", "<[5]>", "!<a>", "\x00")),
            )
        )()

    rules = [f"{name} ::= " + " ".join(item() for _ in range(random.choice((1, 2, 5)))) for name in names]
    text = "\n".join(rules) if random.random() < 0.9 else 'root ::= ("a" | "b")?' + ' ("a" | "b")?' * 800
    if random.random() < 0.1:
        text = random.choice(("start: ", "%llguidance {}\nstart: ", "root ::= root", "")) + text
    path, name = random.choice((("/completion", "n_predict"), ("/v1/chat/completions", "max_tokens")))
    asked = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "grammar": text, name: 3}
    asked.pop("messages" if path == "/completion" else "prompt")
    return post("grammar", path, asked)


# -- texts -------------------------------------------------------------------------------------------------------------


def _text(random: Random) -> Request:
    unit = random.choice(
        ("7", "a", " ", "\n", "é", "\U0001f600", "\u0300", "ab ", "<|im_end|>", "{{", "\x00", "\u202e", "'s", "1 ")
    )
    text = unit * random.choice((1, 50, 3000, 30_000, 400_000))
    paths: tuple[tuple[str, Any], ...] = (
        ("/tokenize", {"content": text}),
        ("/tokenize", {"content": [text[:2000], 5] * random.choice((1, 300))}),
        ("/completion", {"prompt": text, "n_predict": 2}),
        ("/completion", {"prompt": ["x", text[:3000]] * random.choice((1, 60)), "n_predict": 1}),
        ("/completion", {"prompt": "x", "n_predict": 2, "stop": [text[:20_000]] * random.choice((1, 20))}),
        ("/completion", {"prompt": "x", "n_predict": 2, "logit_bias": [[text[:20_000], 1]] * random.choice((1, 50))}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"model": "demo", "messages": [{"role": "user", "content": text}]}),
        ("/v1/embeddings", {"input": [text[:5000]] * random.choice((1, 40))}),
        ("/infill", {"input_prefix": text, "input_suffix": text[:100], "n_predict": 2}),
        ("/api/generate", {"model": "demo", "prompt": text, "options": {"num_predict": 2}}),
        ("/detokenize", {"tokens": [random.choice((0, 5, -1, 2**31, 4000))] * random.choice((1, 100_000))}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * random.choice((2, 500)),
         "max_tokens": 1, "user": text[:300], "service_tier": "priority", "n": random.choice((1, 2, 128, 10**6))}),
    )  # fmt: skip
    path, body = random.choice(paths)
    return post("text", path, body)


# -- raw bytes ------------------------------------------------------------------------------------------------------


def _wire(random: Random) -> Request:
    body = b'{"content":"hi"}'
    start = random.choice(
        (
            b"POST /tokenize HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n", b"GET /slots HTTP/1.0\r\n",
            b"PUT /props HTTP/1.1\r\n",
            b"POST /completion HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"GET http://evil.example/slots HTTP/1.1\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n", b"GET /%ff%00%0d%0aX:y HTTP/1.1\r\n",
            b"GET /health\r\n",
            b"GET /" + b"a" * random.choice((10, 70_000)) + b" HTTP/1.1\r\n", b"A" * 5000 + b" / HTTP/1.1\r\n",
            b"POST /slots/0?action=save HTTP/1.1\r\n", b"GET /../../etc/passwd HTTP/1.1\r\n",
            b"\x16\x03\x01\x02\x00" * 20,
        )
    )  # fmt: skip
    headers = [
        HOST, b"Content-Length: %d\r\n" % len(body), b"Transfer-Encoding: chunked\r\n", b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999999999999\r\n", b"Content-Length: 0x10\r\n", b"Host: evil.example\r\n",
        b"Expect: 100-continue\r\n", b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n", b"X: a\r\n" * 2000,
        b"Content-Encoding: gzip\r\n", b"X: " + b"a" * 70_000 + b"\r\n", b"X : a\r\n", b"X: a\r\n b\r\n",
        b"X: \x00\xff\r\n",
        b"Origin: http://evil.example\r\n", b"Transfer-Encoding: gzip, identity\r\n", b"Authorization: Bearer x\r\n",
        b"Range: bytes=0-\r\n", b"Cookie: a=b\r\n", b"Content-Type: multipart/form-data; boundary=x\r\n",
    ]  # fmt: skip
    chosen = [HOST] * (random.random() < 0.8) + random.choices(headers, k=random.randrange(5))
    ends = (body, b"", b"10\r\n" + body + b"\r\n0\r\n\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", body * 3,
            b"10;" + b"a" * 50_000 + b"\r\n" + body + b"\r\n0\r\n" + b"x: y\r\n" * 500 + b"\r\n", start)  # fmt: skip
    data = start + b"".join(chosen) + b"\r\n" + random.choice(ends)
    if random.random() < 0.1:
        data = data[: random.randrange(len(data) + 1)]
    return Request("wire", start.split(b" ")[1].decode("latin-1")[:40] if b" " in start else "", data, "wire")


MAKERS: dict[str, Callable[[Random], Request]] = {
    "body": _body, "raw": _raw, "schema": _schema, "grammar": _grammar, "text": _text, "wire": _wire,
}  # fmt: skip
WEIGHTS = {"body": 55, "raw": 8, "schema": 14, "grammar": 8, "text": 5, "wire": 10}
