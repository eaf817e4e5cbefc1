"""A plan that is split between a GPU and the CPU: logits of every split, moved caches, batches of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError, Executable, Limits, TopKExecutable
from localllm.backends.hybrid.backend import HybridBackend
from localllm.backends.hybrid.cut import Placement, cut_plan, most_layers
from localllm.backends.hybrid.executable import HybridExecutable
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, Batch, Plan
from tests.backends.gpu.conftest import pocl
from tests.backends.support import Shape, plan, tokens
from tests.backends.support import model as plan_model
from tests.conftest import reference
from tests.models.kit import KIT
from tests.models.support import Driver, bind_reference, nmse, open_model, plan_of
from tests.models.test_reference_models import FILES
from tests.models.tiny import TOKENS, VARIANTS
from tests.models.tiny_families import FAMILIES

Pair = tuple[Backend, Backend]
LIMITS = Limits(64, 64, 4, 4 * BLOCK)
MODEL = Shape(layers=3)


def bound(pair: Pair, model: Plan, layers: int, host_experts: int = 0, limits: Limits = LIMITS) -> Executable:
    return HybridBackend(*pair, Placement(layers, host_experts)).bind(model, limits)


def logits(executable: Executable, ids: Sequence[int], prompt: int) -> np.ndarray:
    """Return the logits of every token: a prompt in one batch, then one token at a time."""
    driver = Driver(executable)
    rows = [driver.step([(0, ids[:prompt])]), *(driver.step([(0, [token])]) for token in ids[prompt:])]
    executable.close()
    return np.concatenate(rows)


def placements(model: Plan, experts: bool) -> list[tuple[int, int]]:
    """Return every placement that puts operations on both devices."""
    most = most_layers(model)
    cuts = [(layers, 0) for layers in range(1, most)]
    return cuts + [(layers, n) for layers in (most - 1, most) for n in (1, most)] if experts else cuts


TINY = {**{name: VARIANTS[name] for name in ("llama plain", "qwen3")}, **FAMILIES}


@pytest.mark.parametrize(
    "name", ["llama plain", "qwen3", "llama experts", "glm4moe", "gpt-oss", "gemma2", "gemma3 pattern", "olmo3"]
)
def test_every_cut_of_a_tiny_model(pair: Pair, name: str) -> None:
    """The models are dense or mixtures of experts, with sliding-window attention, soft caps and tied embeddings."""
    model = plan_of(*TINY[name]())
    truth = logits(bind_reference(model, "f16", positions=64), TOKENS.tolist(), 16)
    for layers, host_experts in placements(model, "experts" in name or name in ("glm4moe", "gpt-oss")):
        found = bound(pair, model, layers, host_experts)
        # The first layer of glm4moe is dense.
        assert isinstance(found, HybridExecutable) or (name == "glm4moe" and host_experts == 1)
        assert nmse(logits(found, TOKENS.tolist(), 16), truth).max() < 1e-5, (layers, host_experts)


@pytest.mark.parametrize("file", FILES)
def test_every_cut_of_the_reference_models(pair: Pair, file: str) -> None:
    model = plan_of(*open_model(reference("archs", f"{file}.gguf")))
    truth = np.load(reference("archs", f"{file}.npz"))
    for layers, host_experts in placements(model, file.endswith("-moe")):
        ours = logits(bound(pair, model, layers, host_experts), truth["tokens"].tolist(), 32)
        assert nmse(ours, truth["logits"]).max() < 5e-6, (layers, host_experts)


def test_what_a_layer_looks_up_is_read_for_its_side(pair: Pair) -> None:
    """The second of three layers adds n-gram embeddings. That layer is on the host in one split, and on the
    GPU in another.
    """
    model = plan_of(*KIT["qwen4exp-8of40"].loaded())
    truth = logits(bind_reference(model, "f16", positions=64), TOKENS.tolist(), 16)
    sides = set()
    for layers, host_experts in placements(model, experts=True):
        where = cut_plan(model, Placement(layers, host_experts)).plans
        sides |= {side for side, own in where.items() if own.lookups}
        assert nmse(logits(bound(pair, model, layers, host_experts), TOKENS.tolist(), 16), truth).max() < 1e-5
    assert sides == {"host", "gpu"}


@pytest.mark.parametrize("name", ["llama plain", "llama experts", "gpt-oss"])
def test_every_split_has_the_bits_of_the_whole_plan_on_the_reference_backend(name: str) -> None:
    """Both parts run on the reference backend, one after the other, so the test needs no device."""
    model = plan_of(*TINY[name]())
    whole = ReferenceBackend().bind(model, LIMITS)
    truth = logits(whole, TOKENS.tolist(), 16)
    for layers, host_experts in placements(model, experts=name != "llama plain"):
        split = HybridBackend(ReferenceBackend(), ReferenceBackend(), Placement(layers, host_experts))
        found = split.bind(model, LIMITS)
        assert isinstance(found, HybridExecutable)
        assert found.block_bytes == whole.block_bytes
        np.testing.assert_array_equal(logits(found, TOKENS.tolist(), 16), truth)


def test_nothing_and_all_of_a_plan_need_one_backend(pair: Pair) -> None:
    model = plan("Q8_0", MODEL)
    for layers, side in ((0, 1), (4, 0), (99, 0)):
        found = bound(pair, model, layers)
        alone = pair[side].bind(model, LIMITS)
        assert type(found) is type(alone)
        assert found.memory == alone.memory
        for executable in (found, alone):
            executable.close()


def test_rows_do_not_depend_on_what_else_is_in_the_batch(pair: Pair) -> None:
    """The GPU runs long and short sequences in chunks. Every token has the same bits as without the other sequences."""
    model, ids = plan("Q4_0", MODEL), tokens(60)
    alone = []
    for s in range(3):
        found = bound(pair, model, 2, limits=Limits(64, 64, 6, 2 * BLOCK))
        driver = Driver(found)
        alone.append([driver.step([(0, ids[s : s + 30])]), driver.step([(0, ids[s + 30 : s + 32])])])
        found.close()
    together = bound(pair, model, 2, limits=Limits(64, 64, 6, 2 * BLOCK))
    driver = Driver(together, sequences=3)
    driver.step([(0, ids[:30])])
    driver.step([(1, ids[1:31])])
    rows = driver.step([(0, ids[30:32]), (2, ids[2:32]), (1, ids[31:33])])
    assert (rows[:2] == alone[0][1]).all()
    assert (rows[2:32] == alone[2][0]).all()
    assert (rows[32:] == alone[1][1]).all()
    last = driver.step([(0, ids[:1]), (2, ids[32:52])], logit_rows=[20])
    assert last.shape == (1, 97)
    together.close()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_texts_stay_whole_where_rows_see_later_ones(pair: Pair, layers: int) -> None:
    """Bidirectional attention needs all tokens of a text in one chunk. This must also work if the GPU runs only the
    operations after the last layer.
    """
    metadata, tensors = plan_model("F32", MODEL)
    model = plan_of(metadata | {"llama.attention.causal": False}, tensors)
    texts = [tokens(count, seed=count) for count in (7, 11, 25, 5)]
    drivers = [Driver(bound(pair, model, layers), sequences=4), Driver(ReferenceBackend().bind(model, LIMITS), 4)]
    ours, theirs = (driver.step(list(enumerate(texts))) for driver in drivers)
    assert nmse(ours, theirs).max() < 1e-4


def test_the_largest_logits_are_those_of_the_whole_row(pair: Pair) -> None:
    found = bound(pair, plan("Q8_0", MODEL), 2)
    assert isinstance(found, TopKExecutable)
    assert found.max_top_k >= 40
    ids = tokens(20)
    rows = np.arange(20, dtype=np.int32)
    batch = Batch(ids.astype(np.int32), rows, rows, 0 * rows, np.arange(4, dtype=np.int32)[None], rows[[4, 19]])
    whole = found.step(batch).copy()
    largest = found.step_top_k(batch, 5)
    order = np.argsort(-whole, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(largest.ids, order)
    np.testing.assert_array_equal(largest.logits, np.take_along_axis(whole, order, axis=1))
    found.close()


def test_blocks_that_moved_give_the_same_bits_and_every_layer_knows_its_side(pair: Pair) -> None:
    model, ids = plan("Q8_0", MODEL), tokens(150)
    limits = Limits(160, 160, 6, 6 * BLOCK)
    there, here = (bound(pair, model, 2, limits=limits) for _ in range(2))
    truth = Driver(there).step([(0, ids)])[2 * BLOCK :]
    host, card = (backend.bind(model, limits) for backend in reversed(pair))
    assert there.cache_layout == here.cache_layout == f"2 of {host.cache_layout}, 1 of {card.cache_layout}"
    assert there.block_bytes == (*host.block_bytes[:2], card.block_bytes[2])
    for layer in range(3):
        here.write_blocks(layer, np.array([4, 1]), there.read_blocks(layer, np.array([0, 1])))
    here.copy_blocks(np.array([4]), np.array([5]))  # copied in the same way as by a fork
    driver = Driver(here)
    driver.tables, driver.lengths = np.array([[5, 1, 3]], np.int32), [2 * BLOCK]
    assert nmse(driver.step([(0, ids[2 * BLOCK :])]), truth).max() < 1e-9  # the GPU runs chunks of other sizes
    for executable in (there, here, host, card):
        executable.close()


def test_layers_with_a_window_keep_blocks_of_their_own_on_both_sides(pair: Pair) -> None:
    """The block tables of sliding-window layers are separate from the full tables, and name other blocks."""
    model = plan_of(*FAMILIES["gemma3 pattern"]())
    truth = logits(bind_reference(model, "f16", positions=64), TOKENS.tolist(), 24)
    ids = TOKENS.astype(np.int32)
    rows = np.arange(len(ids), dtype=np.int32)
    batch = Batch(
        ids, rows, rows + BLOCK, 0 * rows, np.array([[1, 2]], np.int32), rows, rows, np.array([[0, 1]], np.int32)
    )
    for layers in (1, 2, 3):
        found = bound(pair, model, layers, limits=Limits(64, 64, 4, 2 * BLOCK, window_blocks=2))
        assert nmse(found.step(batch), truth).max() < 1e-5
        found.close()


def test_what_needs_one_place_is_refused(pair: Pair) -> None:
    model = plan("Q8_0", MODEL)
    backend = HybridBackend(*pair, Placement(2))
    with pytest.raises(BackendError, match="leave gpu_layers and n_cpu_moe out"):
        backend.bind(model, LIMITS, keep=[model.values[0]])
    found = backend.bind(model, LIMITS)
    for refused in (lambda: found.value(model.values[0]), lambda: found.routing(model.values[0])):
        with pytest.raises(BackendError, match="leave gpu_layers and n_cpu_moe out"):
            refused()
    found.close()


@dataclass
class Remembering:
    """A backend that keeps a list of its executables."""

    backend: Backend
    bound: list[Executable]
    name: str = "cpu"

    def describe(self) -> str:
        return self.backend.describe()

    def bind(self, *arguments: Any) -> Executable:
        self.bound.append(self.backend.bind(*arguments))
        return self.bound[-1]

    def close(self) -> None: ...


def test_one_side_is_closed_where_the_other_does_not_bind(pair: Pair) -> None:
    host, small = Remembering(pair[1], []), pocl()
    small.device.facts = replace(small.device.facts, local_memory=64)
    model = plan("Q8_0", MODEL)
    with pytest.raises(BackendError, match="64 bytes of local memory"):
        HybridBackend(small, host, Placement(2)).bind(model, LIMITS)
    (left,) = host.bound
    with pytest.raises(BackendError, match="closed"):
        left.read_blocks(0, np.array([0]))
    small.close()


def test_memory_and_pace_are_of_both(pair: Pair) -> None:
    found = bound(pair, plan("Q8_0", Shape(width=256, ffn=512, layers=3)), 2)
    assert found.memory.weights > 0
    assert found.memory.cache == 4 * sum(found.block_bytes)
    assert found.memory.cache_per_token == sum(found.block_bytes) // BLOCK
    found.close()
