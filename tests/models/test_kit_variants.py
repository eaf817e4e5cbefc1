"""Test models with metadata keys of published GGUFs that the stored headers lack, against llama.cpp's logits.

`data/kit_variants.npz` stores the logits of the first 24 tokens in one batch, by the names below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.kit import KIT
from tests.models.support import Driver, bind_reference, nmse, plan_of

STORED = np.load(Path(__file__).parent / "data" / "kit_variants.npz")
COUNT = 24
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
UNTOLD = YARN | {"rope.scaling.yarn_log_multiplier": None}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "values of MiMo 2 are scaled": ("mimo2-moe", {"attention.value_scale": 0.707}),
    "experts of Hunyuan 3 are chosen with a bias": ("hy_v3-moe", {"expert_used_count": 1}),
    "files say how LFM2 weights experts": ("lfm2moe-moe", {"expert_gating_func": 1, "expert_weights_scale": 2.5}),
    "files say how MiniMax M2 weights experts": ("minimax-m2-moe", {"expert_gating_func": 1}),
    "layers of Granite with windows are rotated by a pattern": (
        "granite_swa-dense",
        {"attention.rope_pattern": [True, False]},
    ),
    "sliding layers of MiMo 2 are not stretched": ("mimo2-moe", YARN),
    "sliding layers of PLaMo 3 are not stretched": ("plamo3-dense", YARN),
    "sliding layers of Gemma 4 are not stretched": ("gemma4-31b", YARN),
    "old files of DeepSeek 2 have no log multiplier": ("deepseek2-moe", UNTOLD),
    "nor need files of GLM 5 one": ("glm-dsa-moe", UNTOLD),
    "sliding layers of PLaMo 3 have a base": ("plamo3-dense", {"rope.freq_base": 1e6, "rope.freq_base_swa": None}),
}


def logits(name: str, changes: dict[str, Any]) -> np.ndarray:
    metadata, tensors = KIT[name].loaded()
    keys = metadata | {f"{metadata['general.architecture']}.{key}": value for key, value in changes.items()}
    plan = plan_of({key: value for key, value in keys.items() if value is not None}, tensors)
    return Driver(bind_reference(plan)).step([(0, KIT[name].tokens[:COUNT])])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_position(variant: str) -> None:
    name, changes = VARIANTS[variant]
    assert nmse(logits(name, changes), STORED[variant]).max() < KIT[name].limit()
    assert nmse(KIT[name].stored["logits"][:COUNT], STORED[variant]).max() > 1e-3  # the keys must change the logits
