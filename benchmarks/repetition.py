"""Replay texts through the drafts from repetitions: how many are accepted, and how often by class of draft.

    python benchmarks/repetition.py [--classes]

The texts are this repository's: `edit` is a file before a commit as the prompt and the file after it as the answer,
`code` and `docs` are the two halves of a file. `again` drafts from eight earlier answers, which are files before a
commit. The file after one of the commits is replayed, and its first token is the prompt. Answers are replayed, not
generated, so no model runs and the counts are the same on every computer. The speedup assumes the measured costs of a
1B-class Q4_0 model's passes. Results are appended to benchmarks/results/repetition.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import localllm
from localllm.generation.speculation.earlier import EarlierAnswers, Following
from localllm.generation.speculation.policy import Acceptance
from localllm.generation.speculation.suffixes import PRIORS, SuffixDrafter
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler

from compare import RESULTS  # isort: skip

ROOT = Path(__file__).resolve().parent.parent
SAMPLER = Sampler(SamplingOptions())
LONGEST = 15
PASS = (1, 1.12, 1.25, 1.4, 1.55, 1.7, 1.85, 2.0, 2.15, 2.3, 2.45, 2.6, 2.75, 2.9, 3.05, 3.2)  # of 1, 2, ... rows
EACH = 40  # texts of a kind


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, errors="replace").stdout


def edits(chosen: random.Random) -> Iterator[tuple[str, str]]:
    """Yield a file before and after a commit."""
    commits = git("log", "--format=%h", "-n", "400").split()
    for commit in chosen.sample(commits, len(commits)):
        names = git("diff-tree", "--no-commit-id", "-r", "--name-only", "--diff-filter=M", commit).splitlines()
        names = [name for name in names if name.endswith((".py", ".md"))]
        if names:
            name = chosen.choice(names)
            before, after = git("show", f"{commit}^:{name}"), git("show", f"{commit}:{name}")
            if 500 < len(after) < 9000 and len(before) < 12000:
                yield before, after


def halves(pattern: str, chosen: random.Random) -> Iterator[tuple[str, str]]:
    """Yield the two halves of a file."""
    names = git("ls-files", pattern).split()
    for name in chosen.sample(names, len(names)):
        text = (ROOT / name).read_text(errors="replace")
        if 4000 < len(text) < 30000:
            yield text[: len(text) // 2], text[len(text) // 2 :][:4000]


def replay(
    prompt: list[int], answer: list[int], seen: list[list[int]], earlier: EarlierAnswers | None = None
) -> dict[str, float]:
    """Return the tokens, drafts, accepted drafts and cost of an answer, and count in `seen` by class of draft."""
    drafter = SuffixDrafter(prompt, Following(earlier, prompt) if earlier is not None else None)
    acceptance = Acceptance(PRIORS)
    total = {"tokens": len(answer), "drafted": 0, "accepted": 0, "cost": 0.0}
    at = 0
    while at < len(answer):
        drafts = list(islice(drafter.propose(SAMPLER, drafter.behind), LONGEST))
        verified, best, won, stands = 0, 0.0, 0.0, 1.0
        for count, draft in enumerate(drafts, 1):
            stands *= acceptance.expect(draft.trust)
            won += stands
            if (gain := won - (PASS[count] - PASS[0])) > best:
                verified, best = count, gain
        right = 0
        for draft, token in zip(drafts, answer[at:], strict=False):
            acceptance.observe(draft.trust, float(draft.token == token))
            seen[draft.trust][draft.token == token] += 1
            if draft.token != token:
                break
            right += 1
        accepted = min(right, verified)
        total["drafted"] += verified
        total["accepted"] += accepted
        total["cost"] += PASS[verified]
        for token in answer[at : at + accepted + 1]:
            drafter.accept(token)
        at += accepted + 1
    return total


def again(texts: list[tuple[list[int], list[int]]], seen: list[list[int]]) -> list[dict[str, float]]:
    """Replay the second text of each pair after an automaton has seen the first texts of eight pairs."""
    found = []
    for at, (_, answer) in enumerate(texts):
        earlier = EarlierAnswers(1 << 20)
        for number in range(at, at + 8):
            earlier.add(texts[number % len(texts)][0], 0)
        while earlier.waiting:
            earlier.index()
        found.append(replay(answer[:1], answer[1:], seen, earlier))
    return found


def summed(found: list[dict[str, float]]) -> dict[str, float]:
    total = {name: sum(each[name] for each in found) for name in found[0]}
    speedup = round(total["tokens"] / total["cost"], 3)
    return total | {"texts": len(found), "cost": round(total["cost"], 1), "speedup": speedup}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", action="store_true", help="show the acceptance rate of each class of drafts")
    options = parser.parse_args()
    chosen = random.Random(5)
    texts = {"edit": edits(chosen), "code": halves("*.py", chosen), "docs": halves("*.md", chosen)}
    seen = [[0, 0] for _ in PRIORS]
    row: dict[str, object] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD").strip(),
    }
    with localllm.load("demo") as model:
        for kind, pairs in texts.items():
            tokens = [(model.tokenize(a), model.tokenize(b)) for a, b in islice(pairs, EACH)]
            row[kind] = summed([replay(a, b, seen) for a, b in tokens])
            if kind == "edit":
                row["again"] = summed(again(tokens, seen))
    for kind in ("edit", "again", "code", "docs"):
        print(kind, row[kind])
    if options.classes:
        for number, (wrong, right) in enumerate(seen):
            print(number, right + wrong, round(right / max(right + wrong, 1), 2), PRIORS[number])
    with (RESULTS / "repetition.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
