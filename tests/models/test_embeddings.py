"""Tiny encoders and embedders against llama.cpp's embeddings, of every token and of whole texts.

llama.cpp computed GELU from a float16 table, which the reference backend imitates here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.backends import reference_operations
from localllm.backends.base import Backend, CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.models import ModelError, Pooler, PoolingHead, architecture_of, read_config, record, unit
from localllm.models.families.t5 import bucket
from localllm.plan import Attention, Plan
from tests.models.kit import EMBEDDERS
from tests.models.support import Driver, MemoryWeight, nmse, plan_of
from tests.models.test_kit import gelu_of_halves

HALVES = 3e-6  # largest effect of exact GELU instead of the float16 table
LIMITS = Limits(rows=96, logit_rows=96, blocks=4, positions=128)


def pooler_of(metadata: dict[str, Any], tensors: dict[str, MemoryWeight]) -> Pooler:
    architecture = architecture_of(metadata)
    config = read_config(metadata, architecture.name)
    return Pooler(config, PoolingHead.of(config, architecture, tensors))


def driver(backend: Backend, plan: Plan, sequences: int = 1) -> Driver:
    return Driver(backend.bind(plan, LIMITS, CacheTypes("f32", "f32")), sequences)


def off(backend: Backend, name: str) -> float:
    """Return the largest difference between a backend's embeddings and llama.cpp's, over every token and the text."""
    model = EMBEDDERS[name]
    metadata, tensors = model.loaded()
    rows = driver(backend, plan_of(metadata, tensors, embeddings=True)).step([(0, model.tokens)])
    pooler = pooler_of(metadata, tensors)
    pooling = read_config(metadata, str(metadata["general.architecture"])).pooling
    assert pooling == ("none", "mean", "cls", "last", "rank")[int(model.stored["pooling"])]
    of_tokens = float(nmse(pooler(rows, "none"), model.stored["embeddings"]).max())
    return max(of_tokens, float(nmse(pooler(rows, pooling), model.stored["pooled"])))


@pytest.mark.parametrize("name", EMBEDDERS)
def test_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_operations, "_gelu", gelu_of_halves)
    monkeypatch.setitem(reference_operations._ACTIVATIONS, "gelu", gelu_of_halves)
    assert off(ReferenceBackend(), name) < 1e-6


@pytest.mark.parametrize("name", EMBEDDERS)
def test_cpu(name: str) -> None:
    backend = CpuBackend(2)
    try:
        assert off(backend, name) < HALVES
    finally:
        backend.close()


@pytest.mark.parametrize("name", ["bert-cls", "jina-bert-v2", "modern-bert", "gemma-embedding", "t5encoder"])
def test_rows_do_not_depend_on_other_texts(name: str) -> None:
    """Attention stays within each text of a batch. The bits equal a separate evaluation, over several KV cache
    blocks.
    """
    model, backend = EMBEDDERS[name], CpuBackend(2)
    long = (model.tokens * 2)[:75]
    try:
        plan = plan_of(*model.loaded())
        alone = driver(backend, plan, 2).step([(0, long)])
        both = driver(backend, plan, 2).step([(1, model.tokens[:20]), (0, long)])
        assert np.array_equal(alone, both[20:])
        expected = driver(ReferenceBackend(), plan).step([(0, long)])
        assert nmse(alone, expected).max() < 1e-9
    finally:
        backend.close()


def test_first_rows_see_later_ones() -> None:
    model = EMBEDDERS["bert-cls"]
    plan = plan_of(*model.loaded())
    assert not any(op.causal for op in plan.operations if isinstance(op, Attention))
    assert not plan.causal
    ours = [driver(ReferenceBackend(), plan).step([(0, tokens)])[0] for tokens in ([5, 6, 7], [5, 6, 8])]
    assert not np.allclose(ours[0], ours[1])


def test_decoders_that_see_later_rows() -> None:
    """Every decoder architecture with plain attention reads the metadata key that makes attention bidirectional."""
    model = EMBEDDERS["qwen3-embedding"]
    metadata, tensors = model.loaded()
    assert plan_of(metadata, tensors).causal
    metadata["qwen3.attention.causal"] = False
    assert not plan_of(metadata, tensors).causal


def test_rankers_of_several_labels_give_probabilities() -> None:
    metadata, tensors = EMBEDDERS["qwen3-embedding"].loaded()
    tensors["cls.output.weight"] = MemoryWeight.of("cls.output.weight", np.eye(2, 128))
    pooler = pooler_of(metadata, tensors)
    rows = np.zeros((3, 128), np.float32)
    rows[-1, :2] = 1.0, 3.0
    assert pooler.ranks
    assert pooler(rows, "rank") == pytest.approx([1 / (1 + np.exp(2)), 1 / (1 + np.exp(-2))])


def test_what_a_classifier_reads() -> None:
    """The metadata key of a classifier has a dot in its name, as in llama.cpp."""
    metadata, tensors = EMBEDDERS["bert-rank"].loaded()
    rows = np.random.RandomState(1).standard_normal((5, 128)).astype(np.float32)
    first = pooler_of(metadata, tensors)(rows, "rank")
    assert first == pytest.approx(pooler_of(metadata, tensors)(rows[:1], "rank"))
    mean = pooler_of(metadata | {"bert.classifier.pooling_type": 1}, tensors)(rows, "rank")
    assert mean == pytest.approx(pooler_of(metadata, tensors)(rows.mean(0, keepdims=True), "rank"))
    assert mean != pytest.approx(first)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("buckets", [8, 32])
def test_buckets_of_distances(buckets: int, causal: bool) -> None:
    """The expected bucket is computed in float32, as in T5's reference implementation: the logarithm of the distance,
    rounded down.
    """
    own = buckets if causal else buckets // 2
    exact = own // 2
    for distance in range(-300, 301):
        behind = max(-distance, 0) if causal else abs(distance)
        logarithm = np.log(np.float32(max(behind, exact) / exact)) * np.float32(own - exact) / np.log(128 / exact)
        expected = behind if behind < exact else min(exact + int(np.float32(logarithm)), own - 1)
        assert bucket(distance, buckets, causal) == expected + (own if distance > 0 and not causal else 0)


def test_layers_may_have_numbers_of_distances_of_their_own() -> None:
    """A layer without its own biases by distance uses the first layer's biases."""
    metadata, tensors = EMBEDDERS["t5encoder"].loaded()
    first = tensors["enc.blk.0.attn_rel_b.weight"]
    given = {f"enc.blk.{n}.attn_rel_b.weight": MemoryWeight.of(f"own {n}", first.values()) for n in (1, 2)}
    tokens = EMBEDDERS["t5encoder"].tokens
    ours, same = (
        driver(ReferenceBackend(), plan_of(metadata, t)).step([(0, tokens)]) for t in (tensors, tensors | given)
    )
    assert np.array_equal(ours, same)
    given["enc.blk.2.attn_rel_b.weight"] = MemoryWeight.of("own 2", first.values()[::-1])
    assert not np.allclose(ours, driver(ReferenceBackend(), plan_of(metadata, tensors | given)).step([(0, tokens)]))


def test_vectors_of_length_one() -> None:
    assert unit(np.array([3.0, 4.0], np.float32)) == pytest.approx([0.6, 0.8])
    assert not unit(np.zeros(4, np.float32)).any()


def refused(name: str, keys: dict[str, Any] | None = None, **tensors: np.ndarray) -> str:
    metadata, known = EMBEDDERS[name].loaded()
    metadata |= keys or {}
    for key, values in tensors.items():
        known[key] = MemoryWeight.of(key, values)
    architecture = architecture_of(metadata)
    with pytest.raises(ModelError) as error:
        record(read_config(metadata, architecture.name), architecture, known, embeddings=True)
    return str(error.value)


def test_wrong_files() -> None:
    found = refused("bert-cls", {"bert.pooling_type": 7})
    expected = "supported are 0 (none), 1 (mean), 2 (cls), 3 (last), 4 (rank), found 7"
    assert found == f"bert.pooling_type: {expected}"
    found = refused("modern-bert", {"modern-bert.hidden_activation": "tanh"})
    assert found == "modern-bert.hidden_activation: supported are gelu, silu, found 'tanh'"
    found = refused("bert-rank", **{"cls.output.weight": np.ones((1, 64))})
    assert found == "cls.output.weight: expected shape (1, 128) (rows, columns), found (1, 64)"
    found = refused("gemma-embedding", **{"dense_3.weight": np.ones((128, 128))})
    assert found == "dense_3.weight: expected shape (128, 160) (rows, columns), found (128, 128)"
    found = refused("bert-cls", **{"token_types.weight": np.ones((2, 64))})
    assert found == "token_types.weight: expected shape (2, 128) (rows, columns), found (2, 64)"
