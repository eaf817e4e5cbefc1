"""Attacks for neighbours_attacked.py: requests of one client that make a server's other clients wait.

An attack is a list of simultaneous requests, or of connections that are held open. Names begin with the kind: `text`
(large texts and lists), `grammar`, `schema`, `regex`, `queue` (many answers) and `wire` (connections).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any] | bytes
HELLO = [{"role": "user", "content": "a"}]
STORY = {"max_tokens": 900, "ignore_eos": True}

megabytes = 30.0  # size of a large text in MB, set by a command line option


@dataclass(frozen=True, slots=True)
class Sent:
    """Requests that are sent at once, each as (path, body).

    `pause` is the time between two requests in seconds.
    """

    requests: Callable[[], Iterator[tuple[str, Body]]]
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """Connections on which only the given bytes are sent."""

    count: int
    data: bytes = b""


def one(path: str, make: Callable[[], Body]) -> Sent:
    return Sent(lambda: iter([(path, make())]))


def chat(**fields: Any) -> Sent:
    return one("/v1/chat/completions", lambda: {"messages": HELLO, "max_tokens": 40, "temperature": 1, **fields})


def long_text(unit: str) -> str:
    return unit * (int(megabytes * 1_000_000) // len(unit.encode()))


def many(count: int, **fields: Any) -> Sent:
    """Return requests for long answers.

    A number is appended to `user`, so that every request names a different user.
    """

    def requests() -> Iterator[tuple[str, Body]]:
        for number in range(count):
            more = {name: f"{value}{number}" if name == "user" else value for name, value in fields.items()}
            story = [{"role": "user", "content": f"tell story {number}"}]
            yield "/v1/chat/completions", {"messages": story, **STORY, **more}

    return Sent(requests)


# -- texts -----------------------------------------------------------------------------------------------------------

TEXTS = {
    "words": "hello world this is text ", "a": "a", "digits": "1234567890", "han": "漢字", "spaces": " ",
    "marks": "<|im_end|>", "half marks": "<|im_", "lines": "\n",
}  # fmt: skip
DIGITS = "1234567890"
INPUTS: dict[str, Sent] = {
    f"text tokenize {name}": one("/tokenize", lambda unit=unit: {"content": long_text(unit)})  # type: ignore[misc]
    for name, unit in TEXTS.items()
} | {
    "text tokenize pieces": one("/tokenize", lambda: {"content": "hello world " * 800_000, "with_pieces": True}),
    "text tokenize list": one("/tokenize", lambda: {"content": ["hello "] * 999_000 + [1]}),
    "text tokenize ids": one("/tokenize", lambda: b'{"content":[' + b"1," * 1_990_000 + b"1]}"),
    "text detokenize": one("/detokenize", lambda: {"tokens": [5] * 999_000}),
    "text completion": one("/completion", lambda: {"prompt": long_text(DIGITS), "n_predict": 1}),
    "text completion list": one("/completion", lambda: {"prompt": [long_text(DIGITS), 1], "n_predict": 1}),
    "text completions": one("/v1/completions", lambda: {"prompt": [long_text(DIGITS)], "max_tokens": 1}),
    "text prompts": one("/completion", lambda: {"prompt": ["hi"] * 1024, "n_predict": 1}),
    "text prompts openai": one("/v1/completions", lambda: {"prompt": ["hi"] * 1000, "max_tokens": 1}),
    "text bias": chat(logit_bias=[["1234567890" * 400_000, 1]]),
    "text biases": one("/completion", lambda: {"prompt": "a", "n_predict": 1,
                                               "logit_bias": [["hello world " * 250, 1.0]] * 9999}),
    "text infill": one("/infill", lambda: {"input_prefix": long_text(DIGITS), "input_suffix": ""}),
    "text infill files": one("/infill", lambda: {
        "input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "f", "text": "t" * 30}] * 50_000}),
    "text count": one("/v1/messages/count_tokens", lambda: {
        "model": "x", "messages": [{"role": "user", "content": long_text(DIGITS)}]}),
    "text messages": one("/v1/chat/completions", lambda: {"messages": HELLO * 99_999, "max_tokens": 1}),
    "text messages anthropic": one("/v1/messages", lambda: {
        "model": "x", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 50}]
        * 2000}),
    "text messages ollama": one("/api/chat", lambda: {"model": "x", "messages": HELLO * 99_999, "stream": False}),
    "text messages responses": one("/v1/responses", lambda: {"input": HELLO * 99_999, "max_output_tokens": 1}),
    "text parts": one("/v1/chat/completions", lambda: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 99_999}], "max_tokens": 1}),
    "text template": one("/apply-template", lambda: {"messages": [{"role": "user", "content": "a" * 40}] * 99_999}),
    "text variables": chat(chat_template_kwargs={f"k{n}": "x" * 200 for n in range(100_000)}),
    "text variables deep": chat(chat_template_kwargs={"messages": [{"role": "user", "content": "x" * 100}] * 50_000}),
    "text tools": chat(tools=[{"type": "function", "function": {"name": f"f{n}", "description": "x" * 10_000}}
                              for n in range(2000)]),
    "text stops": chat(stop=["x" * 990 + str(n) for n in range(128)]),
    "text breakers": one("/completion", lambda: {
        "prompt": "ab " * 300, "n_predict": 300, "dry_multiplier": 1, "ignore_eos": True,
        "dry_sequence_breakers": ["x" * 900 + str(n) for n in range(256)]}),
    "text logprobs": one("/completion", lambda: {"prompt": "hi", "n_predict": 1000, "n_probs": 100,
                                                 "ignore_eos": True}),
    "text context": one("/api/generate", lambda: {"model": "x", "prompt": "hi", "context": [1] * 999_000,
                                                  "stream": False}),
    "text keys": one("/tokenize", lambda: json.dumps(dict.fromkeys((f"k{n}" for n in range(900_000)), 1)).encode()),
    "text quotes": one("/tokenize", lambda: b'{"content":"' + b'\\"' * 15_000_000 + b'"}'),
    "text 16 at once": Sent(lambda: (("/tokenize", {"content": long_text(DIGITS)}) for _ in range(16))),
}  # fmt: skip


# -- grammars --------------------------------------------------------------------------------------------------------


def schema(value: Any) -> Sent:
    return chat(**schema_fields(value))


def schema_fields(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}}


def rules(count: int) -> str:
    """Return a chain of grammar rules. Each rule refers to the next rule three times."""
    return "\n".join(
        ["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1} | r{n + 1}" for n in range(count)), f'r{count} ::= "a"']
    )


def objects(make: Callable[[int], Any], count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"n{n}": make(n) for n in range(count)}}


NUMBERS = objects(lambda n: {"type": "integer", "minimum": -n * 123456789, "multipleOf": 997 + n}, 800)
ONES = {"allOf": [{"oneOf": [{"type": "object", "properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]}
                             for j in range(6)]} for i in range(12)]}  # fmt: skip
GRAMMARS: dict[str, Sent] = {
    "grammar rules": chat(grammar=rules(1500)),
    "grammar choices": chat(grammar="root ::= " + " ".join('("a"|"b")?' for _ in range(5000))),
    "grammar classes": chat(grammar="root ::= x*\nx ::= " + " | ".join(
        f"[{chr(0x4E00 + n)}-{chr(0x4E00 + n + 5000)}]" for n in range(3000))),
    "grammar stars": chat(grammar="root ::= " + " ".join(f"r{n}*" for n in range(1000)) + "\n" + "\n".join(
        f'r{n} ::= "{n}" | r{(n + 1) % 1000}*' for n in range(1000))),
    "grammar nested": chat(grammar="root ::= " + "(" * 60 + '"a"' + ")*" * 60),
    "grammar long": chat(grammar='root ::= "' + "a" * 60_000 + '"'),
    "grammar terminals": chat(guided_grammar="start: " + " | ".join(f"T{n}" for n in range(1500)) + "\n" + "\n".join(
        f"T{n}: /.*[a-z]{{{n % 30 + 1}}}x{n}/" for n in range(1500))),
    "grammar powers": chat(guided_grammar="start: A\n" + "\n".join(
        f"{chr(65 + n)}: {chr(66 + n)} {chr(66 + n)} {chr(66 + n)}" for n in range(24)) + "\nY: /a|b/"),
    "grammar chain": chat(guided_grammar="start: r0\n" + "\n".join(
        f"r{n}: r{n + 1} r{n + 1} | r{n + 1}" for n in range(1500)) + '\nr1500: "a"'),
    "regex repeats": chat(guided_regex="a{1000000000}"),
    "regex repeats later": chat(guided_regex="(b|c)a{1000000000}"),
    "regex options": chat(guided_regex="".join(f"({chr(97 + n % 26)}{{0,100}})?" for n in range(4000))),
    "regex states": chat(guided_regex="(.*a.{30}|.*b.{31}|.*c.{29}|.*d.{28})x"),
    "regex classes": chat(guided_regex="([" + "".join(chr(0x4E00 + 3 * n) for n in range(6000)) + "]{1,99}){1,99}"),
    "regex cases": chat(guided_regex="(?i)" + "k" * 60_000),
    "schema numbers": schema(NUMBERS),
    "schema floats": schema(objects(
        lambda n: {"type": "number", "minimum": -n * 1.2345e-7, "maximum": 10.0 ** (n % 300),
                   "multipleOf": 0.00001}, 800)),
    "schema patterns": schema(objects(
        lambda n: {"type": "string", "pattern": f"^([a-z]{{1,{n + 1}}}|[0-9]*{n})+$"}, 900)),
    "schema enums": schema({"type": "array", "items": {"enum": list(range(-20_000, 20_000, 3))}}),
    "schema ones": schema(ONES),
    "schema multiples": schema({"type": "integer", "allOf": [{"multipleOf": n} for n in (99991, 99989, 99971)]}),
    "schema definitions": schema({"$ref": "#/$defs/d0", "$defs": {
        f"d{n}": objects(lambda m, n=n: {"$ref": f"#/$defs/d{(n * 7 + m + 1) % 400}"}, 8)  # type: ignore[misc]
        for n in range(400)}}),
    "schema tools": chat(tool_choice="required", tools=[
        {"type": "function", "function": {"name": f"f{n}", "parameters": ONES}} for n in range(20)]),
    "grammar 40 at once": Sent(lambda: (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9, "grammar": rules(1460 + n)}) for n in range(40))),
    "schema 40 at once": Sent(lambda: (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9, **schema_fields(
            objects(lambda m, n=n: {"type": "integer", "multipleOf": 997 + m + n}, 800))})  # type: ignore[misc]
        for n in range(40))),
    "regex 40 at once": Sent(lambda: (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9, "guided_regex": f"(b|c)a{{{10**9 + n}}}"})
        for n in range(40))),
}  # fmt: skip


# -- the queue, and connections --------------------------------------------------------------------------------------

QUEUE: dict[str, Sent] = {
    "queue plain": many(60),
    "queue users": many(60, user="u"),
    "queue priority": many(60, service_tier="priority"),
    "queue n of 4": many(60, n=4),
    "queue n of 128": Sent(many(6, n=128).requests, 0.15),
    "queue long prompts": Sent(lambda: (
        ("/v1/completions", {"prompt": f"{n} " * 480, **STORY, "cache_prompt": False}) for n in range(60))),
}  # fmt: skip
WIRE: dict[str, Held] = {
    "wire silent": Held(1100),
    "wire half header": Held(1100, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "),
    "wire half body": Held(1100, b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"),
}
ATTACKS: dict[str, Sent | Held] = {**INPUTS, **GRAMMARS, **QUEUE, **WIRE}
