"""Every architecture of the table converts and gives transformers' logits: the stored ones and, if torch is
installed, recomputed ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from localllm.convert.recipes.table import RECIPES
from localllm.models import ARCHITECTURES
from tests.localllm.convert.hf_encoders import ENCODERS
from tests.localllm.convert.hf_models import ids, make, sees
from tests.localllm.convert.hf_own import OWN
from tests.localllm.convert.hf_synthetic import DATA, LEFT_OUT, POSITIONS, numbers, read_specs, write_folder
from tests.localllm.convert.hf_t5 import FAMILY
from tests.localllm.convert.hf_table import MODELS
from tests.localllm.convert.support import logits_of, save
from tests.models.support import nmse


def test_every_recipe_is_of_an_architecture_that_runs() -> None:
    """The architecture of every conversion recipe is implemented. All architectures except nomic-bert-moe and
    chameleon have a recipe.
    """
    assert set(RECIPES) <= set(ARCHITECTURES)
    assert set(ARCHITECTURES) - set(RECIPES) == {"chameleon", "nomic-bert-moe"}
    assert len(RECIPES) == 144


def test_every_recipe_has_a_model_here() -> None:
    made = {
        name.split("-")[0] if name not in ARCHITECTURES and name != "gpt-oss-mxfp4" else name
        for name in (*MODELS, *ENCODERS, *FAMILY, *OWN)
    }
    assert set(RECIPES) <= made


SPECS, STORED = read_specs(), np.load(DATA / "hf_all.npz")


def test_stored_logits_are_of_every_model() -> None:
    assert {*SPECS} == {*STORED.files} == set(MODELS) - set(LEFT_OUT)


@pytest.mark.parametrize("name", SPECS)
def test_stored_logits_are_those_of_the_converted_folder(name: str, tmp_path: Path) -> None:
    write_folder(SPECS[name], tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert len(model.notes) == sees(name)  # the note on skipped vision tensors
        assert nmse(logits_of(model, ids())[POSITIONS], STORED[name]).max() < 1e-9


@pytest.mark.parametrize("name", SPECS)
def test_tensors_have_the_names_of_the_gguf_package(name: str, tmp_path: Path) -> None:
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

    write_folder(SPECS[name], tmp_path)
    with open_checkpoint(tmp_path) as model:
        architecture, found = model.metadata["general.architecture"], set(model.tensors)
    number = next((key for key, known in MODEL_ARCH_NAMES.items() if known == architecture), None)
    if number is None:
        pytest.skip(f"this gguf package does not know {architecture}")
    names = {re.sub(r"^blk[.][0-9]+[.]", "blk.{bid}.", re.sub(r"[.](weight|bias|scale)$", "", x)) for x in found}
    assert names <= {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[number]}


def test_what_config_json_of_gemma3_may_leave_out(tmp_path: Path) -> None:
    """transformers' Gemma 3 defaults (8 query heads and 4 KV heads of size 256) apply, because published checkpoints
    omit these keys.
    """
    spec = read_specs()["gemma3"]
    left_out = (
        "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
        "rope_parameters", "sliding_window", "query_pre_attn_scalar", "hidden_activation",
    )  # fmt: skip
    spec["config"] = {key: value for key, value in spec["config"].items() if key not in left_out}
    sizes = {"q_proj": [2048, 32], "k_proj": [1024, 32], "v_proj": [1024, 32], "o_proj": [32, 2048]}
    sizes |= {"q_norm": [256], "k_norm": [256]}
    spec["tensors"] = [[name, sizes.get(name.split(".")[-2], shape), base] for name, shape, base in spec["tensors"]]
    write_folder(spec, tmp_path)
    with open_checkpoint(tmp_path) as model:
        keys = {key.removeprefix("gemma3."): value for key, value in model.metadata.items()}
    expected = {
        "attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6, "context_length": 131072, "attention.sliding_window": 4096,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
    }  # fmt: skip
    assert {key: keys[key] for key in expected} == expected


def test_sparsity_of_gemma3n_in_deviations(tmp_path: Path) -> None:
    """The sparsity threshold is a multiple of the standard deviation.

    Our standard deviation divides by n - 1, as in llama.cpp, while transformers divides by n.
    """
    spec = read_specs()["gemma3n"]
    spec["config"]["activation_sparsity_pattern"] = [0.95, 0.5] + [0.0] * 5
    write_folder(spec, tmp_path)
    with open_checkpoint(tmp_path) as model:
        scales = model.stored["gemma3n.activation_sparsity_scale"]
    np.testing.assert_allclose(scales, [1.6448536, 0.0, *[-np.inf] * 5], atol=1e-6)


def test_experts_of_qwen3vl_in_folders_of_2025_are_transposed(tmp_path: Path) -> None:
    spec = SPECS["qwen3vlmoe"]
    tensors = {name: numbers(name, *rest) for name, *rest in spec["tensors"]}
    for name in tensors:
        if ".experts." in name:
            tensors[name] = np.ascontiguousarray(tensors[name].transpose(0, 2, 1))
    write_folder(spec, tmp_path)
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["qwen3vlmoe"]).max() < 1e-9


def test_an_output_that_is_the_embedding_again_is_left_out(tmp_path: Path) -> None:
    spec = SPECS["falcon"]
    tensors = {name: numbers(name, *rest) for name, *rest in spec["tensors"]}
    write_folder(spec, tmp_path)
    save(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": tensors["transformer.word_embeddings.weight"]})
    with open_checkpoint(tmp_path) as model:
        assert "output.weight" not in model.tensors


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the stored logits stand in")
    pytest.importorskip("transformers", reason="transformers is not installed: the stored logits stand in")
    theirs = make(name, tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert len(model.notes) == sees(name)  # the note on skipped vision tensors
        assert nmse(logits_of(model, ids()), theirs).max() < 1e-9
