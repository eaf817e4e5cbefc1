"""`localllm cluster plan`: forecast a model on several machines, before they are connected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from localllm.backends.base import CacheTypes
from localllm.base.machine.processor import usable_threads
from localllm.base.units import size
from localllm.cli.app import UsageError
from localllm.cli.forecast import DecodeSpeed, Fastest, TokenCost, cost_of, planned
from localllm.cli.naming import one_model
from localllm.cli.options import ModelName
from localllm.cli.terminal.console import room
from localllm.cli.terminal.formatting import rate_text, text_table
from localllm.cli.tool_options import HERE, ClusterOptions, NodeSpec, nodes_of
from localllm.cluster.cut import Cut, cut_at
from localllm.cluster.errors import ClusterError
from localllm.cluster.forecast import SAMPLED, Network, StageSpeed, first_token, tokens_per_second
from localllm.cluster.sizing import Node, Placement, Sizes, place
from localllm.gguf import GGUFFile, open_gguf
from localllm.loading.loader import free_memory
from localllm.loading.mmproj import open_multimodal
from localllm.loading.resolve import resolve
from localllm.options import LoadOptions
from localllm.plan import Send
from localllm.tokenizer import Tokenizer, has_tokenizer

PLAN = "plan"
SEQUENCES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """What a layout gives."""

    stages: int
    nodes: tuple[str, ...]
    layers: tuple[str, ...]  # of each stage
    memory: tuple[int, ...]  # bytes of each stage
    tokens_per_second: dict[int, float]  # of all sequences together, by their number
    first_token: float  # seconds
    hops: int  # messages per token
    hop_seconds: float  # of the messages of a token together


def cluster(own: ClusterOptions) -> None:
    """Show the memory and speed of each number of stages on the given nodes."""
    if own.words[:1] != (PLAN,):
        found = f", got {own.words[0]!r}" if own.words else ""
        raise UsageError(f"expected `localllm cluster plan MODEL --nodes SPEC`{found}")
    path = resolve(one_model(ModelName(own.words[1:])))
    network = Network(own.delay / 1000, own.network)
    rows, problems = forecasts(str(path), own, network)
    if not rows:
        raise ClusterError(problems[-1])
    if own.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print("\n".join(_lines(rows, own, problems)))


def forecasts(
    path: str,
    own: ClusterOptions,
    network: Network,
    firsts: Sequence[int] = (),
    fastest: tuple[Fastest | None, Fastest | None] = (None, None),
) -> tuple[list[Row], list[str]]:
    """Return the forecast for each number of stages that is possible, and why others are not. `firsts`, if given,
    are the first layers of that number of stages. Otherwise the layers are placed as with `--stages N`. `fastest` has
    the shortest times of earlier measurements, first with the threads of one node, then of all nodes on this computer.
    """
    rows: list[Row] = []
    problems: list[str] = []
    specs = nodes_of(own.nodes)
    own_threads = min(own.load.threads or usable_threads(), usable_threads())
    shared = 1 + sum(spec.same for spec in specs)  # nodes that are this computer
    with (
        open_gguf(path) as file,
        DecodeSpeed(own_threads, fastest[0]) as speed,
        DecodeSpeed(min(shared * own_threads, usable_threads()), fastest[1]) as all_threads,
    ):
        _, plan, limits, context, _ = planned(file, own.load.ctx_size)
        types = CacheTypes(*own.load.cache_types)
        whole = cost_of(plan, limits, types, context // 2)
        here = sum(whole.weights.values()) / speed.seconds(whole)
        nodes = [_node(spec, here, shared) for spec in specs]
        sizes = Sizes.of(plan, limits, types, _encoders(file, own.load))
        hop = network.hop(_widest(cut_at(plan, (0, sizes.cuts[0]))) if sizes.cuts else 0)
        for stages in range(1, len(nodes) + 1):
            try:
                given = Placement(tuple(firsts), tuple(range(stages)), 0.0) if len(firsts) == stages else None
                placed = given or place(sizes, nodes, hop, stages)
            except ClusterError as error:
                problems.append(str(error))
                continue
            cut = cut_at(plan, placed.firsts)
            used = [nodes[number] for number in placed.nodes]
            costs = [cost_of(part, limits, types, context // 2) for part in cut.parts]
            on_this = [not number or specs[number].same for number in placed.nodes]
            speeds = [
                _stage(speed, cost, here / node.bandwidth, _sent(cut, number))
                for number, (cost, node) in enumerate(zip(costs, used, strict=True))
            ]
            if sum(on_this) > 1:
                speeds = [
                    replace(stage, together=_stage(all_threads, cost, 1.0, 0)) if own_ else stage
                    for stage, cost, own_ in zip(speeds, costs, on_this, strict=True)
                ]
            stops = (*placed.firsts[1:], len(sizes.memory))
            spans = list(zip(placed.firsts, stops, strict=True))
            rows.append(
                Row(
                    stages,
                    tuple(node.name for node in used),
                    tuple(_layers(first, stop, len(sizes.memory)) for first, stop in spans),
                    tuple(sizes.memory_of(first, stop) for first, stop in spans),
                    {count: tokens_per_second(speeds, network, count) for count in SEQUENCES},
                    first_token(speeds, network, min(own.prompt, context), limits.rows),
                    stages if stages > 1 else 0,
                    sum(network.hop(each.sent) for each in speeds) if stages > 1 else 0.0,
                )
            )
    return rows, problems


def _stage(speed: DecodeSpeed, cost: TokenCost, slower: float, sent: int) -> StageSpeed:
    """Return the speed of a stage on a node that is `slower` times as slow as this computer."""

    def step(rows: int) -> float:
        return slower * speed.seconds(cost, rows)

    def prompt(rows: int) -> float:
        return slower * speed.prompt_seconds(cost, rows)

    return StageSpeed(step, prompt, sent)


def _node(spec: NodeSpec, here: float, shared: int) -> Node:
    """Return what a stage may use of a machine. Nodes on this computer share its memory."""
    memory = spec.memory or free_memory() // (shared if spec.name == HERE or spec.same else 1)
    return Node(spec.name, memory, spec.bandwidth or here)


def _encoders(file: GGUFFile, options: LoadOptions) -> int:
    """Return the bytes of the encoders of pictures and sound, which the first stage has."""
    tokenizer = Tokenizer.from_metadata(file.metadata) if has_tokenizer(file.metadata) else None
    found = open_multimodal(file, tokenizer, options)
    if found is None:
        return 0
    with found:
        return found.needed_bytes(options.threads)


def _sent(cut: Cut, stage: int) -> int:
    """Return the bytes per row that a stage sends on. The last stage returns the most likely tokens."""
    last = cut.parts[stage].operations[-1]
    return 4 * sum(value.width for value in last.values) if isinstance(last, Send) else SAMPLED


def _widest(cut: Cut) -> int:
    return max(_sent(cut, stage) for stage in range(cut.stages))


def _layers(first: int, stop: int, count: int) -> str:
    """Return the layers of a stage as text. The last "layer" of a plan is its output."""
    last = min(stop, count - 1) - 1
    named = "" if last < first else f"{first}" if last == first else f"{first}-{last}"
    return " + ".join(filter(None, (named, "output" if stop == count else "")))


def _lines(rows: Sequence[Row], own: ClusterOptions, problems: Sequence[str]) -> Iterator[str]:
    header = ["stages", "layers", "memory", *(f"t/s x{count}" for count in SEQUENCES), "first token", "hops"]
    table = [
        [
            str(row.stages),
            "; ".join(f"{node}: {layers}" for node, layers in zip(row.nodes, row.layers, strict=True)),
            " + ".join(map(size, row.memory)),
            *(rate_text(row.tokens_per_second[count]) for count in SEQUENCES),
            f"{row.first_token:.2f} s",
            f"{row.hops} x {1000 * row.hop_seconds / row.hops:.1f} ms" if row.hops else "none",
        ]
        for row in rows
    ]
    yield text_table(header, table, right=(*header[3:7], "stages"), room=room())
    for problem in problems:
        yield f"not possible: {problem}"
    one = max(rows, key=lambda row: row.tokens_per_second[1])
    many = max(rows, key=lambda row: row.tokens_per_second[SEQUENCES[-1]])
    yield f"\nfastest for one answer: {_stages(one)}; for {SEQUENCES[-1]} at a time: {_stages(many)}"
    yield (
        f"t/s xN: tokens per second of N answers together. First token: after a prompt of {own.prompt} tokens.\n"
        "A forecast: this computer was measured now, and other nodes follow from the bandwidth given for them."
    )


def _stages(row: Row) -> str:
    return f"{row.stages} stage{'s' * (row.stages > 1)}"
