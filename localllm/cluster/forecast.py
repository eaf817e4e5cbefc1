"""Forecasts the speed of a model in stages, from the time of a pass in each stage and the network between them.

A step visits all stages and returns: it takes the sum of their times and one hop per stage. With several sequences, the
loop keeps one step per stage under way. The slowest stage then limits the tokens per second, or the
whole round if there are too few sequences to fill it. Stages on the same machine share its memory and processors: all
of them together are not faster than one process with the threads of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.cluster.executable import MICRO_BATCHES, MICRO_ROWS, MOST_MICRO_BATCHES

HANDLING = 0.0005  # seconds to encode, send, receive and decode a small message (benchmarks/results/stages.jsonl)
SAMPLED = 320  # bytes per row of a result: ids and logits of the top 40


@dataclass(frozen=True, slots=True)
class Network:
    """The connections between the nodes."""

    delay: float  # seconds from one node to the next
    bandwidth: float = 0.0  # bytes per second; 0: not limited

    def hop(self, size: int) -> float:
        """Return the seconds until a message of `size` bytes arrives."""
        return self.delay + HANDLING + (size / self.bandwidth if self.bandwidth else 0.0)


@dataclass(frozen=True, slots=True)
class StageSpeed:
    """The speed of one stage, and the size of its messages."""

    step: Callable[[int], float]  # number of rows to the seconds of a pass; each row belongs to another sequence
    prompt: Callable[[int], float]  # the same for rows of one prompt
    sent: int  # bytes per row for the next stage
    together: StageSpeed | None = None  # with the threads of all stages on its machine, if there are several


def tokens_per_second(stages: Sequence[StageSpeed], network: Network, sequences: int) -> float:
    """Return the tokens per second of all sequences together, while they decode."""
    count = min(sequences, len(stages))  # steps under way
    rows = sequences / count
    times = [stage.step(round(rows)) for stage in stages]
    once = sum(times) + _hops(stages, network, round(rows))
    shared = sum(stage.together.step(round(rows)) for stage in stages if stage.together is not None)
    return rows / max(max(times), once / count, shared)


def first_token(stages: Sequence[StageSpeed], network: Network, prompt: int, batch: int) -> float:
    """Return the seconds until the first token after a prompt, in passes of up to `batch` rows."""
    seconds = 0.0
    for start in range(0, prompt, batch):
        rows = min(batch, prompt - start)
        pieces = min(rows // MICRO_ROWS, MICRO_BATCHES * len(stages), MOST_MICRO_BATCHES) if len(stages) > 1 else 1
        pieces = max(pieces, 1)
        each = rows / pieces
        times = [stage.prompt(round(each)) for stage in stages]
        shared = sum(stage.together.prompt(round(each)) for stage in stages if stage.together is not None)
        seconds += sum(times) + (pieces - 1) * max(*times, shared) + _hops(stages, network, round(each))
    return seconds


def _hops(stages: Sequence[StageSpeed], network: Network, rows: int) -> float:
    """Return the seconds of all messages of a step; one stage sends none."""
    if len(stages) == 1:
        return 0.0
    return sum(network.hop(stage.sent * rows) for stage in stages)
