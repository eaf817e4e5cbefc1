"""Measured costs of formats, and the mixes of formats that are chosen from the costs, compared with all
possible mixes.
"""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from localllm import LocalLLMError, load, quant
from localllm.evaluation import ModelSource, Scores, Windows, cut_windows, evaluate, statistics
from localllm.gguf import NewTensor, write_gguf
from localllm.quantize.calibration.imatrix import measure_imatrix
from localllm.quantize.calibration.mix import Effect, best, smallest
from localllm.quantize.calibration.sensitivity import Trial, fit_kld
from tests.conftest import reference
from tests.localllm.support import REPOSITORY

TEXT = (REPOSITORY / "benchmarks" / "demo" / "smalltalk.txt").read_text()
FORMATS = ("Q4_0", "Q5_0", "Q8_0")


def random_effects(seed: int, tensors: int = 5) -> dict[str, list[Effect]]:
    random = np.random.RandomState(seed)
    found = {}
    for i in range(tensors):
        size, cost = random.randint(50, 2000), random.random_sample()
        found[f"t{i}"] = [Effect(f"{b}", int(size * b), 4.0**-b, cost * 4.0**-b) for b in (2, 3, 4, 5, 6)]
    return found


def every(effects: dict[str, list[Effect]]) -> list[tuple[int, float]]:
    """Return (bytes, KL divergence) of every possible mix."""
    return [(sum(e.bytes for e in mix), sum(e.kld for e in mix)) for mix in product(*effects.values())]


def cost(effects: dict[str, list[Effect]], mix: dict[str, str]) -> tuple[int, float]:
    chosen = [next(e for e in effects[name] if e.format == format_name) for name, format_name in mix.items()]
    assert mix.keys() == effects.keys()
    return sum(e.bytes for e in chosen), sum(e.kld for e in chosen)


@pytest.mark.parametrize("seed", range(8))
def test_mixes_are_near_the_best_of_all(seed: int) -> None:
    """Five tensors in five formats have 3125 mixes. The chosen mix differs from the best by at most one
    format step of one tensor.
    """
    effects, mixes = random_effects(seed), every(random_effects(seed))
    step = max(b.bytes - a.bytes for e in effects.values() for a, b in pairwise(e))
    for share in (0.1, 0.3, 0.6, 1.0):
        low, high = min(b for b, _ in mixes), max(b for b, _ in mixes)
        allowed = int(low + share * (high - low))
        size, kld = cost(effects, best(effects, allowed))
        assert size <= allowed
        assert kld <= min(k for b, k in mixes if b <= allowed - step or share == 1.0)
    for bound in (0.02, 0.005, 0.002):
        size, kld = cost(effects, smallest(effects, bound))
        assert kld <= bound
        assert size <= min(b for b, k in mixes if k <= bound) + step


def test_bounds_that_cannot_be_met_are_refused() -> None:
    effects = random_effects(1)
    with pytest.raises(LocalLLMError, match=r"the smallest mix needs .* are left"):
        best(effects, min(b for b, _ in every(effects)) - 1)
    with pytest.raises(LocalLLMError, match="finest formats"):
        smallest(effects, min(k for _, k in every(effects)) / 2)


def test_a_format_that_is_larger_and_worse_is_never_chosen() -> None:
    effects = {"a": [Effect("small", 10, 1, 1.0), Effect("odd", 15, 1, 1.5), Effect("large", 20, 0.1, 0.1)]}
    assert {best(effects, n)["a"] for n in range(10, 30)} == {"small", "large"}


def test_costs_of_tensors_add_up(tmp_path: Path) -> None:
    """Three KL divergences agree: the sum over single tensors, the value for the model with all tensors
    changed, and the value for the written file.
    """
    with Trial("demo", TEXT, ctx_size=128, windows=6) as trial:
        names = [f"blk.{i}.{part}.weight" for i in (0, 3) for part in ("attn_v", "ffn_down")]
        effects = trial.effects(dict.fromkeys(names, FORMATS))
        all_4 = dict.fromkeys(names, "Q4_0")
        expected, together = cost(effects, all_4)[1], trial.kld(all_4)
        assert trial.kld({}) < 1e-6  # the original tensors are restored
        assert trial.kld(dict.fromkeys(names, "Q8_0")) < 1e-4  # nearly the original precision
    assert together == pytest.approx(expected, rel=0.15)
    for options in effects.values():
        errors = [e.error for e in options]
        assert errors == sorted(errors, reverse=True)
        assert [e.format for e in options] == list(FORMATS)
    with load("demo", ctx_size=128) as base:
        new = []
        for name, tensor in base.file.tensors.items():
            values = quant.dequantize(tensor.read(0, tensor.rows), tensor.format)
            format_name = all_4.get(name, tensor.format)
            new.append(NewTensor(name, format_name, tensor.shape, quant.quantize(values, format_name)))
        write_gguf(tmp_path / "q.gguf", dict(base.file.metadata), new)
        with load(tmp_path / "q.gguf", ctx_size=128) as model:
            windows = cut_windows(model, TEXT, 128, 6)
            pair = ModelSource(model, windows), ModelSource(base, windows)
            _, found = statistics(Scores.join(list(evaluate(windows, *pair))))
    assert found is not None
    # The written file runs with activations quantized to 8 bits, in blocks of 256 for Q4_K weights.
    assert together == pytest.approx(found.kld.value, rel=0.2)


def test_a_bound_on_the_divergence_is_kept_as_measured() -> None:
    with Trial("demo", TEXT, ctx_size=128, windows=4) as trial:
        names = [f"blk.{i}.{part}.weight" for i in range(4) for part in ("ffn_up", "ffn_down")]
        effects = trial.effects(dict.fromkeys(names, FORMATS))
        formats, measured = fit_kld(trial, effects, 0.004)
        assert measured == pytest.approx(trial.kld(formats))
        assert 0.002 < measured <= 0.004
        assert len(set(formats.values())) > 1


def test_importance_is_what_the_quantizer_is_given() -> None:
    """An importance matrix of the text lowers the output error on the same text."""
    name = "blk.1.ffn_up.weight"
    with load("demo", ctx_size=64, observe=True) as model:
        windows = cut_windows(model, TEXT, 64, 4)
        imatrix = measure_imatrix(model, windows)
    errors = []
    for given in (None, imatrix):
        with Trial("demo", windows, ctx_size=64, imatrix=given) as trial:
            errors.append(trial.effects({name: ("Q4_0",)})[name][0].error)
            with pytest.raises(LocalLLMError, match="not a matrix"):
                trial.kld({"blk.0.attn_norm.weight": "Q4_0"})
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("arch", ["llama-moe", "phi3-dense"])
def test_experts_and_matrices_read_in_parts_can_be_tried(arch: str) -> None:
    """Fused matrices and experts are changed and restored as a whole.

    These models have no tokenizer, so the windows are random.
    """
    path = reference("archs", f"{arch}.gguf")
    windows = Windows(np.random.RandomState(2).randint(0, 128, (2, 32)).astype(np.int32))
    with Trial(path, windows, ctx_size=32) as trial:
        names = [n for n in trial.names if n.startswith("blk.1.") and "inp" not in n]
        effects = trial.effects(dict.fromkeys(names, ("Q4_0", "Q8_0")))
        assert any(options[0].kld > 0 for options in effects.values())
        assert all(options[0].kld >= 10 * options[-1].kld for options in effects.values())
        assert trial.kld({}) < 1e-6
