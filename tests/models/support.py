"""Helpers for tests of models and backends: tensors in memory, GGUFs of the reference data, and a driver for
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm import plan, quant
from localllm.backends.base import CacheTypes, Executable, Limits
from localllm.backends.reference import ReferenceBackend, ReferenceExecutable
from localllm.models import architecture_of, read_config, record
from localllm.plan import BLOCK, Batch, Fused, Operation, Plan, Receive, Send, Stack, Weight


@dataclass(frozen=True)
class MemoryWeight:
    """A tensor whose rows, as stored in a GGUF, are in memory."""

    name: str
    format: str
    shape: tuple[int, ...]
    rows: np.ndarray  # uint8 (rows, bytes of a row)

    @classmethod
    def of(cls, name: str, values: np.ndarray, format: str = "F32") -> MemoryWeight:
        rows = np.asarray(values, np.float32).reshape(-1, np.shape(values)[-1])
        return cls(name, format, np.shape(values), quant.quantize(rows, format))

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.rows[start:stop]

    def values(self) -> np.ndarray:
        return quant.dequantize(self.rows, self.format).reshape(self.shape)


def open_model(path: Path) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
    """Return the metadata and tensors of a GGUF, read with gguf-py instead of our reader."""
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        rows = np.ascontiguousarray(tensor.data).reshape(int(np.prod(shape[:-1])), -1).view(np.uint8)
        tensors[tensor.name] = MemoryWeight(tensor.name, tensor.tensor_type.name, shape, rows)
    return metadata, tensors


def plan_of(metadata: dict[str, Any], tensors: dict[str, MemoryWeight], embeddings: bool = False) -> Plan:
    architecture = architecture_of(metadata)
    return record(read_config(metadata, architecture.name), architecture, tensors, embeddings=embeddings)


def bind_reference(plan: Plan, cache_type: str = "f32", positions: int = 512, rows: int = 64) -> ReferenceExecutable:
    blocks = 2 * -(-positions // BLOCK)
    limits = Limits(rows=rows, logit_rows=rows, blocks=blocks, positions=positions)
    return ReferenceBackend().bind(plan, limits, CacheTypes(cache_type, cache_type))


class Driver:
    """Evaluates tokens of several sequences on an executable.

    KV cache blocks are assigned to the sequences in turn, so their block tables are interleaved.
    """

    def __init__(self, executable: Executable, sequences: int = 1) -> None:
        self.executable = executable
        self.sequences = sequences
        self.columns = executable.limits.blocks // sequences
        self.lengths = [0] * sequences
        self.histories: list[list[int]] = [[] for _ in range(sequences)]
        self.borders: list[int] | None = None  # lengths of the encoder's texts
        blocks = np.arange(self.columns * sequences, dtype=np.int32)
        self.tables = np.ascontiguousarray(blocks.reshape(self.columns, sequences).T)  # (sequences, blocks)

    def step(
        self, parts: Sequence[tuple[int, Sequence[int]]], logit_rows: Sequence[int] | None = None, **further: Any
    ) -> np.ndarray:
        """Append the tokens of each part to its sequence. Return the logits of the wanted tokens, by default of all.

        `further` are other fields of the batch.
        """
        tokens, positions, sequence = [], [], []
        for s, more in parts:
            tokens += list(more)
            positions += range(self.lengths[s], self.lengths[s] + len(more))
            # The tokens are unknown, because the test filled the KV cache directly.
            unknown = [0] * (self.lengths[s] - len(self.histories[s]))
            self.histories[s][self.lengths[s] :] = [*unknown, *more]
            sequence += [s] * len(more)
            self.lengths[s] += len(more)
        p, s_ = np.array(positions, np.int32), np.array(sequence, np.int32)
        slots = self.tables[s_, p // BLOCK] * BLOCK + p % BLOCK
        wanted = np.arange(len(tokens)) if logit_rows is None else np.array(logit_rows)
        borders = None if self.borders is None else np.array(self.borders, np.int32)
        tokens_, rows = np.array(tokens, np.int32), wanted.astype(np.int32)
        batch = Batch(tokens_, p, slots, s_, self.tables, rows, borders=borders, histories=self.histories, **further)
        return self.executable.step(batch).copy()


def stack(weight: MemoryWeight, scale: MemoryWeight | None = None, bias: MemoryWeight | None = None) -> Stack:
    """Return the matrices of all experts as one tensor."""
    return Stack(*(None if tensor is None else Weight.of(tensor) for tensor in (weight, scale, bias)))


BOUNDARIES = {Receive, Send}  # operations that only split plans have
EVERY_OPERATION = {  # operations of recorded plans, which fused operations replace
    kind
    for kind in vars(plan).values()
    if isinstance(kind, type) and issubclass(kind, Operation) and not issubclass(kind, Fused) and kind != Operation
} - BOUNDARIES


def nmse(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the mean squared error divided by the mean square of the expected values, per row."""
    difference = ours.astype(np.float64) - theirs
    return (difference**2).mean(axis=-1) / (theirs.astype(np.float64) ** 2).mean(axis=-1)
