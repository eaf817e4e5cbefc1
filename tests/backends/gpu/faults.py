"""Devices and kernels with injected faults, which the check of a device must detect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm.backends.base import BackendError, Limits
from localllm.backends.gpu.bind import program
from localllm.backends.gpu.conformance.running import Verdict
from localllm.backends.gpu.conformance.segments import segments
from localllm.backends.gpu.conformance.verdicts import Conformance, examine
from localllm.backends.opencl.backend import OpenClBackend, OpenClDevice
from localllm.plan import BLOCK, Recorder, Value
from tests.backends.attending import Heads
from tests.backends.gpu.small import Small, attended, experts, layer, products, rows, table
from tests.backends.support import LLAMA, plan, record
from tests.models.support import MemoryWeight

LIMITS = Limits(80, 80, 5, 5 * BLOCK)


class Faulty(OpenClDevice):
    """A device with an injected bug: it replaces a snippet of kernel source before compiling. `met` is True once the
    snippet occurred.
    """

    old = new = ""
    met = False

    def compile(self, source: str, kernel: str) -> Any:
        if self.old and self.old in source:
            self.met, source = True, source.replace(self.old, self.new)
        return super().compile(source, kernel)


def checked(device: OpenClDevice, small: Small, kernel: str = "") -> list[Verdict]:
    """Return the verdicts of a plan; with `kernel`, only of the segments that launch it."""
    own = [
        each
        for each in segments(record(small.table, small.build))
        if not kernel or any(k.name == kernel for k in program(each.plan, LIMITS, small.cache).kernels())
    ]
    assert own
    return examine(device, own, LIMITS, small.cache)


def bound(device: OpenClDevice, folder: Path) -> None:
    """Bind a small model in the way that the program does."""
    backend = OpenClBackend(device.facts.name, cache=None, conformance=Conformance(folder))
    backend.device = device
    backend.bind(plan("F32", LLAMA), LIMITS).close()


class Raising(OpenClDevice):
    """A device whose driver fails after a number of launches. With `fatal`, all later calls fail too."""

    after, fatal = 0, False
    kernel = "matvec"
    dead = False

    def _raise(self) -> None:
        raise self._cl.RuntimeError("clEnqueueNDRangeKernel failed: \x1b[31mDEVICE LOST\nagain")

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Any) -> Any:
        own = super().prepare(kernel, size, local_bytes, arguments)

        def launch(grid: Any) -> None:
            if kernel[1] == self.kernel:
                self.after -= 1
                if self.after < 0:
                    self.dead = self.fatal
                    self._raise()
            own(grid)

        return launch

    def upload(self, *data: Any) -> None:
        if self.dead:
            self._raise()
        super().upload(*data)

    def sync(self) -> None:
        if self.dead:
            raise BackendError("the context is lost")
        super().sync()


@dataclass(frozen=True)
class Fault:
    """An injected bug: a snippet of kernel source, its replacement, a plan, and the affected kernel."""

    old: str
    new: str
    small: Small
    kernel: str


def glued(r: Recorder, x: Value) -> Value:
    return r.glu(r.linear(x, MATRIX), r.linear(x, replace(MATRIX, name="other")), "silu")


def added(r: Recorder, x: Value) -> Value:
    return r.add(x, r.linear(x, MATRIX))


def activated(r: Recorder, x: Value) -> Value:
    return r.activate(x, "relu")


MATRIX = MemoryWeight.of("matrix", table(64).values()[:37, :].repeat(2, axis=0)[:64], "Q8_0")
Q4_0, Q5_1, PLAIN = (products(name, depth=96) for name in ("Q4_0", "Q5_1", "F16"))
HEADS, ODD = attended(Heads(4, 2, 16)), attended(Heads(2, 2, 7))
WINDOW, LAYER = attended(Heads(2, 2, 16, window=9)), Small(layer, table(32))
MIXTURE = experts("F32 F32 F32", 2, "softmax", False, 1.5, "silu", count=5)
LOGITS = Small(lambda r, x: r.select_rows(x), table(700))
NORMS = Small(rows, table(96))

FAULTS: dict[str, Fault] = {
    "layout: halves of a block": Fault(
        "q[i] = less(nibbles(words[i], 0), 8);\n    q[i + 4] = less(nibbles(words[i], 1), 8);",
        "q[i] = less(nibbles(words[i], 1), 8);\n    q[i + 4] = less(nibbles(words[i], 0), 8);", Q4_0, "matvec",
    ),
    "layout: sign of the minimum": Fault("FMA(-m[0], low + high, sum)", "FMA(m[0], low + high, sum)", Q5_1, "matvec"),
    "barrier: before a tile is read": Fault(
        "    BARRIER();\n    int xq[4][8];", "    int xq[4][8];", Q4_0, "matmul",
    ),
    "barrier: before a query is read": Fault(
        "  BARRIER();\n\n  float score[2][GROUPED];", "  float score[2][GROUPED];", HEADS, "attend_partition",
    ),
    "barrier: before scores are read": Fault(
        "    BARRIER();\n    for (int i = ITEM; i < TILE_KEYS * VALUE_UNITS; i += 128) {",
        "    for (int i = ITEM; i < TILE_KEYS * VALUE_UNITS; i += 128) {", HEADS, "attend_tile",
    ),
    "tail: last row of a matrix": Fault(
        "(ITEM & 31) == 0 && row < N && j < columns", "(ITEM & 31) == 0 && row < N - 1 && j < columns", PLAIN, "matvec",
    ),
    "tail: last row of a batch": Fault(
        "smaller(step[COUNT_AT] - (column), COLUMNS)", "smaller(step[COUNT_AT] - 1 - (column), COLUMNS)", PLAIN,
        "matvec",
    ),
    "tail: last numbers of a row": Fault("c < K / 32; c += 32", "c < K / 32 - 1; c += 32", Q4_0, "matvec"),
    "NaN: lost where a row is rounded to bytes": Fault(
        "*scale = largest / 127.0f;", "*scale = largest <= -LOWEST ? largest / 127.0f : 0.0f;", Q4_0, "elements",
    ),
    "NaN: lost in an activation": Fault(
        "float relu(float x) { return x < 0.0f ? 0.0f : x; }", "float relu(float x) { return FMAX(x, 0.0f); }",
        Small(activated, table(40)), "elements",
    ),
    "sub-group: 16 for 32 work-items": Fault(
        "SEGMENT(sum32, float, 16, v + w)", "SEGMENT(sum32, float, 8, v + w)", PLAIN, "matvec",
    ),
    "sub-group: 32 for 16 work-items": Fault(
        "SEGMENT(sum16, int, 8, v + w)", "SEGMENT(sum16, int, 16, v + w)", Q5_1, "elements",
    ),
    "cache: one block further": Fault(
        "table[position / BLOCK_TOKENS] * KV_HEADS", "table[(position + 1) / BLOCK_TOKENS] * KV_HEADS", HEADS,
        "attend_partition",
    ),
    "cache: one slot further": Fault(
        "slot % BLOCK_TOKENS / EVERY", "(slot + 1) % BLOCK_TOKENS / EVERY", HEADS, "append",
    ),
    "cache: keys for values": Fault("(second ? v : k)", "(second ? k : v)", HEADS, "append"),
    "scale: of a row in bytes": Fault("*scale = largest / 127.0f;", "*scale = largest / 128.0f;", Q4_0, "elements"),
    "scale: of a half block": Fault(
        "FMA(s[1], d * (float)second, FMA(s[0]", "FMA(s[0], d * (float)second, FMA(s[0]",
        products("Q6_K", depth=256), "matvec",
    ),
    "rope: pairs of the other style": Fault(
        "return d < N_ROT / 2 ? d + N_ROT / 2 : d - N_ROT / 2;", "return d ^ 1;", LAYER, "append",
    ),
    "rope: the other direction": Fault(
        "second ? other * sine + x * cosine : x * cosine - other * sine",
        "second ? x * cosine - other * sine : other * sine + x * cosine", LAYER, "append",
    ),
    "rope: the next position": Fault(
        "of = table + (size_t)POSITIONS_OF(step)[row] * N_ROT",
        "of = table + (size_t)(POSITIONS_OF(step)[row] + 1) * N_ROT",
        LAYER, "append",
    ),
    "mask: a row sees the next": Fault(
        "int position = POSITIONS_OF(step)[row];\n  if (CAUSAL) return position;",
        "int position = POSITIONS_OF(step)[row];\n  if (CAUSAL) return position + 1;", HEADS, "attend_partition",
    ),
    "mask: a window one shorter": Fault(
        "larger(0, position + 1 - WINDOW)", "larger(0, position + 2 - WINDOW)", WINDOW, "attend_partition",
    ),
    "memory: numbers of an earlier kernel, local": Fault(
        "own[i] = g < heads && d < size ? q[((size_t)row * HEADS + head0 + g) * size + d] : 0.0f;",
        "if (g < heads && d < size) own[i] = q[((size_t)row * HEADS + head0 + g) * size + d];", ODD,
        "attend_partition",
    ),
    "memory: numbers of an earlier step, global": Fault(
        "if (i < width) y[i] = v;", "if (i < width && i != 5) y[i] = v;", NORMS, "norm_rows",
    ),
    "experts: another than the chosen": Fault(
        "expert = choices[column]", "expert = (choices[column] + 1) % EXPERTS", MIXTURE, "matvec",
    ),
    "experts: the worst for the best": Fault("best[other] > best[ITEM]", "best[other] < best[ITEM]", MIXTURE, "route"),
    "gate and up": Fault("= OPERATION(g, u);", "= OPERATION(u, g);", Small(glued, table(64)), "matvec_gated"),
    "a residual twice": Fault("v += residual[", "v += 2.0f * residual[", Small(added, table(64)), "matvec"),
    "logits: smallest for largest": Fault("? 0u : bits >> 31", "? 0u : bits >> 31 == 0", LOGITS, "largest"),
}  # fmt: skip
