"""Placements of layers on nodes are the best of all possible placements."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from localllm.backends.base import F16_CACHE
from localllm.cluster.cut import cut_at
from localllm.cluster.errors import ClusterError
from localllm.cluster.sizing import Node, Placement, Sizes, place
from localllm.engine.cache_types import cache_bytes
from localllm.gguf import open_gguf
from localllm.loading.loader import limits_of
from localllm.loading.recording import Recording
from localllm.loading.resolve import resolve
from localllm.plan import summarize

HOP = 0.002


def every(sizes: Sizes, nodes: list[Node], stages: int | None) -> list[tuple[float, float, Placement]]:
    """Return all placements that fit, each with the seconds of its slowest stage and of a token."""
    found = []
    layers = len(sizes.memory)
    for count in range(1, len(nodes) + 1):
        if stages not in (None, count):
            continue
        for cuts in combinations(sizes.cuts, count - 1):
            firsts = (0, *cuts)
            spans = list(zip(firsts, (*cuts, layers), strict=True))
            for others in combinations(range(1, len(nodes)), count - 1):
                used = (0, *others)
                own = [sum(sizes.read[a:b]) / nodes[n].bandwidth for (a, b), n in zip(spans, used, strict=True)]
                fits = all(sum(sizes.memory[a:b]) <= nodes[n].memory for (a, b), n in zip(spans, used, strict=True))
                if fits:
                    seconds = sum(own) + (count * HOP if count > 1 else 0)
                    found.append((max(own), seconds, Placement(firsts, used, seconds)))
    return found


@pytest.mark.parametrize("stages", [None, 1, 2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_no_placement_is_better(seed: int, stages: int | None) -> None:
    random = np.random.default_rng(seed)
    layers = int(random.integers(4, 9))
    memory, read = random.integers(1, 100, (2, layers)).tolist()
    cuts = tuple(n for n in range(1, layers) if random.random() < 0.8)
    sizes = Sizes(cuts, tuple(memory), tuple(read))
    nodes = [
        Node(str(n), int(random.integers(40, 400)), float(random.integers(1_000, 50_000)))
        for n in range(int(random.integers(1, 5)))
    ]
    possible = every(sizes, nodes, stages)
    if not possible:
        with pytest.raises(ClusterError, match=r"fit|stages"):
            place(sizes, nodes, HOP, stages)
        return
    found = place(sizes, nodes, HOP, stages)
    where = found.firsts, found.nodes
    slowest, seconds, _ = next(entry for entry in possible if (entry[2].firsts, entry[2].nodes) == where)
    assert seconds == pytest.approx(found.seconds)
    if stages is None:
        assert seconds == pytest.approx(min(entry[1] for entry in possible))
    else:
        assert slowest == pytest.approx(min(entry[0] for entry in possible))


def test_a_node_that_slows_a_token_is_left_out() -> None:
    sizes = Sizes(tuple(range(1, 10)), (10,) * 10, (10,) * 10)
    fast, slow = Node("fast", 1000, 1000.0), Node("slow", 1000, 10.0)
    assert place(sizes, [fast, slow], HOP).nodes == (0,)
    assert place(sizes, [slow, fast], HOP).firsts == (0, 1)  # the first stage has at least one layer
    assert place(sizes, [Node("small", 50, 1000.0), slow], HOP).firsts == (0, 5)


def test_sizes_of_a_plan_are_the_bytes_that_loading_counts() -> None:
    with open_gguf(resolve("demo")) as file:
        plan = Recording(256).plan(file)
        limits = limits_of(256, plan)
        sizes = Sizes.of(plan, limits, F16_CACHE)
        whole = summarize(plan)
        cache = cache_bytes(plan, limits, F16_CACHE)
        assert sizes.memory_of(0, len(sizes.memory)) == whole.weight_bytes + cache
        assert sum(sizes.read) == whole.bytes_per_token - 420  # without a row of the embeddings
        assert sum(sizes.memory) > whole.weight_bytes + cache  # the output is also the table of embeddings
        assert len(cut_at(plan, (0, sizes.cuts[0])).parts) == 2


def test_the_first_stage_has_the_encoders() -> None:
    """Of pictures and sound: their memory decides where the layers go, and whether a machine can take the first."""
    sizes = Sizes(tuple(range(1, 10)), (10,) * 10, (10,) * 10, encoders=35)
    assert [sizes.memory_of(*span) for span in ((0, 10), (0, 2), (2, 10))] == [135, 55, 80]
    small, large = Node("small", 60, 1000.0), Node("large", 1000, 500.0)
    assert place(sizes, [small, large], HOP).firsts == (0, 2)
    assert place(replace(sizes, encoders=0), [small, large], HOP).firsts == (0, 6)
    with pytest.raises(ClusterError, match="does not fit"):
        place(sizes, [Node("tiny", 40, 1000.0), large], HOP)


def test_what_does_not_fit_is_said_with_the_sizes() -> None:
    sizes = Sizes((1,), (3 * 10**9, 10**9), (10**9, 10**9))
    with pytest.raises(ClusterError, match=r"needs 3\.73 GiB, and the nodes have 1\.86 GiB \+ 953\.\d+ MiB"):
        place(sizes, [Node("a", 2 * 10**9, 1e9), Node("b", 10**9, 1e9)], HOP)
    with pytest.raises(ClusterError, match="3 stages of this model; it can be cut into at most 2"):
        place(sizes, [Node("a", 2 * 10**9, 1e9)], HOP, 3)
