"""Tiny models of every architecture against llama.cpp's logits, which are stored in `kit_models`.

The logits of chameleon-swin come from Hugging Face transformers, because llama.cpp's feed-forward gets a different
input there. All others were computed with a float32 KV cache and GELU from a float16 table, which the reference backend
imitates here: 32 tokens in one batch, then one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from localllm.backends import reference_operations
from localllm.backends.reference_state import ReferenceState
from localllm.models import ARCHITECTURES
from localllm.models.routing import ExpertGating
from localllm.plan import Norm
from tests.models.kit import CHAOTIC, DEPARTURES, EMBEDDERS, KIT
from tests.models.support import Driver, bind_reference, nmse, plan_of


def gelu_of_halves(x: np.ndarray, exact: Callable[[np.ndarray], np.ndarray] = reference_operations._gelu) -> np.ndarray:
    """Return GELU as in llama.cpp's CPU table: in half precision, from -10 to 10 only."""
    looked_up = exact(x.astype(np.float16).astype(np.float64)).astype(np.float16)
    return np.where(np.abs(x) < 10.0, looked_up, np.maximum(x, 0.0))


@pytest.mark.parametrize("name", KIT)
def test_every_position(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_operations, "_gelu", gelu_of_halves)
    monkeypatch.setitem(reference_operations._ACTIVATIONS, "gelu", gelu_of_halves)
    model = KIT[name]
    driver = Driver(bind_reference(plan_of(*model.loaded()), rows=model.room))
    assert model.error(model.logits(driver)) < model.limit(CHAOTIC)


def test_phimoe_but_for_its_norms_and_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """For Phi MoE, llama.cpp uses RMS norms with biases, and a softmax router. `hf_all.npz` has the logits of
    Hugging Face transformers for
    the model as trained.
    """
    own, norm = ARCHITECTURES["phimoe"], reference_operations._norm

    def rms_with_bias(state: ReferenceState, op: Norm) -> None:
        norm(state, replace(op, kind="rms"))

    def difference() -> float:
        driver = Driver(bind_reference(plan_of(*model.loaded())))
        return float(nmse(driver.step([(0, model.tokens)]), model.stored["logits"]).max())

    model = DEPARTURES["phimoe-moe"]
    assert difference() > 0.1
    monkeypatch.setitem(reference_operations.OPERATIONS, Norm, rms_with_bias)
    monkeypatch.setitem(ARCHITECTURES, "phimoe", replace(own, routing=ExpertGating("softmax", True)))
    assert difference() < 1e-9


def test_every_architecture_has_a_model() -> None:
    found = {model.architecture for model in (KIT | EMBEDDERS | DEPARTURES).values()}
    assert found == set(ARCHITECTURES)
