"""Two stacks of layers that run alternately: which tensors a layer uses, and which tensors a GGUF must have."""

from __future__ import annotations

import pytest

from localllm.models import ModelError
from tests.models.kit import KIT
from tests.models.support import plan_of


def test_passes_share_the_tensors_of_a_block() -> None:
    """With 6 layers and 2 blocks, several layers read each matrix under one name, and it is stored once."""
    metadata, tensors = KIT["hrm_text-dense"].loaded()
    plan = plan_of(metadata, tensors)
    times = [read.weight.name for read in plan.reads].count
    assert times("blk.0.attn_q.weight") == 4
    assert times("blk.1.attn_q.weight") == 2
    assert len(plan.layers) == 6
    assert plan.tensors <= set(tensors)
    unused = {name for name in tensors if not name.endswith("_scale") and name not in plan.tensors}
    assert all("ffn_" in name or "attn_gate" in name for name in unused), unused  # scales, which llama.cpp ignores


def test_all_passes_share_the_tensors_of_a_block() -> None:
    """The model runs 2 blocks 3 times, with the output norm after each time."""
    plan = plan_of(*KIT["nanbeige-loops"].loaded())
    times = [read.weight.name for read in plan.reads].count
    assert len(plan.layers) == 6
    assert times("blk.1.attn_q.weight") == 3
    assert times("output.weight") == 1


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("blk.4.attn_q.scale", r"blk\.4\.attn_q\.scale: this scale is missing; .*"),
        ("blk.1.attn_q.weight", r"blk\.1\.attn_q\.weight: this tensor is missing; .*"),
        ("hrm.z_l_init", r"hrm\.z_l_init: this tensor is missing; .*"),
    ],
)
def test_what_a_file_must_hold(missing: str, message: str) -> None:
    metadata, tensors = KIT["hrm_text-dense"].loaded()
    del tensors[missing]
    with pytest.raises(ModelError, match=f"^{message}$"):
        plan_of(metadata, tensors)
