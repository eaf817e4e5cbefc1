"""What a model that takes media records: splices, M-RoPE axes, and spans in the layers of its architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.models import MediaInput, ModelError, architecture_of, read_config, record
from localllm.models.media import axes_of
from localllm.plan import Attention, EmbedMedia, Plan, Rotate, Splice
from tests.models.kit import KIT


def plan_of(name: str, media: MediaInput | None) -> Plan:
    metadata, tensors = KIT[name].loaded()
    architecture = architecture_of(metadata)
    return record(read_config(metadata, architecture.name), architecture, tensors, media=media)


def test_sections_and_interleaved_axes() -> None:
    assert axes_of((3, 2, 2, 1), 10, False) == (0, 0, 0, 1, 1, 2, 2, 3, 0, 0)  # sections repeat
    assert axes_of((16, 24, 24, 0), 64, False) == (0,) * 16 + (1,) * 24 + (2,) * 24
    qwen3 = axes_of((24, 20, 20, 0), 64, True)
    assert qwen3[:60] == (0, 1, 2) * 20
    assert qwen3[60:] == (0, 0, 0, 0)  # pairs beyond the sections of rows and columns turn by time
    assert [qwen3.count(axis) for axis in range(3)] == [24, 20, 20]


@pytest.mark.parametrize(
    ("name", "axes"), [("qwen2vl-dense", 2), ("qwen3vl-dense", 3), ("qwen35-mtp", 3), ("llama-dense", 0)]
)
def test_only_models_with_m_rope_have_axes(name: str, axes: int) -> None:
    assert plan_of(name, MediaInput()).axes == axes
    assert plan_of(name, None).axes == 0


@pytest.mark.parametrize("name", ["gemma3-12", "gemma4-31b"])
def test_spans_are_in_the_layers_of_the_architecture(name: str) -> None:
    """In Gemma 3 all layers, in Gemma 4 those with a sliding window, as in llama.cpp."""
    attention = [op for op in plan_of(name, MediaInput(span=30)).operations if isinstance(op, Attention)]
    sliding = [op.window > 0 for op in attention]
    assert len(set(sliding)) == 2
    assert [op.spans for op in attention] == (sliding if name == "gemma4-31b" else [True] * len(attention))
    assert not plan_of(name, MediaInput()).spans


def test_streams_are_added_behind_the_first_layers() -> None:
    plan = plan_of("qwen3vl-dense", MediaInput(streams=3))
    found = [(op.start, op.add) for op in plan.operations if isinstance(op, Splice)]
    assert found == [(0, False), (256, True), (512, True)]
    layers = [
        sum(start <= number for start in plan.starts)
        for number, op in enumerate(plan.operations)
        if isinstance(op, Splice)
    ]
    assert layers == [0, 1, 2]  # before the first layer, and at the end of the first and the second
    assert plan.media == 768


def test_streams_are_added_before_listed_layers() -> None:
    """Granite 4 Vision lists them. The first layer's stream is the embedding itself."""
    metadata, tensors = KIT["granite-dense"].loaded()
    architecture = architecture_of(metadata)
    layers = metadata["granite.block_count"]
    config = read_config(metadata | {"granite.deepstack_mapping": [-1, 1] + [-1] * 510}, architecture.name)
    assert config.deepstack == (-1, 1) + (-1,) * (layers - 2)
    plan = record(config, architecture, tensors, media=MediaInput(streams=2))
    found = [(number, op) for number, op in enumerate(plan.operations) if isinstance(op, Splice)]
    assert [(op.start // config.width, op.add) for _, op in found] == [(0, False), (1, True)]
    assert [sum(start <= number for start in plan.starts) for number, _ in found] == [0, 1]
    moved = replace(config, deepstack=(-1,) * layers)
    plan = record(moved, architecture, tensors, media=MediaInput(streams=2))
    assert sum(isinstance(op, Splice) for op in plan.operations) == 1  # no layer is listed
    with pytest.raises(ModelError, match="deepstack_mapping: stream 2 is listed, and there are 2 streams"):
        read_config(metadata | {"granite.deepstack_mapping": [-1, 2]}, architecture.name)


@pytest.mark.parametrize("name", ["qwen3vl-dense", "gemma3-12", "gemma4-e2b"])
def test_without_media_nothing_is_recorded(name: str) -> None:
    plain, given = plan_of(name, None), plan_of(name, MediaInput())
    assert plain.media == 0
    assert [type(op) for op in plain.operations] == [
        type(op) for op in given.operations if not isinstance(op, EmbedMedia | Splice)
    ]
    ropes = [op.rope for op in given.operations if isinstance(op, Rotate)]
    assert [replace(rope, axes=()) for rope in ropes] == [op.rope for op in plain.operations if isinstance(op, Rotate)]
