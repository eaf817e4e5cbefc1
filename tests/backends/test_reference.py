"""The reference backend: every operation against independently computed results, and independence of the
sequences in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localllm import quant
from localllm.backends.base import Backend, BackendError, CacheTypes, Executable, Limits
from localllm.backends.checks import check_batch
from localllm.backends.reference import ReferenceBackend, ReferenceExecutable
from localllm.backends.reference_operations import OPERATIONS
from localllm.plan import BLOCK, Batch, Plan, Recorder, Rope, Value, rope_table
from tests.models.support import BOUNDARIES, EVERY_OPERATION, Driver, MemoryWeight, bind_reference

random = np.random.RandomState(3)
TABLE = random.standard_normal((11, 8)).astype(np.float32)
TOKENS = [3, 1, 4, 1, 5]
X = TABLE[TOKENS].astype(np.float64)  # (T, 8): the embeddings of TOKENS


def weight(values: Any, name: str = "w", format: str = "F32") -> MemoryWeight:
    return MemoryWeight.of(name, np.asarray(values), format)


def run(build: Callable[[Recorder, Value], Value], tokens: list[int] = TOKENS, cache_type: str = "f32") -> np.ndarray:
    """Return the results of the recorded operations for `tokens` at positions 0, 1, ..."""
    return Driver(bind(build, cache_type)).step([(0, tokens)])


def bind(build: Callable[[Recorder, Value], Value], cache_type: str = "f32") -> ReferenceExecutable:
    r = Recorder()
    out = build(r, r.embed(weight(TABLE, "table")))
    return bind_reference(r.finish(out), cache_type, positions=2 * BLOCK)


def close(ours: np.ndarray, truth: np.ndarray) -> None:
    np.testing.assert_allclose(ours, truth, rtol=2e-7, atol=1e-7)  # one float32 rounding per operation


def test_it_is_a_backend() -> None:
    backend: Backend = ReferenceBackend()
    executable: Executable = bind(lambda r, x: x)
    assert backend.name in backend.describe()
    assert executable.limits.positions == 2 * BLOCK
    assert 0 < executable.read_bandwidth() < 1e15
    backend.close()


def test_progress_counts_weights() -> None:
    r = Recorder()
    plan = r.finish(attend(r, r.embed(weight(TABLE, "table"))))
    heard: list[tuple[str, int, int]] = []
    ReferenceBackend().bind(plan, Limits(1, 1, 1, 1), progress=lambda *news: heard.append(news))
    assert heard == [("loading weights", i, 3) for i in (1, 2, 3)]


def test_every_operation_is_in_the_table() -> None:
    assert set(OPERATIONS) == EVERY_OPERATION | BOUNDARIES


@pytest.mark.parametrize("format", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_embed_gives_the_dequantized_row(format: str) -> None:
    values = random.standard_normal((5, 64)).astype(np.float32)
    r = Recorder()
    table = weight(values, "table", format)
    executable = bind_reference(r.finish(r.embed(table)), positions=64)
    truth = quant.dequantize(table.rows, format)
    np.testing.assert_array_equal(Driver(executable).step([(0, [4, 0, 4])]), truth[[4, 0, 4]])


def test_rms_norm() -> None:
    w = random.standard_normal(8)
    truth = X / np.sqrt(np.array([[sum(v * v for v in row) / 8 + 0.01] for row in X])) * w.astype(np.float32)
    close(run(lambda r, x: r.rms_norm(x, weight(w), 0.01)), truth)


def test_rms_norm_of_groups_is_the_norm_of_every_slice() -> None:
    w = random.standard_normal(4)
    halves = [X[:, :4], X[:, 4:]]
    truth = np.hstack([h / np.sqrt((h**2).mean(1, keepdims=True) + 1e-5) * w.astype(np.float32) for h in halves])
    close(run(lambda r, x: r.rms_norm(x, weight(w), 1e-5, groups=2)), truth)


def test_layer_norm() -> None:
    w, b = (random.standard_normal(8).astype(np.float32) for _ in range(2))
    truth = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5) * w + b
    close(run(lambda r, x: r.layer_norm(x, weight(w), weight(b, "b"), 1e-5)), truth)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_every_group_may_have_weights_of_its_own(kind: str) -> None:
    w = random.standard_normal((2, 4)).astype(np.float32)
    halves = [X[:, :4], X[:, 4:]]
    if kind == "layer":
        halves = [h - h.mean(1, keepdims=True) for h in halves]
    normed = [h / np.sqrt((h**2).mean(1, keepdims=True) + 1e-5) for h in halves]
    truth = np.hstack([h * w[i] for i, h in enumerate(normed)])
    if kind == "rms":
        close(run(lambda r, x: r.rms_norm(x, weight(w), 1e-5, groups=2)), truth)
    else:
        close(run(lambda r, x: r.layer_norm(x, weight(w), None, 1e-5, groups=2)), truth)


def test_linear_scales_the_product_and_not_the_bias() -> None:
    w, b = random.standard_normal((6, 8)).astype(np.float32), random.standard_normal(6).astype(np.float32)
    truth = np.array([[sum(X[t, i] * w[o, i] for i in range(8)) * 0.25 + b[o] for o in range(6)] for t in range(5)])
    close(run(lambda r, x: r.linear(x, weight(w), weight(b, "b"), 0.25)), truth)


@pytest.mark.parametrize(("style", "pairs"), [("interleaved", [(0, 1), (2, 3)]), ("neox", [(0, 2), (1, 3)])])
def test_rotate_turns_pairs_and_leaves_the_rest(style: Any, pairs: list[tuple[int, int]]) -> None:
    """The head has 8 dimensions. Four of them are rotated, and the others stay the same."""
    truth = X.copy()
    for position, row in enumerate(X):
        for (a, b), frequency in zip(pairs, (1.0, 0.3), strict=True):
            cos, sin = 1.5 * math.cos(position * frequency), 1.5 * math.sin(position * frequency)
            truth[position, a] = row[a] * cos - row[b] * sin
            truth[position, b] = row[a] * sin + row[b] * cos
    close(run(lambda r, x: r.rotate(x, 8, Rope(style, 4, (1.0, 0.3), 1.5))), truth)


def test_rotate_turns_every_head_alike() -> None:
    swapped = [4, 5, 6, 7, 0, 1, 2, 3]
    rotated = run(lambda r, x: r.rotate(x, 4, Rope("interleaved", 4, (1.0, 0.1))))
    r = Recorder()
    x = r.embed(weight(TABLE[:, swapped], "table"))
    other = bind_reference(r.finish(r.rotate(x, 4, Rope("interleaved", 4, (1.0, 0.1)))))
    np.testing.assert_array_equal(Driver(other).step([(0, TOKENS)]), rotated[:, swapped])


def test_rope_temperature_grows_with_the_logarithm_of_whole_lengths() -> None:
    rope = Rope("interleaved", 2, (0.0,), 2.0, 0.5, 10)
    cos, sin = rope_table(rope, np.array([0, 9, 10, 29, 30], np.int32))
    np.testing.assert_allclose(cos[:, 0], 2.0 * (1.0 + 0.5 * np.log([1, 1, 2, 3, 4])), rtol=1e-15)
    assert not sin.any()


def attend(r: Recorder, x: Value, window: int = 0, softcap: float = 0.0, sinks: MemoryWeight | None = None) -> Value:
    """Build four heads of dimension 2 over two KV heads. Keys are the first half of the input, values the second."""
    half = np.eye(8)
    r.append(r.linear(x, weight(half[:4], "k")), r.linear(x, weight(half[4:], "v")), kv_heads=2)
    return r.attention(x, 0, heads=4, scale=0.7, window=window, softcap=softcap, sinks=sinks)


def attention_by_hand(
    x: np.ndarray,
    cached: np.ndarray | None = None,
    first: Callable[[int], int] = lambda t: 0,
    cap: Callable[[float], float] = lambda score: score,
    sinks: Sequence[float] = (-math.inf,) * 4,
) -> np.ndarray:
    """Return attention computed one softmax at a time: queries x (T, 8) over their cache from position first(t) on."""
    cached = x if cached is None else cached
    out = np.zeros_like(x)
    for t in range(len(x)):
        for head in range(4):
            shared = slice(2 * (head // 2), 2 * (head // 2) + 2)
            q = x[t, 2 * head : 2 * head + 2]
            scores = {p: math.exp(cap(0.7 * float(q @ cached[p, :4][shared]))) for p in range(first(t), t + 1)}
            mixed = sum(s * cached[p, 4:][shared] for p, s in scores.items())
            out[t, 2 * head : 2 * head + 2] = np.asarray(mixed) / (sum(scores.values()) + math.exp(sinks[head]))
    return out


def test_attention_is_causal_and_groups_heads() -> None:
    close(run(attend), attention_by_hand(X))


def test_attention_over_several_blocks_and_any_chunking() -> None:
    tokens = random.randint(0, 11, BLOCK + 9)
    truth = attention_by_hand(TABLE[tokens].astype(np.float64))
    driver = Driver(bind(attend))
    chunks = [driver.step([(0, tokens[i : i + 13])]) for i in range(0, len(tokens), 13)]
    close(np.concatenate(chunks), truth)


def test_an_f16_cache_rounds_keys_and_values_and_not_queries() -> None:
    close(run(attend, cache_type="f16"), attention_by_hand(X, X.astype(np.float16).astype(np.float64)))
    assert np.abs(run(attend, cache_type="f16") - attention_by_hand(X)).max() > 1e-5


def test_a_window_of_three_shows_a_row_itself_and_the_two_before() -> None:
    truth = attention_by_hand(X, first=lambda t: max(0, t - 2))
    close(run(lambda r, x: attend(r, x, window=3)), truth)
    assert np.abs(truth - attention_by_hand(X))[3:].min() > 1e-4


def test_a_window_over_several_blocks_and_any_chunking() -> None:
    tokens = random.randint(0, 11, BLOCK + 9)
    truth = attention_by_hand(TABLE[tokens].astype(np.float64), first=lambda t: max(0, t - 6))
    driver = Driver(bind(lambda r, x: attend(r, x, window=7)))
    close(np.concatenate([driver.step([(0, tokens[i : i + 13])]) for i in range(0, len(tokens), 13)]), truth)


def test_a_softcap_bends_scores_after_scaling() -> None:
    truth = attention_by_hand(X, cap=lambda score: 0.5 * math.tanh(score / 0.5))
    close(run(lambda r, x: attend(r, x, softcap=0.5)), truth)


def test_sinks_take_a_share_of_every_heads_softmax() -> None:
    # A sink above every score leaves almost no weight; a sink far below changes nothing.
    sinks = [-1.0, 0.5, 90.0, -90.0]
    result = run(lambda r, x: attend(r, x, sinks=weight(sinks, "sinks")))
    close(result, attention_by_hand(X, sinks=sinks))
    assert np.abs(result[:, 4:6]).max() < 1e-30
    close(result[:, 6:], attention_by_hand(X)[:, 6:])


def test_glu_activations() -> None:
    silu = X / (1.0 + np.exp(-X))
    gelu = 0.5 * X * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (X + 0.044715 * X**3)))
    close(run(lambda r, x: r.glu(x, r.scale(x, 2.0), "silu")), silu * 2.0 * X)
    close(run(lambda r, x: r.glu(x, r.scale(x, 2.0), "gelu")), gelu * 2.0 * X)


def test_a_glu_of_gpt_oss_is_clamped_on_both_sides() -> None:
    gate, up = np.minimum(9.0 * X, 7.0), np.clip(-8.0 * X, -7.0, 7.0)
    truth = gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)
    assert (9.0 * X).max() > 7.0
    assert np.abs(8.0 * X).max() > 7.0
    close(run(lambda r, x: r.glu(r.scale(x, 9.0), r.scale(x, -8.0), "swiglu_oai")), truth)


def test_a_gate_of_width_one_gates_the_row() -> None:
    w = random.standard_normal((1, 8)).astype(np.float32)
    truth = X / (1.0 + np.exp(-X @ w.T))
    close(run(lambda r, x: r.glu(r.linear(x, weight(w)), x, "sigmoid")), truth)


def test_activate_and_softcap() -> None:
    close(run(lambda r, x: r.activate(x, "silu")), X / (1.0 + np.exp(-X)))
    close(run(lambda r, x: r.softcap(x, 0.8)), 0.8 * np.tanh(X / 0.8))


def test_add_scale_and_select_rows() -> None:
    close(run(lambda r, x: r.add(x, r.scale(x, -0.5))), X * 0.5)
    driver = Driver(bind(lambda r, x: r.select_rows(x)))
    np.testing.assert_array_equal(driver.step([(0, TOKENS)], logit_rows=[4, 0]), TABLE[[5, 3]])
    assert driver.step([(0, TOKENS)], logit_rows=[]).shape == (0, 8)


def test_copied_blocks_carry_a_fork_on() -> None:
    """Sequence 1 starts from a copy of sequence 0's block. Then both continue separately."""
    driver = Driver(bind(attend), sequences=2)
    driver.step([(0, TOKENS)])
    driver.executable.copy_blocks(driver.tables[0, :1], driver.tables[1, :1])
    driver.lengths[1] = len(TOKENS)
    rows = driver.step([(0, [9]), (1, [2])])
    for row, last in zip(rows, (9, 2), strict=True):
        close(row, attention_by_hand(TABLE[[*TOKENS, last]].astype(np.float64))[-1])


def test_copied_blocks_must_exist() -> None:
    executable = bind(attend)
    with pytest.raises(BackendError, match="copy_blocks: target must list block numbers below 4"):
        executable.copy_blocks(np.array([0]), np.array([4]))
    with pytest.raises(BackendError, match="copy_blocks: target"):
        executable.copy_blocks(np.array([0]), np.array([1, 2]))


BATCH = Batch(
    tokens=np.array([1, 2, 3], np.int32),
    positions=np.array([0, 1, 0], np.int32),
    slots=np.array([64, 65, 0], np.int32),
    sequence=np.array([0, 0, 1], np.int32),
    tables=np.array([[1], [0]], np.int32),
    logit_rows=np.array([2], np.int32),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [1, 2, 11]}, "tokens must be from 0 to 10, found 1 to 11"),
        ({"tokens": [1, -1, 0]}, "tokens must be from 0 to 10, found -1 to 1"),
        ({"positions": [0, 1, 128]}, "positions must be from 0 to 127"),
        ({"positions": [0, 1, 64]}, "position 64 is past its table of 1 blocks"),
        ({"positions": [0, 1]}, "positions must be a vector of one number per row"),
        ({"slots": [64, 65, 256]}, "slots must be from 0 to 255"),
        ({"slots": [64, 66, 0]}, "every row needs a separate slot"),
        ({"sequence": [0, 0, 2]}, "sequence must be from 0 to 1"),
        ({"sequence": [0, 1, 0], "slots": [64, 1, 64]}, "every row needs a separate slot"),
        ({"sequence": [0, 1, 0], "slots": [64, 1, 66], "positions": [0, 1, 2]}, "must stand together"),
        ({"slots": [65, 64, 0], "positions": [1, 0, 0]}, "in order of position"),
        ({"tables": [[4], [0]]}, "a table names a block outside 0 to 3"),
        # Change the block table of the last token's sequence, which no other token uses.
        ({"tables": [[1], [-1]]}, "a table names a block outside 0 to 3"),
        ({"logit_rows": [3]}, "logit_rows must be from 0 to 2"),
        ({"logit_rows": [0, 1, 2]}, "3 rows of logits, bound for 2"),
        ({f: [] for f in ("tokens", "positions", "slots", "sequence", "logit_rows")}, "0 rows, bound for 1 to 4"),
        (
            {
                "tokens": [0] * 5,
                "positions": list(range(5)),
                "slots": list(range(5)),
                "sequence": [1] * 5,
            },
            "5 rows, bound for 1 to 4",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    r = Recorder()
    plan = r.finish(r.select_rows(attend(r, r.embed(weight(TABLE, "table")))))
    executable = ReferenceBackend().bind(
        plan, Limits(rows=4, logit_rows=2, blocks=4, positions=128), CacheTypes("f32", "f32")
    )
    assert executable.step(BATCH).shape == (1, 8)
    with pytest.raises(BackendError, match=f"^batch: .*{message}"):
        executable.step(replace(BATCH, **{name: np.array(values, np.int32) for name, values in changes.items()}))


ROW = Batch(
    tokens=np.array([1], np.int32),
    positions=np.array([65], np.int32),
    slots=np.array([129], np.int32),
    sequence=np.array([0], np.int32),
    tables=np.array([[1, 2]], np.int32),
    logit_rows=np.array([0], np.int32),
)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *[(name, [wrong]) for name in ("tokens", "positions", "slots", "sequence") for wrong in (-1, 1000)],
        *[("tables", wrong) for wrong in ([[1]], [[1, 3]], [[1, 4]], [[4, 2]], [[-1, 2]], [[1, -1]])],
        *[("logit_rows", wrong) for wrong in ([1], [-1], [0, 0, 0])],
        ("slots", [128]),
        ("sequence", [1]),
        ("tokens", [[1]]),
        ("positions", [65, 66]),
    ],
)
def test_a_single_row_that_does_not_fit_is_refused(name: str, values: list[Any]) -> None:
    """A step of a single token has a separate check, for decode speed."""
    limits = Limits(rows=4, logit_rows=2, blocks=4, positions=128)
    check_batch(ROW, limits, 11)
    check_batch(replace(ROW, logit_rows=np.array([], np.int32)), limits, 11)
    with pytest.raises(BackendError, match=r"^batch: "):
        check_batch(replace(ROW, **{name: np.array(values, np.int32)}), limits, 11)


def test_what_cannot_be_bound_is_said() -> None:
    r = Recorder()
    plan: Plan = r.finish(r.embed(weight(TABLE, "table")))
    backend, limits = ReferenceBackend(), Limits(1, 1, 1, 1)
    with pytest.raises(BackendError, match="cache type 'q3' is not supported; there are: "):
        backend.bind(plan, limits, CacheTypes("q3", "f16"))
    with pytest.raises(BackendError, match="limits: blocks must be at least 1, found 0"):
        backend.bind(plan, replace(limits, blocks=0))
    r = Recorder()
    bad = MemoryWeight("table", "Q9_9", (2, 8), np.zeros((2, 8), np.uint8))
    with pytest.raises(BackendError, match="table: unknown format"):
        backend.bind(r.finish(r.embed(bad)), limits)


def test_a_closed_executable_says_so() -> None:
    executable = bind(attend)
    executable.close()
    with pytest.raises(BackendError, match="closed"):
        Driver(executable).step([(0, TOKENS)])


def test_memory_is_what_is_allocated() -> None:
    memory = bind(attend, "f16").memory
    assert memory.weights == 4 * (11 * 8 + 4 * 8 + 4 * 8)
    assert memory.weights_per_token == 4 * (8 + 4 * 8 + 4 * 8)
    assert memory.cache_per_token == 2 * (4 + 4)
    assert memory.cache == memory.cache_per_token * 4 * BLOCK


def test_what_has_fallen_out_of_a_window_is_not_looked_at() -> None:
    """With a window of 65, position 200 sees positions from 136 on, in blocks 2 and 3 of its table."""
    limits = Limits(rows=1, logit_rows=1, blocks=4, positions=256, window_blocks=2)
    one = np.zeros(1, np.int32)
    batch = Batch(one, one + 200, one + 8, one, np.array([[3, 2, 1, 0]], np.int32), one, one + 8)
    check_batch(replace(batch, window_tables=np.array([[99, -1, 1, 0]], np.int32)), limits, 1, 65)
    with pytest.raises(BackendError, match="a window table names a block outside 0 to 1"):
        check_batch(replace(batch, window_tables=np.array([[99, -1, 2, 0]], np.int32)), limits, 1, 65)
