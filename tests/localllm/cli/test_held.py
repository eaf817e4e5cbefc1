"""`run` with a JSON schema or a grammar: stdout matches the schema or grammar, and errors are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.localllm.support import Terminal, localllm

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}


@pytest.mark.parametrize("raw", [[], ["--raw"]], ids=["chat", "raw"])
def test_stdout_matches_the_schema(tmp_path: Path, raw: list[str]) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({**SCHEMA, "additionalProperties": False}))
    done = localllm("run", "demo", "How many?", "--json-schema", path, "-s", 1, "--temp", 1, *raw)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)) == ["n"]


@pytest.mark.parametrize(
    ("name", "source"),
    [("g.gbnf", 'root ::= "left" | "right"'), ("g.lark", 'start: "left" | "right"')],
)
def test_a_grammar_of_either_kind(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / name).write_text(source)
    done = localllm("run", "demo", "Where?", "--grammar", tmp_path / name)
    assert (done.returncode, done.stdout in ("left\n", "right\n")) == (0, True), done.stderr


def test_a_terminal_wraps_the_text_of_a_grammar_at_words() -> None:
    """Text under a grammar is wrapped at words, but not rendered as Markdown.

    JSON stays on one line, so that it can be copied.
    """
    text = "alpha bravo charlie delta **foxtrot**"
    terminal = Terminal("run", "demo", "Where?", "--grammar", f'start: "{text}"', columns=20)
    assert terminal.end() == 0
    assert terminal.written == "alpha bravo charlie\r\ndelta **foxtrot**\r\n"
    terminal = Terminal("run", "demo", "Where?", "--json-schema", json.dumps({"const": text}), columns=20)
    assert terminal.end() == 0
    assert terminal.written == f"{json.dumps(text)}\r\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--json-schema", "missing.json"], "missing.json"),
        (["--json-schema", "{]"], "not JSON"),
        (["--json-schema", '{"type": "foo"}'], "Invalid type: foo"),
        (["--grammar", "missing.gbnf"], "missing.gbnf"),
        (["--grammar", "root ::= foo"], "foo"),
        (["--grammar", 'root ::= "a"', "--json-schema", "{}"], "both given"),
        (["--think", "much"], "on, off, low, medium, high"),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], told: str) -> None:
    done = localllm("run", "demo", "x", *options)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert told in line
