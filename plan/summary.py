"""The cost of a model, computed from its plan: parameters, bytes and floating-point operations per token.

`show` and `bench` print these counts. Memory bandwidth divided by bytes per token is the upper limit of decode speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from localllm.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of a model. A weight that is used twice (a tied embedding) is counted once."""

    parameters: int
    weight_bytes: int  # bytes of the weights in memory, in their stored formats
    table_bytes: int  # bytes of the tables that stay on disk
    table_bytes_per_token: int  # table bytes read per token
    bytes_per_token: int  # weight bytes read per decoded token: every matrix and vector, one embedding
    flops_per_token: int  # two per weight of every matrix product, without attention
    attention_flops_per_position: int  # in layers without a sliding window, per token in the cache
    cache_values_per_token: int  # keys and values of all layers, per token


def summarize(plan: Plan) -> Summary:
    """Return the counts of a plan, with weights in their stored formats."""
    weights, tables = plan.weights.values(), {read.weight.name: read.weight for read in plan.lookups}.values()
    return Summary(
        parameters=sum(prod(weight.shape) for weight in (*weights, *tables)),
        weight_bytes=sum(weight.bytes for weight in weights),
        table_bytes=sum(table.bytes for table in tables),
        table_bytes_per_token=sum(read.share(read.weight.bytes) for read in plan.lookups),
        bytes_per_token=sum(read.share(read.weight.bytes) for read in plan.reads),
        flops_per_token=sum(op.flops for op in plan.operations),
        attention_flops_per_position=sum(op.flops_per_position for op in plan.operations),
        cache_values_per_token=sum(n.kv_heads * (n.head_dim + n.value_dim) // n.every for n in plan.attention_layers),
    )
