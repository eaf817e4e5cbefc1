"""DeepSeek 4: pools of 4 and of 128 positions, experts chosen by token, and rejected GGUFs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.backends.base import CacheTypes
from localllm.backends.reference import ReferenceBackend
from localllm.models import ModelError
from localllm.plan import Attention, CacheLayer, IndexerTopK, Plan
from tests.backends.support import bind
from tests.models import make_deepseek4
from tests.models.kit import KIT
from tests.models.support import Driver, MemoryWeight, nmse, plan_of

LONG, HASHED = KIT["deepseek4-8of50"], KIT["deepseek4-hash"]
CONVERTED = {  # metadata as llama.cpp's converter writes it
    "vocab_size", "context_length", "embedding_length", "embedding_length_out", "block_count", "feed_forward_length",
    "expert_feed_forward_length", "expert_shared_count", "expert_count", "expert_used_count", "expert_weights_scale",
    "expert_weights_norm", "expert_gating_func", "swiglu_clamp_exp", "swiglu_clamp_shexp", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.q_lora_rank", "attention.sliding_window", "attention.indexer.head_count",
    "attention.indexer.key_length", "attention.indexer.top_k", "attention.output_group_count",
    "attention.output_lora_rank", "attention.compress_ratios", "attention.compress_rope_freq_base",
    "hyper_connection.count", "hyper_connection.sinkhorn_iterations", "hyper_connection.epsilon", "hash_layer_count",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(*LONG.loaded())


def driver(plan: Plan) -> Driver:
    return Driver(bind(ReferenceBackend(), plan, rows=200, blocks=8, cache=CacheTypes("f32", "f32")))


def test_layers_have_a_window_pools_of_4_and_pools_of_128(plan: Plan) -> None:
    (chooser,) = [op for op in plan.operations if isinstance(op, IndexerTopK)]
    assert (chooser.count, chooser.block) == (8, 4)
    reads = [op for op in plan.operations if isinstance(op, Attention)]
    cached = [[plan.attention_layer(layer) for layer in op.state] for op in reads]
    assert [[layer.every for layer in of_one] for of_one in cached] == [[1], [1, 4], [1, 128]]
    assert [[layer.window for layer in of_one] for of_one in cached] == [[32], [32, 0], [32, 0]]
    assert CacheLayer(1, 128, 0, every=4) in plan.layers


def test_cuts_and_truncations_change_nothing(plan: Plan) -> None:
    whole, cut = driver(plan), driver(plan)
    truth = whole.step([(0, LONG.tokens[:140])])
    parts = [cut.step([(0, LONG.tokens[a:b])]) for a, b in ((0, 3), (3, 70), (70, 127), (127, 129))]
    np.testing.assert_array_equal(np.concatenate(parts), truth[:129])
    cut.step([(0, LONG.tokens[:9])])
    cut.lengths[0] = 126  # rewind into a pool of 4 and a pool of 128
    np.testing.assert_array_equal(cut.step([(0, LONG.tokens[126:140])]), truth[126:])


@pytest.mark.parametrize("name", ["deepseek4-8of50", "deepseek4-hash"])
def test_what_the_converter_writes_is_enough(name: str) -> None:
    metadata, tensors = KIT[name].loaded()
    few = {k: v for k, v in metadata.items() if k.removeprefix("deepseek4.") in CONVERTED or not k.startswith("deep")}
    assert len(few) < len(metadata) - 40
    found = [driver(plan_of(keys, tensors)).step([(0, KIT[name].tokens)]) for keys in (metadata, few)]
    np.testing.assert_array_equal(*found)


REFUSED: dict[str, tuple[Any, str]] = {
    "attention.compress_ratios": (
        (0, 3, 128), r"compress_ratios: supported are 0, 4 and 128, found 3 \(layer 1\)"
    ),
    "attention.compress_ratios ": (
        (0, 1 << 40, 128), r"compress_ratios: expected an integer from 0 to \d+, found 1099511627776"
    ),
    "attention.compress_ratios  ": ((0, 4), "compress_ratios: expected 3 numbers, one per layer, found 2"),
    "attention.compress_ratios   ": (None, "attention.compress_ratios"),
    "attention.compress_rope_freq_base": (None, "attention.compress_rope_freq_base"),
    "attention.output_lora_rank": (None, "attention.output_lora_rank"),
    "attention.output_group_count": (3, r"output_group_count: expected a divisor of 8, found 3 \(layer 0\)"),
    "attention.head_count_kv": (2, r"head_count_kv: expected 1, found 2 \(layer 0\)"),
    "attention.sliding_window": (0, "sliding_window: expected a window for every layer, found 0"),
    "attention.value_length_swa": (32, "value_length: expected 64, the width of a key, found 32"),
    "attention.indexer.key_length": (16, "indexer.key_length"),
    "attention.indexer.top_k": (0, "indexer.top_k"),
    "hash_layer_count": (4, "hash_layer_count"),
    "hash_layer_count ": (
        3, r"blk.2.ffn_gate_tid2eid.weight: this tensor is missing; expected I32 \(128, 2\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_wrong_keys_are_refused(key: str) -> None:
    metadata, tensors = HASHED.loaded()
    value, message = REFUSED[key]
    name = f"deepseek4.{key.strip()}"
    assert name in metadata
    changed = {k: v for k, v in metadata.items() if k != name} | ({} if value is None else {name: value})
    with pytest.raises(ModelError, match=message) as raised:
        plan_of(changed, tensors)
    assert "\n" not in str(raised.value)


def _changed(tensors: dict[str, MemoryWeight], name: str, table: np.ndarray, format: str = "I32") -> None:
    rows = np.ascontiguousarray(table).view(np.uint8).reshape(len(table), -1)
    tensors[name] = MemoryWeight(name, format, table.shape, rows)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.full((128, 2), 4), r"expected numbers from 0 to 3, found 4 \(row 0\)"),
        (np.full((128, 2), -1), r"expected numbers from 0 to 3, found -1 \(row 0\)"),
        (np.zeros((127, 2)), r"expected I32 \(128, 2\) \(rows, columns\), found I32 \(127, 2\)"),
        (np.zeros((128, 3)), r"expected I32 \(128, 2\) \(rows, columns\), found I32 \(128, 3\)"),
    ],
)
def test_wrong_tables_of_experts_are_refused(table: np.ndarray, message: str) -> None:
    metadata, tensors = HASHED.loaded()
    _changed(tensors, "blk.1.ffn_gate_tid2eid.weight", table.astype(np.int32))
    with pytest.raises(ModelError, match=f"^blk.1.ffn_gate_tid2eid.weight: {message}"):
        plan_of(metadata, tensors)


def test_tables_of_other_numbers_are_refused() -> None:
    metadata, tensors = HASHED.loaded()
    _changed(tensors, "blk.0.ffn_gate_tid2eid.weight", np.zeros((128, 2), np.float32), "F32")
    with pytest.raises(ModelError, match=r"expected I32 \(128, 2\)"):
        plan_of(metadata, tensors)


def test_the_token_alone_chooses_the_experts() -> None:
    """A different table entry for one token changes the logits from that token's position on."""
    metadata, tensors = HASHED.loaded()
    truth = driver(plan_of(metadata, tensors)).step([(0, HASHED.tokens)])
    name, at = "blk.0.ffn_gate_tid2eid.weight", 20
    table = tensors[name].rows.copy().view(np.int32).reshape(128, 2)
    token = HASHED.tokens[at]
    first = HASHED.tokens.index(token)
    table[token] = (table[token] + 1) % 4
    _changed(tensors, name, table)
    found = driver(plan_of(metadata, tensors)).step([(0, HASHED.tokens)])
    np.testing.assert_array_equal(found[:first], truth[:first])
    assert np.abs(found[first] - truth[first]).max() > 1e-3


def test_transformers_agree() -> None:
    """The logits agree at every position, with YaRN, experts by token, 3 selected of 35 pools of 4, and one pool of
    128.
    """
    with np.load(make_deepseek4.DATA) as data:
        logits = data["logits"]
    found = driver(plan_of(make_deepseek4.metadata(), make_deepseek4.tensors())).step([(0, make_deepseek4.TOKENS)])
    assert nmse(found, logits).max() < 1e-10
