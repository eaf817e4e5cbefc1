"""Give the bundled demo model held-out tasks and tool requests, and count exact answers.

    python benchmarks/demo/measure.py [--count 500] [--texts FOLDER]

Answers are greedy. A task counts as solved if the answer is the expected text. Lists and sentences are excluded,
because they have many correct answers. A tool call is well-formed if it is JSON with a name and arguments between the
tags. The program also counts calls of defined names, and calls that equal the expected JSON. Tasks are drawn with a
seed that training does not use, but most facts in them (capitals, opposites) also occur in the training text, in other
words or order.
"""

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import tasks
from corpus import Corpus
from tools import TOOLS, exchange, with_names

import localllm

HERE = Path(__file__).parent
SEED = 12345
CALLS = ("calls in form", "calls by a defined name", "right calls")
MANY_RIGHT = (tasks.short_list, tasks.sentence_with)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="tasks; a fifth as many calls")
    parser.add_argument("--texts", type=Path, default=HERE.parents[2] / "shared/data/text")
    parser.add_argument("--model", default="demo")
    asked = parser.parse_args()
    rng, sentences = random.Random(SEED), Corpus(asked.texts, HERE).sentences
    total, right = Counter[str](), Counter[str]()
    with localllm.load(asked.model) as model:

        def answer(question: str, tools: list[dict[str, Any]] | None = None) -> str:
            pieces = model.chat(question, temperature=0, max_tokens=120, tools=tools)
            return "".join(piece.text for piece in pieces).strip()

        makers, weights = zip(*[pair for pair in tasks.MAKERS if pair[0] not in MANY_RIGHT], strict=True)
        for _ in range(asked.count):
            (maker,) = rng.choices(makers, weights)
            question, expected = maker(rng, sentences)
            kind = maker.__name__ if maker.__name__ != "make" else "words and facts"
            total[kind] += 1
            right[kind] += _same(answer(question), expected)
        for _ in range(asked.count // 5):
            named = [with_names(tool, rng) for tool in rng.sample(TOOLS, 2)]
            turns = exchange(rng.choice(named), rng)
            offered = [{"type": "function", "function": each.definition()} for each in named]
            said = answer(turns[0][1], offered)
            call, wanted = _called(said), _called(turns[1][1])
            total += Counter(CALLS)
            if isinstance(call, dict) and isinstance(call.get("arguments"), dict):
                right["calls in form"] += 1
                right["calls by a defined name"] += call.get("name") in [each.name for each in named]
                right["right calls"] += call == wanted
    for kind, count in sorted(total.items()):
        print(f"{kind:24} {right[kind]:4} of {count:4}")
    tasks_right = sum(count for kind, count in right.items() if kind not in CALLS)
    print(f"{'all tasks':24} {tasks_right:4} of {asked.count:4}")


def _same(answer: str, expected: str) -> bool:
    """Return whether two answers agree. If an answer has several forms, only its last words and numbers count."""
    return _plain(answer) == _plain(expected) or _core(answer) == _core(expected)


def _plain(text: str) -> str:
    return " ".join(text.lower().strip(" .!\"'").split())


def _core(text: str) -> str:
    """Return the essential part of "The capital of X is Y." or "a plus b is c": Y or c."""
    found = re.search(r"(?:is|called a|rhymes with|says|has|means) (\"?[\w ]+\"?)[.!]?$", _plain(text))
    return found.group(1).strip('" ') if found else _plain(text).strip('" ')


def _called(text: str) -> object:
    found = re.search(r"<tool_call>\s*(\{.*\})\s*</tool_call>", text, re.DOTALL)
    try:
        return json.loads(found.group(1)) if found else None
    except ValueError:
        return None


if __name__ == "__main__":
    main()
