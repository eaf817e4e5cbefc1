"""Each API's answers to the same scripted generations, byte for byte, whole and streamed.

A file of `exchanges/` has the requests to one API:

    == A title
    POST /v1/completions {"prompt": "Once"} <- hello
    200 application/json
    {"id":"cmpl-ID", ...}

"hello" names the generation in `SCRIPTS`. Ids, times and the version are replaced. Long lines of a response are wrapped
after a comma, blank lines between events are left out, and "…" stands for fields that the event before has, too. After
an intended change, write the files again and read the difference:

    python -m tests.localllm.server.test_exchanges
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from localllm import __version__
from localllm.base.errors import LocalLLMError
from localllm.generation.parts import Content
from localllm.generation.request import Prefilled, Started
from localllm.server.errors import PromptTooLong
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService, Step, called, done, likely, said, script, thought, wrote

FOLDER = Path(__file__).with_name("exchanges")
WIDTH = 116
SAME = 30  # characters of a run of fields that is left out
MASKS = (
    (re.compile(r"\b(chatcmpl|cmpl|resp|msg|rs|fc|ctc)([-_])[0-9a-f]{32}"), r"\1\2ID"),
    (re.compile(r'"(created|created_at|completed_at|total_duration|load_duration)":\d+'), r'"\1":0'),
    (re.compile(r'"time_ms":\d+'), '"time_ms":0'),
    (re.compile(r'"created_at":"[^"]*Z"'), '"created_at":"TIME"'),
    (re.compile(r'"timings":\{[^}]*\}'), '"timings":{}'),
    (re.compile(re.escape(__version__)), "VERSION"),
)


def scored(completion: Any) -> list[Step]:
    """Script the answer "!" with log probabilities for "!" and, with echo, for each prompt token after the first."""
    prompt = list(completion.prompt)
    known = tuple(likely(token, -float(token), ((token, -float(token)),)) for token in prompt[1:])
    mark = ord("!")
    return [
        Started(len(prompt), 0),
        Prefilled(len(prompt), logprobs=known if completion.echo_logprobs else ()),
        wrote((Content("!"),), mark, likely(mark, -0.5, ((66, -0.25), (mark, -0.5)))),
        done(prompt=len(prompt), reused=0, answer_tokens=1),
    ]


def two(asked: Any) -> list[Step]:
    """Script two choices, whose texts name their prompt."""
    text = getattr(asked, "prompt", "")
    return [
        Started(5, 2),
        Started(5, 5, choice=1),
        *said(f"{text}1", choice=1),
        *said(f"{text}0"),
        done(answer_tokens=1),
        done("length", reused=5, answer_tokens=1, choice=1),
    ]


SCRIPTS: dict[str, Sequence[Step] | Callable[[Any], Sequence[Step]]] = {
    "hello": script("Hel", "", "lo"),
    "tools": [
        Started(20, 12), Prefilled(20), *thought("I ", "add"), *said("No", "w"),
        *called("add", '{"a":', "1}", id="c1"), *called("patch", '{"inp', 'ut": "x\\n"}', index=1, id="c2"),
        done("tool_calls", 20, 12, answer_tokens=9),
    ],
    "only a call": [Started(5, 0), *called("add"), done("tool_calls")],
    "half a call": [Started(5, 0), *called("add", '{"a": [1, '), done("length")],
    "namespace": [Started(5, 0), *called("files__read", "{}"), *called("files__write", "x", index=1), done()],
    "nothing": [Started(5, 0), done(answer_tokens=0)],
    "too long": script("a", reason="length"),
    "cancelled": script("a", reason="cancelled"),
    "END": [Started(5, 2), *said("a"), done("stop", stop="END")],
    "template's stop": [Started(5, 2), *said("a"), done("stop", stop="<|template|>")],
    "two": two,
    "scored": scored,
    # two tokens form one character, and the text of the last one is held back as a possible stop string
    "logprobs": [
        Started(5, 0),
        wrote((), 0xC3, likely(0xC3, -0.5, ((0xC3, -0.5), (65, -1.0)))),
        wrote((Content("ü"),), 0xBC, likely(0xBC, -0.25, ((0xBC, -0.25), (66, -math.inf)))),
        wrote((), 67, likely(67, math.log(0.5), ())),
        done(answer_tokens=3),
    ],
    "held back": [Started(5, 0), *said("a"), wrote((), 9), done(last=[Content("bc\n")])],
    "no room": [PromptTooLong("the prompt has 900 tokens; the context has 512", 900, 512)],
    "slow": [Started(100, 20), Prefilled(64), Prefilled(100), *said("a", "b"), done(prompt=100, reused=20)],
    "fails early": [Started(5, 0), Prefilled(3), LocalLLMError("the schema is wrong")],
    "fails": [Started(5, 0), *said("a"), LocalLLMError("the schema is wrong")],
    "has a bug": [Started(5, 0), ValueError("a secret")],
}  # fmt: skip


class Exchange(NamedTuple):
    """A request, the name of the generation that answers it, and the response as text."""

    title: str
    path: str
    body: Any
    script: str
    response: str

    def answer(self) -> str:
        """Send the request, and return the response as text."""
        service = ScriptedService(SCRIPTS[self.script])
        response = call(service, self.path, self.body)
        text = response.text.replace("\n\n", "\n").rstrip("\n")
        for pattern, mask in MASKS:
            text = pattern.sub(mask, text)
        events = text.split("\n")
        lines = [line for number, each in enumerate(events) for line in wrapped(shortened(each, events[:number]))]
        kind = response.headers["content-type"].partition(";")[0]
        return "\n".join([f"{response.status_code} {kind}", *lines])

    def __str__(self) -> str:
        request = f"POST {self.path} {json.dumps(self.body)} <- {self.script}"
        return f"== {self.title}\n{request}\n{self.response}\n"


def shortened(line: str, before: Sequence[str]) -> str:
    """Return an event with "…" for runs of fields that the event before has, too."""
    kind, data = ("data: ", line.removeprefix("data: ")) if line.startswith("data: ") else ("", line)
    last = next((each for each in reversed(before) if each.startswith(kind + "{")), "")
    old, new = last.removeprefix(kind).split(","), data.split(",")
    kept, at = [kind], 0
    for _, start, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        if len(",".join(new[start : start + size])) > SAME:
            kept += [*(field + "," for field in new[at:start]), "…,"]
            at = start + size
    return "".join([*kept, ",".join(new[at:])])


def wrapped(line: str) -> list[str]:
    """Return the parts of a line, broken after commas."""
    found = []
    while len(line) > WIDTH:
        at = line.rfind(",", 1, WIDTH) + 1 or WIDTH
        found.append(line[:at])
        line = line[at:]
    return [*found, line]


def exchanges(path: Path) -> list[Exchange]:
    """Return the exchanges in a file."""
    found = []
    for block in path.read_text(encoding="utf-8").split("== ")[1:]:
        title, request, *response = block.rstrip("\n").split("\n")
        sent, script = request.rsplit(" <- ", 1)
        _, place, body = sent.split(" ", 2)
        found.append(Exchange(title, place, json.loads(body), script, "\n".join(response)))
    return found


CASES = [pytest.param(each, id=f"{path.stem}: {each.title}") for path in FOLDER.glob("*") for each in exchanges(path)]


@pytest.mark.parametrize("exchange", CASES)
def test_the_bytes_of_an_answer(exchange: Exchange) -> None:
    assert exchange.answer() == exchange.response


def test_every_script_is_answered() -> None:
    assert {case.values[0].script for case in CASES} == set(SCRIPTS)  # type: ignore[union-attr]


if __name__ == "__main__":
    for file in FOLDER.glob("*"):
        made = [each._replace(response=each.answer()) for each in exchanges(file)]
        file.write_text("\n".join(map(str, made)), encoding="utf-8")
