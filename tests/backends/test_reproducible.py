"""A token's logits depend only on the preceding tokens, bit for bit. The tests compare hashes of logits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest

from localllm.backends.base import CacheTypes, Executable
from localllm.backends.cpu.backend import CpuBackend
from localllm.plan import BLOCK, Plan
from tests.backends import support
from tests.backends.support import Shape, bind, feed, plan, tokens
from tests.models.kit import KIT
from tests.models.support import Driver, MemoryWeight, plan_of

COUNT = 150  # tokens: three cache blocks
FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0"]
SHAPES = {
    "llama": Shape(biased=True),
    # Three query heads per KV head, with a dimension that fills no SIMD vector.
    "qwen3": Shape("qwen3", heads=12, kv_heads=4, head_dim=8, tied=True),
}
RECURRENT = [
    "lfm2-dense", "qwen35-mtp", "jamba-dense", "granitehybrid-dense", "kimi-linear-moe", "minimax-01-moe", "rwkv6",
    "rwkv7",
]  # fmt: skip
SPARSE = [  # models with sparse attention, which selects few of many positions
    "deepseek32-8of40", "hy_v4-8of40", "glm5-next-8of40", "qwen4exp-8of40", "deepseek4-8of50",
]  # fmt: skip
MODELS = [
    *[(format, "llama") for format in FORMATS],
    ("Q8_0", "qwen3"),
    *[("kit", name) for name in (*RECURRENT, *SPARSE)],
]


def digest(logits: np.ndarray) -> str:
    return hashlib.sha256(logits.tobytes()).hexdigest()


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: "-".join(m))
def model(request: pytest.FixtureRequest) -> Plan:
    format, shape = request.param
    return plan_of(*KIT[shape].loaded()) if format == "kit" else plan(format, SHAPES[shape])


@pytest.fixture(scope="module")
def executable(cpu: CpuBackend, model: Plan) -> Iterator[Executable]:
    bound = bind(cpu, model, rows=COUNT, blocks=12)
    yield bound
    bound.close()


@pytest.fixture(scope="module")
def truth(executable: Executable) -> np.ndarray:
    """Return the logits of all tokens in one forward pass on two threads."""
    logits = feed(executable, tokens(COUNT))
    assert np.isfinite(logits).all()
    assert len(np.unique(logits[:, 0])) > COUNT // 2  # equal tokens at different positions have different logits
    return logits


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(model: Plan, truth: np.ndarray, threads: int) -> None:
    """A prompt is evaluated at once, then token by token, on one thread up to more threads than cores."""
    backend = CpuBackend(threads)
    bound = bind(backend, model, rows=COUNT)
    assert digest(feed(bound, tokens(COUNT))) == digest(truth)
    assert digest(feed(bound, tokens(COUNT), [COUNT - 20] + [1] * 20)) == digest(truth)
    backend.close()


@pytest.mark.parametrize("sizes", [[1] * COUNT, [2] * 75, [3] * 50, [5, 1, 63, 1, 7], [64], [65, 64], [13] * 11])
def test_any_chunking_of_a_prompt(executable: Executable, truth: np.ndarray, sizes: list[int]) -> None:
    assert digest(feed(executable, tokens(COUNT), sizes)) == digest(truth)


def test_which_rows_want_logits(executable: Executable, truth: np.ndarray) -> None:
    for wanted in ([COUNT - 1], [0], [7, 3, 149, 3], list(range(100, COUNT))):
        assert digest(Driver(executable).step([(0, tokens(COUNT))], logit_rows=wanted)) == digest(truth[wanted])


def test_mates_in_the_batch(executable: Executable, truth: np.ndarray) -> None:
    """Two other sequences come before and after this sequence, in batches that are split differently. The KV
    cache blocks of the three sequences are interleaved.
    """
    driver, mine, other = Driver(executable, sequences=3), tokens(COUNT), tokens(400, seed=9)
    found, at = [], 0
    for step, size in enumerate([1, 6, 30, 2, 1, 50, 1, 1, 40, 18]):
        before, behind = other[9 * step : 10 * step + 1], other[200 + step : 203 + step]
        rows = driver.step([(1, before), (0, mine[at : at + size]), (2, behind)])
        found.append(rows[len(before) : len(before) + size])
        at += size
    assert at == COUNT
    assert digest(np.concatenate(found)) == digest(truth)


def scramble(executable: Executable) -> None:
    """Fill every entry of the KV cache with keys and values of another conversation."""
    feed(executable, tokens(12 * BLOCK, seed=3), [COUNT] * 5)


def test_what_was_in_the_cache_before(executable: Executable, truth: np.ndarray) -> None:
    scramble(executable)
    driver = Driver(executable)
    driver.step([(0, tokens(12, seed=4))])
    driver.lengths[0] = 0  # the state after a rewind: the same blocks are used again
    assert digest(driver.step([(0, tokens(COUNT))])) == digest(truth)


@pytest.mark.parametrize("kept", [1, BLOCK - 1, BLOCK, BLOCK + 1, COUNT - 1])
def test_a_prefix_that_is_reused(executable: Executable, truth: np.ndarray, kept: int) -> None:
    """A sequence continues differently, rewinds to `kept` tokens, and then continues as before."""
    scramble(executable)
    driver, mine = Driver(executable), tokens(COUNT)
    driver.step([(0, mine[:kept])])
    driver.step([(0, tokens(20, seed=8))])
    driver.lengths[0] = kept
    assert digest(driver.step([(0, mine[kept:])])) == digest(truth[kept:])


@pytest.mark.parametrize("shared", [BLOCK, BLOCK + 9])
def test_a_fork_and_its_copy_on_write(executable: Executable, truth: np.ndarray, shared: int) -> None:
    """A fork shares full blocks, and gets a copy of the block that both sequences write."""
    scramble(executable)
    driver, mine = Driver(executable, sequences=2), tokens(COUNT)
    driver.step([(0, mine[:shared])])
    driver.tables[1, : shared // BLOCK] = driver.tables[0, : shared // BLOCK]
    if shared % BLOCK:
        last = slice(shared // BLOCK, shared // BLOCK + 1)
        executable.copy_blocks(driver.tables[0, last], driver.tables[1, last])
    driver.lengths[1], driver.histories[1] = shared, mine[:shared].tolist()
    both = driver.step([(0, tokens(30, seed=8)), (1, mine[shared:])])
    assert digest(both[30:]) == digest(truth[shared:])


def test_two_models_on_one_backend(cpu: CpuBackend, executable: Executable, truth: np.ndarray) -> None:
    """Alternating steps of a model and its draft model do not affect each other."""
    other = bind(cpu, plan("Q8_0", Shape(layers=1), seed=2))
    driver, rival = Driver(executable), Driver(other)
    alone = feed(other, tokens(60, seed=2))
    pieces, rivals = [], []
    for i in range(0, COUNT, 25):
        pieces.append(driver.step([(0, tokens(COUNT)[i : i + 25])]))
        rivals.append(rival.step([(0, tokens(60, seed=2)[i // 25 * 10 : i // 25 * 10 + 10])]))
    assert digest(np.concatenate(pieces)) == digest(truth)
    assert digest(np.concatenate(rivals)) == digest(alone)
    other.close()


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("size", [1e34, 1e37])
def test_scores_below_any_usual_one_see_no_other_text(cpu: CpuBackend, kind: str, size: float) -> None:
    """A score of -1e35, or an overflow, must still outweigh positions that the attention mask hides."""
    metadata, weights = support.model("F32", SHAPES["llama"])
    for name, weight in weights.items():
        if name.endswith("attn_q.weight"):
            weights[name] = MemoryWeight.of(name, weight.values() * np.float32(size))
    bound = bind(cpu, plan_of(metadata, weights), rows=COUNT, cache=CacheTypes(kind, kind))
    before = feed(bound, tokens(20))
    feed(bound, tokens(COUNT, seed=9))
    after = feed(bound, tokens(20))
    bound.close()
    assert np.array_equal(before, after, equal_nan=True)
