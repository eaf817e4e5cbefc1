"""Next-token prediction heads against llama.cpp's: position t gets token t + 1 and the hidden state of token t.

The models are the test models with heads, and models to which `tests.models.headed` adds a head. The stored
logits come from llama.cpp's context for heads, with a float32 KV cache. The inputs are hidden states from
llama.cpp's context for the model: 32 in one batch, then one by one. A second head gets the same hidden states
as the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from localllm.backends.base import Backend, CacheTypes, DraftingExecutable, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.models import (
    ModelError,
    architecture_of,
    read_config,
    record,
    record_mtp_head,
    record_mtp_heads,
    record_with_heads,
)
from localllm.plan import BLOCK, Batch, Plan
from tests.backends.support import chunks
from tests.models.headed import HEADED, Headed
from tests.models.kit import KIT, LIMIT, KitModel
from tests.models.support import Driver, MemoryWeight, nmse

with np.load(Path(__file__).parents[1] / "models" / "data" / "head_logits.npz") as file:
    STORED = dict(file)  # (heads, tokens, vocabulary)
HEADS = [(name, number + 1) for name, stored in STORED.items() for number in range(len(stored))]
LIMITS, CACHE = Limits(rows=64, logit_rows=64, blocks=1, positions=BLOCK), CacheTypes("f32", "f32")
THEIRS = [32] + [1] * 7
OTHERS: tuple[list[int], ...] = ([], [1] * 39, [5, 17, 2])


def model_of(name: str) -> KitModel | Headed:
    return HEADED.get(name) or KIT[name]


def plans(name: str, number: int = 1, without: tuple[str, ...] = ()) -> tuple[Plan, Plan]:
    """Return two plans: the model, which also returns hidden states, and a head, without some tensors of its layer."""
    metadata, held = model_of(name).loaded()
    tensors = {name: tensor for name, tensor in held.items() if not name.endswith(without)} if without else held
    architecture = architecture_of(metadata)
    config = read_config(metadata, architecture.name)
    head = record_mtp_head(read_config(metadata, architecture.name, number), architecture, tensors)
    return record(config, architecture, tensors, every_row=True), head


def hidden(backend: Backend, plan: Plan, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden states of all tokens. Only the logits of the last token are computed."""
    assert plan.hidden is not None
    executable = backend.bind(plan, LIMITS, CACHE, keep=[plan.hidden])
    try:
        logits = Driver(executable).step([(0, tokens)], [len(tokens) - 1])
        return executable.value(plan.hidden).copy(), logits
    finally:
        executable.close()


def fed(backend: Backend, plan: Plan, tokens: list[int], rows: np.ndarray, sizes: Iterable[int]) -> np.ndarray:
    """Return the head's logits for every token, evaluated in chunks of the given sizes and one chunk for the
    remaining tokens.
    """
    executable, results = backend.bind(plan, LIMITS, CACHE), []
    try:
        for start, stop in chunks(len(tokens), sizes):
            places = np.arange(start, stop, dtype=np.int32)
            of, wanted = np.zeros(stop - start, np.int32), np.arange(stop - start, dtype=np.int32)
            own = np.array(tokens[start:stop], np.int32)
            executable.begin(Batch(own, places, places.copy(), of, np.zeros((1, 1), np.int32), wanted))
            executable.run([rows[start:stop]])
            results.append(executable.result().copy())
        return np.concatenate(results)
    finally:
        executable.close()


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize(("name", "number"), HEADS)
def test_every_row(cpu: CpuBackend, name: str, number: int, on: str) -> None:
    backend, tokens = cpu if on == "cpu" else ReferenceBackend(), model_of(name).tokens
    model, head = plans(name, number)
    rows, _ = hidden(backend, model, tokens)
    ours = fed(backend, head, tokens[1:], rows[:-1], THEIRS)
    assert nmse(ours, STORED[name][number - 1]).max() < LIMIT
    # Other hidden states must change the logits.
    assert nmse(ours, fed(backend, head, tokens[1:], rows[1:], THEIRS)).min() > LIMIT
    if on == "cpu":
        for sizes in OTHERS:
            np.testing.assert_array_equal(fed(backend, head, tokens[1:], rows[:-1], sizes), ours)


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize(("name", "number"), HEADS)
def test_a_head_as_a_stage_of_its_model(cpu: CpuBackend, name: str, number: int, on: str) -> None:
    """The head in the model's plan, which shares its cache blocks, equals the separate head."""
    backend, tokens = cpu if on == "cpu" else ReferenceBackend(), model_of(name).tokens
    metadata, held = model_of(name).loaded()
    plan = record_with_heads(metadata, architecture_of(metadata), held, most=number)
    assert len(plan.drafts) == number
    draft = plan.drafts[-1]
    model_hidden = plan.drafts[0].hidden
    executable = backend.bind(plan, LIMITS, CACHE, keep=[model_hidden, draft.logits, draft.following])
    assert isinstance(executable, DraftingExecutable)
    try:
        logits = Driver(executable).step([(0, tokens)], [len(tokens) - 1]).copy()
        rows, found, following = executable.value(model_hidden).copy(), [], []
        for start, stop in chunks(len(tokens) - 1, THEIRS):
            places, of = np.arange(start, stop, dtype=np.int32), np.zeros(stop - start, np.int32)
            own, wanted = np.array(tokens[start + 1 : stop + 1], np.int32), np.arange(stop - start, dtype=np.int32)
            executable.draft(
                Batch(own, places, places.copy(), of, np.zeros((1, 1), np.int32), wanted), rows[start:stop], number - 1
            )
            found.append(executable.value(draft.logits).copy())
            following.append(executable.value(draft.following).copy())
    finally:
        executable.close()
    ours, (model, head) = np.concatenate(found), plans(name, number)
    expected_rows, expected = hidden(backend, model, tokens)
    assert nmse(ours, STORED[name][number - 1]).max() < LIMIT
    assert np.concatenate(following).shape == (len(tokens) - 1, rows.shape[1])
    assert not plan.reads or len(plan.reads) == len(model.reads)
    for one, other in (
        (rows, expected_rows),
        (logits, expected),
        (ours, fed(backend, head, tokens[1:], rows[:-1], THEIRS)),
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", STORED)
def test_hidden_rows_of_all_tokens_change_no_logits(cpu: CpuBackend, name: str) -> None:
    model, head = plans(name)
    tokens, (metadata, held) = model_of(name).tokens, model_of(name).loaded()
    architecture = architecture_of(metadata)
    plain = record(read_config(metadata, architecture.name), architecture, held)
    alone = cpu.bind(plain, LIMITS, CACHE)
    beside = cpu.bind(head, LIMITS, CACHE)
    try:
        expected = Driver(alone).step([(0, tokens)], [len(tokens) - 1])
        rows, logits = hidden(cpu, model, tokens)
    finally:
        alone.close()
        beside.close()
    assert rows.shape == (len(tokens), head.values[0].width)
    np.testing.assert_array_equal(logits, expected)


def test_what_a_head_lacks_is_the_model_s(cpu: CpuBackend) -> None:
    """A head with its own embedding and output matrices equals a head that uses the model's."""
    name, model, layer = "glm4moe-mtp", KIT["glm4moe-mtp"], "blk.3.nextn."
    pairs = {"embed_tokens": "token_embd", "shared_head_norm": "output_norm", "shared_head_head": "output"}
    metadata, held = model.loaded()
    same = held | {
        f"{layer}{own}.weight": MemoryWeight(f"{layer}{own}.weight", "F32", of.shape, of.rows)
        for own, of in ((own, held[f"{of}.weight"]) for own, of in pairs.items())
    }
    architecture = architecture_of(metadata)
    full = record_mtp_head(read_config(metadata, architecture.name, head=1), architecture, same)
    _, less = plans(name, without=tuple(f"nextn.{own}.weight" for own in pairs))
    assert full.tensors - less.tensors == {f"{layer}{own}.weight" for own in pairs}
    rows = np.random.default_rng(1).standard_normal((39, 128)).astype(np.float32)
    one, other = (fed(cpu, head, model.tokens[1:], rows, []) for head in (full, less))
    np.testing.assert_array_equal(one, other)


def test_files_without_heads() -> None:
    metadata, tensors = KIT["qwen35-mtp"].loaded()
    architecture = architecture_of(metadata)
    held = {name: tensor for name, tensor in tensors.items() if "nextn" not in name}
    assert len(record_mtp_heads(metadata, architecture, tensors)) == 1
    assert not record_mtp_heads(metadata, architecture, held)
    with pytest.raises(ModelError, match=r"blk\.4\.nextn\.enorm\.weight: this tensor is missing"):
        record_mtp_head(read_config(metadata, "qwen35", head=1), architecture, held)
    with pytest.raises(ModelError, match=r"qwen35.nextn_predict_layers: expected .* from 2"):
        read_config(metadata, "qwen35", head=2)


def test_a_file_of_heads_alone() -> None:
    metadata, tensors = HEADED["deepseek4"].loaded()
    architecture = architecture_of(metadata)
    held = {name: tensor for name, tensor in tensors.items() if not re.match(r"blk\.[0-3]\.", name)}
    with pytest.raises(ModelError, match=r"blk\.4\.nextn\.eh_proj\.weight: the file has only next-token heads"):
        record(read_config(metadata, architecture.name), architecture, held)
    (head,) = record_mtp_heads(metadata, architecture, held)
    assert head.tensors == record_mtp_heads(metadata, architecture, tensors)[0].tensors


def test_heads_that_cannot_be() -> None:
    metadata, tensors = KIT["qwen35-mtp"].loaded()
    architecture, key = architecture_of(metadata), "qwen35.attention.head_count_kv"
    config = read_config({**metadata, key: np.array([2, 2, 2, 2, 0], np.int32)}, "qwen35", head=1)
    with pytest.raises(ModelError, match=f"{key}: expected heads in layer 4"):
        record_mtp_head(config, architecture, tensors)
    metadata, tensors = KIT["nemotron_h_moe-dense"].loaded()
    config = read_config({**metadata, "nemotron_h_moe.nextn_predict_layers": 1}, "nemotron_h_moe", head=1)
    with pytest.raises(ModelError, match="nextn_predict_layers: heads of models whose layers have one part"):
        record_mtp_head(config, architecture_of(metadata), tensors)
