"""Rows of n-grams from a table, as `plan.EmbedNgrams` defines them. Ids go to the store first, and are read there."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from localllm.backends.cpu.arguments import Address, Int64, Output, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, Step, kernel, own_rows
from localllm.backends.cpu.kernels.matrix import unpack_row
from localllm.backends.cpu.simd import F32, I64, LANES, Function, Value
from localllm.plan import BLOCK

ROW = 4 * LANES  # bytes of an id in the store
LARGEST = 2.0**24  # a damaged prompt file may hold any number in place of an id


class AppendIdsArguments(Struct):
    step: Address
    store: Target  # (slots, LANES)


class NgramArguments(Struct):
    step: Address
    weights: Address
    blocks: Int64
    panel_bytes: Int64
    store: Address
    y: Output


@dataclass(frozen=True, slots=True)
class Hashed:
    """What the kernel is compiled for."""

    format: str
    width: int  # of a head
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    end: int

    @property
    def name(self) -> str:
        return f"embed_ngrams_{self.format}_{self.width}_{zlib.crc32(repr(self).encode()):08x}"


def append_ids() -> PlanKernel[AppendIdsArguments]:
    """Write the id of every row as float32, to each lane of its vector."""

    def body(f: Function, a: AppendIdsArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.rows, thread, threads) as row:
            to = a.store + f.load_i32(step.slots, row) * ROW
            f.store(to, f.splat(f.to_float(f.load_i32(step.tokens, row))))

    return kernel("append_ids", AppendIdsArguments, body)


def embed_ngrams(of: Hashed) -> PlanKernel[NgramArguments]:
    """Emit the rows of all heads, one after the other."""
    heads = len(of.sizes) // (len(of.multipliers) - 1)

    def body(f: Function, a: NgramArguments, thread: Value, threads: Value) -> None:
        step, store, end = Step.at(a.step), a.store, f.i64(of.end)
        sizes, firsts = (f.table(name, values, I64) for name, values in (("sizes", of.sizes), ("firsts", of.firsts)))

        def id_at(row: Value, at: Value, none: Value) -> Value:
            """The id at a position; `end` where there is none."""
            found = f.var(end)
            with f.when((at >= 0) & none.equals(0)):
                table = step.tables + f.load_i32(step.sequence, row) * step.table_stride
                number = f.load(store + (f.load_i32(table, at // BLOCK) * BLOCK + at % BLOCK) * ROW, F32)
                within = f.fmin(f.fmax(number, f.constant(F32, 0.0)), f.constant(F32, LARGEST))
                found.set(f.widen(f.to_int32(within), I64))
            return found.get()

        with own_rows(f, step.rows, thread, threads) as row:
            position, y = f.load_i32(step.positions, row), a.y.row(row)
            over, mixed = f.i64(0), f.i64(0)
            for back, multiplier in enumerate(of.multipliers):
                token = id_at(row, position - back, over)
                mixed = mixed ^ token * multiplier
                if not back:
                    continue
                over = f.select(token.equals(end), f.i64(1), over)
                with f.loop((back - 1) * heads, back * heads) as head:
                    number = mixed % f.load_int(sizes, head) + f.load_int(firsts, head)
                    unpack_row(f, of.format, a.weights, a.blocks, a.panel_bytes, number, y + head * (4 * of.width))

    return kernel(of.name, NgramArguments, body)
