"""Estimate an upper bound for the speedup of tree speculation: several candidates per position, verified in one step.

    python benchmarks/speculation_tree.py TARGET DRAFT

Measures the rank of the target's greedy tokens among the draft's tokens, and the time of forward passes of 1 to 16
tokens and of a draft's forward pass. Every node of a tree is assumed to be accepted at the measured rates. A chain of k
drafts costs k forward passes of the draft. A tree of the same depth costs the same number of forward passes, with more
tokens each. The cost of the additional tokens, of masked attention and of moving the accepted branch in the cache is
ignored, so the result is an upper bound.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import localllm
from localllm.generation.speculation.costs import VERIFYING, measure_costs
from localllm.model import Model

from compare import RESULTS, machine  # isort: skip
from speculation_pair import PROMPTS  # isort: skip

RANKS = 4


def shares(target: Model, draft: Model, tokens: int) -> list[float]:
    """Return how often the target's greedy token is the draft's top token, its second token, and so on up to RANKS."""
    counts, seen = np.zeros(RANKS), 0
    for prompt in PROMPTS.values():
        ids = target.tokenize(prompt, parse_special=True)
        said = target.generate(ids, max_tokens=tokens, ignore_eos=True, temperature=0).tokens
        rows = draft.logits(ids + said)[len(ids) - 1 : -1]
        rank = (rows > rows[np.arange(len(said)), said][:, None]).sum(axis=1)
        counts += [(rank == r).sum() for r in range(RANKS)]
        seen += len(said)
    return (counts / seen).tolist()


def grow(by_rank: list[float], nodes: int) -> tuple[float, int]:
    """Return (expected tokens per forward pass, depth) of the best tree with this number of nodes."""
    heap, expected, depth = [(-share, 1) for share in by_rank], 1.0, 0
    heapq.heapify(heap)
    for _ in range(nodes):
        value, level = heapq.heappop(heap)
        expected, depth = expected - value, max(depth, level)
        for share in by_rank:
            heapq.heappush(heap, (value * share, level + 1))
    return expected, depth


def best(by_rank: list[float], seconds: Callable[[int], float], step: float) -> tuple[float, int, int]:
    """Return (speedup over plain, nodes, depth) for the best number of tree nodes."""
    found = []
    for nodes in range(16):
        expected, depth = grow(by_rank, nodes)
        found.append((expected * seconds(1) / (seconds(nodes + 1) + depth * step), nodes, depth))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("-n", "--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=RESULTS / "speculation_tree.jsonl")
    arguments = parser.parse_args()
    with (
        localllm.load(arguments.target, ctx_size=1024) as target,
        localllm.load(arguments.draft, ctx_size=1024) as draft,
    ):
        costs = measure_costs(target.engine, target.vocabulary, VERIFYING)
        step = measure_costs(draft.engine, draft.vocabulary).seconds(1)
        by_rank = shares(target, draft, arguments.tokens)
    chain, tree = (best(ranks, costs.seconds, step) for ranks in (by_rank[:1], by_rank))
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": Path(arguments.target).stem,
        "shares_by_rank": by_rank,
        "ms_of_rows": [round(1e3 * costs.seconds(n), 2) for n in range(1, 17)],
        "ms_of_draft": round(1e3 * step, 2),
        "chain_speedup_nodes_depth": chain,
        "tree_speedup_nodes_depth_at_most": tree,
        "machine": machine(),
    }
    with arguments.out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(f"{result['target']}: shares {[round(s, 3) for s in by_rank]}, chain x{chain[0]:.2f} ({chain[1]} guesses), "
          f"tree at most x{tree[0]:.2f} ({tree[1]} nodes, depth {tree[2]})")  # fmt: skip


if __name__ == "__main__":
    main()
