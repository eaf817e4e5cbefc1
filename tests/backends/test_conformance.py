"""Compare every operation of a plan on the CPU backend with the reference backend.

Both backends bind the same plan and run the same batches. Results may differ by float32 rounding (`rounding.py`).
Attention and products with quantized weights have their own files, `test_attention.py` and `test_linear.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localllm import quant
from localllm.backends.base import Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.unpack import FORMATS
from localllm.backends.reference import ReferenceBackend
from localllm.plan import Experts, Recorder, Value
from tests.backends.attending import Heads, attend
from tests.backends.cases import CASES, HEAD_FORMATS, RECURRENT, VOCABULARY, random, table, vector
from tests.backends.selecting import SELECTING, select
from tests.backends.support import Build, bind, feed, record, stored
from tests.models.support import EVERY_OPERATION, Driver, MemoryWeight

ROWS = (1, 3, 13, 17, 70)  # batch sizes that need one tile size or several, with packed and with unpacked weights


@pytest.mark.parametrize("name", CASES)
def test_rows(cpu: CpuBackend, name: str) -> None:
    """Every token is within float32 rounding, and its bits do not depend on the size of the batch."""
    case = CASES[name]
    embedding = table(case.width)
    plan = record(embedding, case.build)
    ours, theirs = bind(cpu, plan), bind(ReferenceBackend(), plan)
    tokens = np.resize(np.random.RandomState(2).permutation(VOCABULARY), max(ROWS))
    truth = feed(theirs, tokens).astype(np.float64)
    slack = case.slack(embedding.values()[tokens].astype(np.float64), truth)
    whole = feed(ours, tokens)
    assert (np.abs(whole - truth) <= slack).all(), np.abs(whole - truth).max()
    for rows in ROWS:
        np.testing.assert_array_equal(feed(ours, tokens, [rows]), whole)


def head_matrices(format: str, rows: int) -> MemoryWeight:
    """Return a stack of two matrices (rows, columns) in a format."""
    columns = max(quant.FORMATS[format].block_values, 30)
    return replace(stored("heads", format, (2 * rows, columns)), shape=(2, rows, columns))


def side_by_side(weight: MemoryWeight) -> Build:
    """Build `head_linear` as one product per head."""
    _, rows, columns = weight.shape

    def build(r: Recorder, x: Value) -> Value:
        parts = [
            replace(weight, name=str(n), shape=(rows, columns), rows=weight.rows[n * rows :][:rows]) for n in (0, 1)
        ]
        a, b = (r.linear(r.slice(x, n * columns, (n + 1) * columns), part) for n, part in enumerate(parts))
        return r.concat(a, b)

    return build


@pytest.mark.parametrize("rows", [32, 41])
@pytest.mark.parametrize("format", HEAD_FORMATS)
def test_a_head_has_the_bits_of_a_product_of_its_own(cpu: CpuBackend, format: str, rows: int) -> None:
    weight = head_matrices(format, rows)
    embedding = table(2 * weight.shape[2])
    ours = bind(cpu, record(embedding, lambda r, x: r.head_linear(x, weight)))
    theirs = bind(cpu, record(embedding, side_by_side(weight)))
    tokens = np.resize(np.random.RandomState(2).permutation(VOCABULARY), 70)
    for sizes in ([], [1, 2, 17]):
        np.testing.assert_array_equal(feed(ours, tokens, sizes), feed(theirs, tokens))


@pytest.mark.parametrize("format", FORMATS)
def test_embed_gives_the_numbers_of_the_file(cpu: CpuBackend, format: str) -> None:
    """Embeddings equal the dequantized values bit for bit, for blocks of every magnitude from subnormal numbers up.
    With 37 tokens, the last panel is partly empty.
    """
    columns = 2 * quant.FORMATS[format].block_values if quant.FORMATS[format].block_values > 1 else 21
    weight = stored("table", format, (VOCABULARY, columns), low=0.0, high=3e38)
    tokens = np.resize(np.arange(VOCABULARY)[::-1], 70)
    ours = bind(cpu, record(weight, lambda r, x: x))
    for sizes in ([], [1, 2]):
        np.testing.assert_array_equal(feed(ours, tokens, sizes), weight.values()[tokens])


def test_select_rows(cpu: CpuBackend) -> None:
    embedding = table(40)
    executable = bind(cpu, record(embedding, lambda r, x: r.scale(r.select_rows(x), 2.0)))
    driver = Driver(executable)
    for wanted in ([4, 0, 2], [], [1], [4] * 30):
        rows = driver.step([(0, [7, 1, 30, 1, 5])], logit_rows=wanted)
        np.testing.assert_array_equal(rows, 2 * embedding.values()[np.array([7, 1, 30, 1, 5])[wanted].astype(int)])


def test_positions_have_rows_of_a_table(cpu: CpuBackend) -> None:
    """A position embedding depends only on the position, not on the token. Positions past the end of the table get its
    last row.
    """
    embedding, positions = table(40), MemoryWeight.of("positions", random.standard_normal((50, 40)))
    plan = record(embedding, lambda r, x: r.add(x, r.embed(positions, positions=True)))
    tokens = np.resize(np.arange(VOCABULARY)[::-1], 70)
    expected = embedding.values()[tokens] + positions.values()[np.minimum(np.arange(70), 49)]
    for sizes in ([], [1, 2]):
        np.testing.assert_array_equal(feed(bind(cpu, plan), tokens, sizes), expected)


def check_recurrent(backend: Backend, name: str) -> None:
    """Evaluate chunks that end within a block, at its end, and several blocks later. Then rewind and continue
    with other tokens.

    States are rounded to float32 after every token, and the chains are short. The allowed error is 2e-6, or 30 units,
    of the largest result.
    """
    plan = record(MemoryWeight.of("table", np.random.RandomState(6).standard_normal((VOCABULARY, 48))), RECURRENT[name])
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 400)
    ours, theirs = (Driver(bind(b, plan, rows=160), sequences=2) for b in (backend, ReferenceBackend()))
    for start, parts in enumerate([[(0, 1)], [(0, 63), (1, 3)], [(0, 1), (1, 60)], [(1, 150)], [(0, 1), (1, 1)]]):
        batch = [(s, tokens[start + 7 * s : start + 7 * s + count]) for s, count in parts]
        found, expected = ours.step(batch), theirs.step(batch)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    for back in (200, 195):
        for driver in (ours, theirs):
            driver.lengths[1] = back
        found, expected = (
            ours.step([(1, tokens[back - 150 : back - 100])]),
            theirs.step([(1, tokens[back - 150 : back - 100])]),
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(cpu: CpuBackend, name: str) -> None:
    check_recurrent(cpu, name)


def check_erasing(backend: Backend, step: float, channels: bool) -> None:
    """A few tokens erase the state by a large step size. The tokens after them still decay by small steps."""
    random, heads, width, count = np.random.RandomState(7), 3, 72, 150
    steps = width if channels else heads
    values = random.standard_normal((count, 3 * width + steps)).astype(np.float32)
    sizes = 10.0 ** random.uniform(-3, -1, (count, steps))
    values[:, -steps:] = np.where(random.uniform(size=sizes.shape) < 0.02, step, sizes)

    def build(r: Recorder, x: Value) -> Value:
        q, k, v = (r.slice(x, n * width, (n + 1) * width) for n in range(3))
        s = r.slice(x, 3 * width, 3 * width + steps)
        return r.linear_attention(r.scale(q, 0.2), k, v, s, None, MemoryWeight.of("rate", -np.ones(heads)), heads)

    plan = record(MemoryWeight.of("table", values), build)
    found, expected = (feed(bind(b, plan, rows=160), np.arange(count)) for b in (backend, ReferenceBackend()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("step", [1e3, 1e6, 3e38])
def test_small_decays_count_after_the_state_was_erased(cpu: CpuBackend, step: float, channels: bool) -> None:
    check_erasing(cpu, step, channels)


NONE: dict[str, Build] = {
    "silu": lambda r, x: r.activate(x, "silu"),
    "gelu": lambda r, x: r.activate(x, "gelu"),
    "sigmoid": lambda r, x: r.activate(x, "sigmoid"),
    "softcap": lambda r, x: r.softcap(x, 3.0),
    "clamp": lambda r, x: r.clamp(x, 3.0),
    "gelu, exact": lambda r, x: r.activate(x, "gelu_erf"),
    "gelu, quick": lambda r, x: r.activate(x, "gelu_quick"),
    "relu": lambda r, x: r.activate(x, "relu"),
    "relu2": lambda r, x: r.activate(x, "relu2"),
    "exp": lambda r, x: r.activate(x, "exp"),
    "signed root": lambda r, x: r.activate(x, "signed_root"),
    "xielu": lambda r, x: r.xielu(x, 0.8, 0.6, 0.5, -1e-6),
    "softplus": lambda r, x: r.glu(x, r.scale(x, 0.0), "softplus"),
    "swiglu within limits": lambda r, x: r.glu(r.scale(x, 0.0), x, "swiglu_clamp", 2.5),
    "silu within limits": lambda r, x: r.glu(x, r.scale(x, 0.0), "silu_clamp", 0.75),
    "columns": lambda r, x: r.slice(x, 1, 6, 4),
    "weigh": lambda r, x: r.mul(x, vector(24)),
    "mix": lambda r, x: r.mix(x, 4, vector(8, "mix")),
    "blend": lambda r, x: r.blend(r.concat(x, x), x, vector(24), 1e-5),
    "connect": lambda r, x: r.hyper_connection(x, 4, vector(3, "scale"), vector(24), 1e-6, 2.0, 0.0, 3),
    "situ": lambda r, x: r.glu(x, r.scale(x, 0.0), "situ", 1.5),
    "match": lambda r, x: r.match(x, r.scale(x, 2.0), 1e-5, 2),
    "excess": lambda r, x: r.gaussian_top_k(x, 0.5),
    "join": lambda r, x: r.concat(x, x, 4),
    "swiglu of gpt-oss": lambda r, x: r.glu(r.scale(x, 0.0), x, "swiglu_oai"),
    "rms": lambda r, x: r.rms_norm(x, vector(24), 1e-5),
    "layer": lambda r, x: r.layer_norm(x, vector(24), None, 1e-5),
    "linear": lambda r, x: r.linear(x, stored("w", "F16", (5, 24))),
    "attention": attend(Heads(1, 1, 8)),
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_number_is_not_lost(cpu: CpuBackend, name: str) -> None:
    """A NaN, perhaps from a damaged GGUF, must reach the sampler. In attention, a NaN in a query must also
    reach the output.
    """
    values = np.ones((2, 24), np.float32)
    values[0, 3] = np.nan
    rows = feed(bind(cpu, record(MemoryWeight.of("table", values), NONE[name])), np.array([1, 0, 1]))
    assert [np.isnan(row).any() for row in rows] == [False, True, False]


def test_every_operation_is_in_the_table() -> None:
    """The plans above cover every operation except experts, which `test_experts.py` covers."""
    plans = [record(table(case.width), case.build) for case in CASES.values()]
    plans.append(record(table(24), attend(Heads(1, 1, 8))))
    plans.append(record(table(24), lambda r, x: r.select_rows(x)))
    plans += [record(table(48), build) for build in RECURRENT.values()]
    plans.append(record(table(sum(SELECTING[0].widths)), select(SELECTING[0])))
    assert {type(op) for plan in plans for op in plan.operations} == EVERY_OPERATION - {Experts}
