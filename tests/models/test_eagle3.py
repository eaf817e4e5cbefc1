"""EAGLE-3 drafts against a float64 forward of the model and the draft layer, written from the paper."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.reference import ReferenceBackend
from tests.backends import test_eagle3
from tests.models.drafters import EAGLES
from tests.models.kit import KIT
from tests.models.straight_line import attended, dense, forward, rms
from tests.models.support import nmse


def drafts(name: str, tokens: np.ndarray) -> np.ndarray:
    """Return float64 logits (T - 1, vocabulary); row t reads the states of token t and the embedding of token t + 1."""
    given, (metadata, model) = EAGLES[name], KIT[EAGLES[name].model].loaded()
    wide = {each: tensor.values() for each, tensor in model.items()}
    own = {each: tensor for each, tensor in given.loaded()[1].items() if each != "d2t"}
    w = {each: tensor.values().astype(np.float64) for each, tensor in own.items()}
    states: list[np.ndarray] = []
    forward(
        wide, tokens, layers=3, heads=4, kv_heads=[2, 2, 2], head_dim=32, n_rot=32, neox=False, base=5e5,
        eps=float(metadata["llama.attention.layer_norm_rms_epsilon"]), states=states,
    )  # fmt: skip
    features = np.concatenate([states[layer] for layer in given.layers], axis=1)[:-1]
    if given.before_fc:
        features = rms(features, w["enc.output_norm.weight"], 1e-5)
    hidden = features @ w["fc.weight"].T
    embedding = w.get("token_embd.weight", wide["token_embd.weight"].astype(np.float64))[tokens[1:]]
    normed = rms(hidden, w["blk.0.attn_norm_2.weight"], 1e-5)
    read = np.concatenate((rms(embedding, w["blk.0.attn_norm.weight"], 1e-5), normed), axis=1)
    x = normed if given.before_residual else hidden
    x = x + attended(w, 0, read, 4, 2, 32, 32, False, 1e-5, 10000.0)
    x = x + dense(w, "blk.0.ffn_", rms(x, w["blk.0.ffn_norm.weight"], 1e-5))
    return rms(x, w["output_norm.weight"], 1e-5) @ w.get("output.weight", wide["output.weight"].astype(np.float64)).T


@pytest.mark.parametrize("name", ["shared", "own"])
def test_logits_equal_a_straight_line_float64_forward(name: str) -> None:
    tokens = np.array(KIT[EAGLES[name].model].tokens)
    _, plan = test_eagle3.plans(name)
    _, ours = test_eagle3.run(ReferenceBackend(), plan, tokens.tolist(), test_eagle3.THEIRS)
    expected = drafts(name, tokens)
    known = np.isfinite(ours[0])
    assert nmse(ours[: len(expected), known], expected).max() < 1e-9
