"""Measure a chat of many turns: tokens evaluated and time to first token per turn, with and without prefix reuse.

    python benchmarks/long_chat.py [MODEL] [--turns 50] [-c 1024] [-n 16] [-t 2]

The template renders the whole conversation every turn. `new` counts the tokens that are in no earlier turn: the
question and the template's text around it. `evaluated` counts the tokens that are computed. The two differ by one after
an answer that was cut at its maximum length, because its last token was sampled but not computed. When the context is
full, the oldest turns are dropped, even in the middle of an answer, and the remaining turns are evaluated again; that
turn has two prompts. After each turn a second session evaluates the same prompt from scratch. One JSON line goes to
benchmarks/results/long_chat.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from compare import RESULTS, machine

import localllm
from localllm.chat import Conversation, template_of
from localllm.options import AnswerOptions

QUESTIONS = (
    "Hello! How are you today?",
    "I want to book a table for two in San Jose.",
    "Italian food, please.",
    "At 7 pm tomorrow.",
    "What will the weather be like in London?",
    "Tell me a story about a bird.",
    "Thank you. Is there a movie I could watch?",
    "Find me a song by Queen, please.",
)


def chat(model: localllm.Model, turns: int, answer: int) -> list[dict[str, Any]]:
    """Return one result row per turn."""
    notes: list[str] = []
    sampling = localllm.SamplingOptions(temperature=0.5, seed=1)
    conversation = Conversation(
        model, template_of(model)[0], sampling, notes.append, AnswerOptions(max_tokens=answer), context_shift=True
    )
    rows: list[dict[str, Any]] = []
    held = 0
    for question in islice(cycle(QUESTIONS), turns):
        shifts = len(notes)
        reply = conversation.say(question)
        usage = reply.usage
        shifted = len(notes) > shifts
        evaluated = usage.prompt_tokens - usage.reused_tokens
        prompt = conversation.tokens[: usage.prompt_tokens]
        rows.append(
            {
                "prompt": usage.prompt_tokens,
                "new": evaluated if shifted else usage.prompt_tokens - held,
                "evaluated": evaluated,
                "answer": usage.answer_tokens,
                "first_token_seconds": usage.first_token_seconds,
                "cold_seconds": cold(model, prompt),
                "shifted": shifted,
            }
        )
        held = len(conversation.tokens) + (reply.end.reason == "length")  # the answer's last token is not computed
    return rows


def cold(model: localllm.Model, prompt: list[int]) -> float:
    """Return the seconds to evaluate a prompt with an empty KV cache."""

    def evaluate() -> float:
        session = model.session()
        start = perf_counter()
        for at in range(0, len(prompt), model.batch_rows):
            session.evaluate(prompt[at : at + model.batch_rows], logits=False)
        seconds = perf_counter() - start
        session.close()
        return seconds

    return model.exclusively(len(prompt), evaluate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("-c", "--context", type=int, default=1024)
    parser.add_argument("-n", "--answer", type=int, default=16)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=RESULTS / "long_chat.jsonl")
    arguments = parser.parse_args()
    # Twice the context leaves room for the second session; the conversation is limited to `context`.
    with localllm.load(arguments.model, threads=arguments.threads, ctx_size=2 * arguments.context + 64) as model:
        model.context = arguments.context
        rows = chat(model, arguments.turns, arguments.answer)
        name = model.file.path.name
    row = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": name,
        "threads": arguments.threads,
        "context": arguments.context,
        "turns": rows,
        "machine": machine(),
    }
    with arguments.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    print("turn  prompt   new  evaluated  answer  first token  from nothing")
    for number, r in enumerate(rows, 1):
        print(
            f"{number:4}  {r['prompt']:6}  {r['new']:4}  {r['evaluated']:9}  {r['answer']:6}  "
            f"{1000 * r['first_token_seconds']:8.1f} ms  {1000 * r['cold_seconds']:9.1f} ms"
            f"{'  the oldest turns were dropped' if r['shifted'] else ''}"
        )
    prompts, evaluated, new = (sum(r[key] for r in rows) for key in ("prompt", "evaluated", "new"))
    later = [r for r in rows[1:] if not r["shifted"]]
    over = sorted({r["evaluated"] - r["new"] for r in later})
    print(f"{evaluated} of {prompts} prompt tokens evaluated ({evaluated / prompts:.1%}); {new} were new")
    print(f"evaluated beyond what is new, a turn without a shift: {', '.join(map(str, over))} tokens")
    first, nothing = (median(r[key] for r in later) for key in ("first_token_seconds", "cold_seconds"))
    print(f"first token: median {1000 * first:.1f} ms, from nothing {1000 * nothing:.1f} ms, {nothing / first:.1f}x")


if __name__ == "__main__":
    main()
