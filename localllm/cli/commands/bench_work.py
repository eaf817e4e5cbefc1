"""The operations and bytes of one run of a test, for rooflines and speeds.

A prefill step is assumed to read every weight and every cached key and value once, regardless of the number of tokens.
The bytes of a prefill are therefore a lower bound, and its operations per byte an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.cli.commands.bench_tests import Test
from localllm.model import Model
from localllm.plan import Plan, Summary, summarize


@dataclass(frozen=True, slots=True)
class TestWork:
    """Operations (two per multiply-add) and bytes read from memory."""

    operations: int
    bytes: int


def work_of(model: Model, test: Test) -> TestWork:
    """Return the work of one run: prefill, then decode, on top of the cached tokens."""
    parts = [_prompt(model, test)] if test.prompt else []
    parts += [_decoding(model, test)] if test.answer else []
    return TestWork(sum(part.operations for part in parts), sum(part.bytes for part in parts))


def bytes_per_token(model: Model, test: Test) -> int:
    """Return the bytes read to decode one token, averaged over the test."""
    return round(model.executable.memory.read_after(_middle(test)))


def weights_read(plan: Plan, rows: int) -> int:
    """Return the bytes of weights, in their stored format, that a forward pass over `rows` tokens reads.

    A token reads some of the experts and one row of the embedding. Tokens are assumed to read different experts and
    rows, up to all of them.
    """
    return sum(read.weight.bytes * min(read.used * rows, read.of) // read.of for read in plan.reads)


def _middle(test: Test) -> float:
    """Return the number of cached tokens that attention reads, averaged over the decoded tokens."""
    return test.depth + test.prompt + (test.answer + 1) / 2


def _decoding(model: Model, test: Test) -> TestWork:
    summary, seen = _summary(model), _middle(test)
    each = summary.flops_per_token + summary.attention_flops_per_position * seen
    return TestWork(round(test.answer * each), test.answer * bytes_per_token(model, test))


def _prompt(model: Model, test: Test) -> TestWork:
    """Return the work of a prefill: every matrix for every token, the output matrix once per step, and attention."""
    assert model.plan is not None
    assert model.config is not None
    summary, memory, batch = _summary(model), model.executable.memory, model.batch_rows
    output = 2 * model.config.vocabulary * model.config.width
    positions = test.prompt * test.depth + test.prompt * (test.prompt + 1) // 2
    operations = test.prompt * (summary.flops_per_token - output) + -(-test.prompt // batch) * output
    stored = memory.weights_per_token / summary.bytes_per_token  # bytes in the backend's format per byte in the file
    read = 0.0
    for first in range(0, test.prompt, batch):
        rows = min(batch, test.prompt - first)
        cache = memory.read_after(test.depth + first + rows) - memory.weights_per_token
        read += stored * weights_read(model.plan, rows) + cache
    return TestWork(operations + positions * summary.attention_flops_per_position, round(read))


def _summary(model: Model) -> Summary:
    assert model.plan is not None
    return summarize(model.plan)
