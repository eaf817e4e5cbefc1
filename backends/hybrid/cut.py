"""Decides which operations of a plan run on the GPU and which on the host. Layers are counted as in llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.plan import Experts, Plan
from localllm.plan.rewrites.split import Split, split

Side = Literal["host", "gpu"]


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement puts the last `layers` layers on the GPU; the output counts as one layer.

    The experts of the first `host_experts` layers stay on the host. If all layers and the output go to the GPU, so do
    the embeddings. An encoder-decoder model and a model with heads for drafting run entirely on one side.
    """

    layers: int
    host_experts: int = 0


def most_layers(plan: Plan) -> int:
    """Return the largest possible `Placement.layers`: all layers and the output."""
    return len(plan.starts)


def whole(plan: Plan, placement: Placement) -> bool:
    """Return whether a placement puts the whole plan on the GPU."""
    return placement.layers >= most_layers(plan) and not placement.host_experts


def sides(plan: Plan, placement: Placement) -> list[Side]:
    """Return the side on which each operation runs."""
    count, starts = len(plan.operations), plan.starts
    on_gpu = min(placement.layers, len(starts))
    # Their stages run on different rows, so none can be split.
    if (plan.encodes and on_gpu < len(starts)) or (plan.drafts and not whole(plan, placement)):
        on_gpu = 0
    first = (0 if on_gpu == len(starts) else starts[-on_gpu]) if on_gpu else count
    host_experts = starts[min(placement.host_experts, len(starts) - 1)]
    caches: dict[int, Side] = {}  # a layer that reuses an earlier layer's KV cache runs on the same side
    found: list[Side] = []
    for number, op in enumerate(plan.operations):
        stays = isinstance(op, Experts) and number < host_experts and not plan.drafts
        side: Side = "gpu" if number >= first and not stays else "host"
        for layer in op.state:
            side = caches.setdefault(layer, side)
        found.append(side)
    return found


def cut_plan(plan: Plan, placement: Placement) -> Split[Side]:
    """Split a plan between the GPU and the host."""
    return split(plan, sides(plan, placement))
