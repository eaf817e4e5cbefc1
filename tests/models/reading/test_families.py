"""Properties of architecture families in a GGUF: sliding windows, latent attention, shared KV caches, RoPE."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from localllm.models import ARCHITECTURES, ModelError, read_config
from localllm.models.architectures import PLAIN
from localllm.models.config import LatentConfig
from localllm.models.families import ROWS
from localllm.models.families.gemma import TOP_TWENTIETH
from localllm.models.families.loops import LoopRecorder
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.models.rope import magnitude, score_factor
from tests.models.kit import KIT
from tests.models.reading.test_config import EXPERTS, MINIMAL


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"llama.expert_used_count": None}, r"llama\.expert_used_count: this key is missing"),
        (
            "llama",
            {"llama.expert_used_count": 9},
            r"llama\.expert_used_count: expected an integer from 1 to 8, found 9",
        ),
        ("llama", {"llama.expert_group_count": 129}, r"llama\.expert_group_count: expected .* 0 to 8, found 129"),
        ("llama", {"llama.expert_group_count": 4}, r"llama\.expert_group_used_count: this key is missing"),
        (
            "llama",
            {"llama.expert_group_count": 3, "llama.expert_group_used_count": 2},
            r"llama\.expert_group_count: 8 experts must form equal groups, .*found 3 groups",
        ),
        (
            "llama",
            {"llama.expert_group_count": 8, "llama.expert_group_used_count": 1},
            r"llama\.expert_group_count: .* 1 groups must have at least the 2 experts used, found 8 groups",
        ),
        ("qwen3", {"qwen3.expert_count": 8}, r"qwen3\.expert_count: qwen3 has no mixture of experts, found 8"),
        ("glm4moe", {"glm4moe.expert_count": 8, "glm4moe.expert_gating_func": 5}, r"glm4moe\.expert_gating_func: "),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [1, 0]}, r"gemma3\.attention.*: expected 3 numbers"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [2, 0, 0]}, r"gemma3\.attention.*from 0 to 1, found 2"),
        ("gemma3", {"gemma3.attention.sliding_window": -1}, r"gemma3\.attention\.sliding_window: "),
        ("granite", {"granite.rope.scaling.finetuned": 1}, r"granite\.rope.*: expected true or false, found 1"),
    ],
)
def test_what_a_family_cannot_be_is_said(architecture: str, changes: dict[str, Any], message: str) -> None:
    base = {key.replace("llama.", f"{architecture}."): value for key, value in MINIMAL.items()}
    base |= EXPERTS if architecture == "llama" else {}
    with pytest.raises(ModelError, match="^" + message):
        read_config({k: v for k, v in (base | changes).items() if v is not None}, architecture)


def sliding(architecture: str, layers: int = 7, **changes: Any) -> Any:
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in MINIMAL.items()}
    keys |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return read_config(keys | {f"{architecture}.block_count": layers}, architecture)


def test_windows_as_the_families_have_them() -> None:
    assert sliding("gemma2").windows == (4096, 0, 4096, 0, 4096, 0, 4096)
    assert sliding("gpt-oss", attention__sliding_window=128).windows == (128, 0, 128, 0, 128, 0, 128)
    assert sliding("gemma3").windows == (0,) * 7
    assert sliding("gemma3", attention__sliding_window=512).windows == (512,) * 5 + (0, 512)
    pattern = np.array([True, False, True])
    c = sliding("gemma3", 3, attention__sliding_window=512, attention__sliding_window_pattern=pattern)
    assert c.windows == (512, 0, 512)
    c = sliding("gemma3", 4, attention__sliding_window=9, attention__sliding_window_pattern=2)
    assert c.windows == (9, 0, 9, 0)
    # llama.cpp ignores the sliding-window key of Mistral 7B v0.1.
    assert sliding("llama", attention__sliding_window=4096).windows == (0,) * 7


def test_sliding_layers_may_have_heads_of_another_width() -> None:
    widths = {"attention__key_length": 16, "attention__value_length": 16, "rope__dimension_count": 12}
    own = {"attention__key_length_swa": 8, "attention__value_length_swa": 4, "rope__dimension_count_swa": 6}
    c = sliding("gemma3", 3, attention__sliding_window=512, attention__sliding_window_pattern=2, **widths, **own)
    assert (c.windows, c.head_dim, c.value_dim) == ((512, 0, 512), (8, 16, 8), (4, 16, 4))
    assert c.attention_scale == pytest.approx((8**-0.5, 16**-0.5, 8**-0.5))
    assert (c.rope.n_rot, c.window_rope.n_rot) == (12, 6)
    assert sliding("gemma3", attention__sliding_window=512, **widths).head_dim == (16,) * 7
    for key, bad in (("attention__value_length_swa", 2049), ("rope__dimension_count_swa", 9)):
        with pytest.raises(ModelError, match=rf"^gemma3\.{key.replace('__', '.')}: .*{bad}"):
            sliding("gemma3", 3, attention__sliding_window=512, **widths, **(own | {key: bad}))


LATENT: dict[str, Any] = {
    "deepseek2.attention.kv_lora_rank": 64,
    "deepseek2.rope.dimension_count": 16,
    "deepseek2.attention.key_length": 80,
    "deepseek2.attention.value_length": 64,
    "deepseek2.attention.key_length_mla": 48,
    "deepseek2.attention.value_length_mla": 24,
}


def latent(**changes: Any) -> Any:
    base = {key.replace("llama.", "deepseek2."): value for key, value in (MINIMAL | LATENT).items()}
    return read_config(
        base | {f"deepseek2.{key.replace('__', '.')}": value for key, value in changes.items()}, "deepseek2"
    )


def test_latent_attention() -> None:
    """A GGUF of an absorbed MLA model stores the head dimensions under separate keys."""
    assert latent().latent == LatentConfig(64, 32, 16, 24)
    assert latent().attention_scale[0] == pytest.approx(48**-0.5)
    old = latent(attention__key_length_mla=0, attention__key_length=40, attention__value_length=20)
    assert old.latent == LatentConfig(64, 24, 16, 20)
    for key, bad, message in (
        ("attention.kv_lora_rank", 63, "expected an even number, found 63"),
        ("attention.kv_lora_rank", 2034, "expected an integer from 2 to 2032"),
        ("attention.key_length_mla", 49, "expected an even number, found 49"),
        ("rope.dimension_count", 50, "expected an integer from 2 to 48"),
    ):
        with pytest.raises(ModelError, match=rf"^deepseek2\.{key}: .*{message}"):
            latent(**{key.replace(".", "__"): bad})


def test_yarn_of_deepseek() -> None:
    """A GGUF stores a tenth of mscale_all_dim, which equals mscale. Attention scores are multiplied by the square of
    the result.
    """
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 40.0, "rope__scaling__original_context_length": 64}
    found = latent(rope__scaling__yarn_log_multiplier=0.0707, **yarn).rope
    assert magnitude(found) == pytest.approx(1.0)
    assert score_factor(found) == pytest.approx((1 + 0.0707 * math.log(40)) ** 2)
    without, zero = latent(**yarn).rope, latent(rope__scaling__yarn_log_multiplier=0.0, **yarn).rope
    temperature = pytest.approx(1 + 0.1 * math.log(40))
    assert (magnitude(without), math.sqrt(score_factor(without))) == (temperature, temperature)
    assert (magnitude(zero), score_factor(zero)) == (temperature, 1.0)


def sharing(architecture: str, layers: int, own: int, **changes: Any) -> Any:
    keys = {"attention__sliding_window": 512, "attention__sliding_window_pattern": 3}
    return sliding(architecture, layers, attention__shared_kv_layers=layers - own, **keys, **changes)


def test_the_last_layers_share_keys_and_values_of_the_last_of_their_kind() -> None:
    assert sharing("gemma4", 9, 5).kv_layer == (0, 1, 2, 3, 4, 2, 4, 4, 2)
    assert sharing("gemma4", 9, 9).kv_layer == tuple(range(9))
    assert sharing("gemma3", 9, 5).kv_layer == tuple(range(9))  # only some architectures have this key
    assert len(set(sliding("gemma3n", 30, attention__sliding_window=512).kv_layer)) == 20
    message = r"^gemma4\.attention\.shared_kv_layers: layer 2 has 8 .*, found none of its kind in the first 2 layers$"
    with pytest.raises(ModelError, match=message):
        sharing("gemma4", 9, 2)
    message = r"^gemma4\.attention\.shared_kv_layers: layer 4 has 2 .*, found 4 key-value heads in the first 4 layers$"
    with pytest.raises(ModelError, match=message):
        sharing("gemma4", 6, 4, attention__head_count_kv=[4, 4, 4, 4, 2, 4])


def test_gates_of_gemma3n_are_sparse_where_the_file_says() -> None:
    """A layer without sparsity has the scale minus infinity in the GGUF, so that no activation is below the
    threshold.
    """
    found = sliding("gemma3n", 3, activation_sparsity_scale=[1.5, 0.0, -math.inf])
    assert found.own.sparsity == (1.5, 0.0, None)
    assert sliding("gemma3n", 12).own.sparsity == (TOP_TWENTIETH,) * 10 + (None, None)
    assert (found.own.streams, found.own.active_stream) == (4, 0)
    for value in ([1.5, 1.5], [1.5, 1.5, math.nan], [1.5, 1.5, 1e30], "1.5"):
        with pytest.raises(ModelError, match=r"^gemma3n\.activation_sparsity_scale: expected "):
            sliding("gemma3n", 3, activation_sparsity_scale=value)
    with pytest.raises(ModelError, match=r"^gemma3n\.altup\.active_idx: expected an integer from 0 to 2, found 3$"):
        sliding("gemma3n", altup__num_inputs=3, altup__active_idx=3)


def test_sliding_layers_of_some_families_are_not_stretched() -> None:
    stretch = {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    bases = {"gemma3": 1e4, "gemma4": 1e4, "mimo2": 1e4, "olmo2": 1e6, "plamo3": 1e4, "step35": 1e4}
    for architecture, base in bases.items():
        c = sliding(architecture, attention__sliding_window=512, **stretch)
        assert (c.rope.base, c.rope.factor) == (1e6, 8.0)
        assert (c.window_rope.base, c.window_rope.factor) == (base, 1.0)
    assert sliding("gemma2", **stretch).window_rope == sliding("gemma2", **stretch).rope


def test_a_pattern_says_which_layers_of_granite_are_rotated() -> None:
    assert sliding("granite_swa", 3).rotated == (True, True, True)
    assert sliding("granite_swa", 3, attention__rope_pattern=1).rotated == (True, True, True)
    pattern = np.array([True, False, True])
    assert sliding("granite_swa", 3, attention__rope_pattern=pattern).rotated == (True, False, True)
    with pytest.raises(ModelError, match=r"^granite_swa\.attention\.rope_pattern: expected 3 numbers, .*found 2$"):
        sliding("granite_swa", 3, attention__rope_pattern=[1, 0])


def test_the_largest_gemmas_divide_scores_by_another_width() -> None:
    shape = {"embedding_length": 4608, "attention__head_count": 32, "attention__key_length": 128}
    assert sliding("gemma2", 46, **shape).attention_scale[0] == pytest.approx(144**-0.5)
    assert sliding("gemma2", 42, **shape).attention_scale[0] == pytest.approx(128**-0.5)


def test_layers_that_guess_further_tokens_are_left_out() -> None:
    c = sliding("glm4moe", 5, nextn_predict_layers=1, attention__head_count_kv=[8, 8, 8, 4, 2])
    assert (c.layers, c.kv_heads, len(c.ffn_width), len(c.windows)) == (4, (8, 8, 8, 4), 4, 4)


def test_layer_norms_with_the_key_of_rms_norms() -> None:
    """GGUFs of Phi MoE store the epsilon of layer norms under the key of RMS norms."""
    assert sliding("phimoe").eps == 1e-5
    assert sliding("phimoe").norm == "layer"


def test_rows_are_in_the_order_of_their_names() -> None:
    first, *others = ARCHITECTURES
    assert first == "llama"
    assert others == sorted(others)
    assert len(ARCHITECTURES) == len(PLAIN) + len(ROWS)  # no two rows have the same name


@pytest.mark.parametrize("name", ["dream", "llada", "llada-moe", "rnd1"])
def test_diffusion_models_see_later_rows(name: str) -> None:
    """Attention is bidirectional regardless of the GGUF's key, as in llama.cpp."""
    metadata = dict(KIT[next(each for each in KIT if each.startswith(f"{name}-"))].loaded()[0])
    for key in (True, False):
        metadata[f"{name}.attention.causal"] = key
        assert not read_config(metadata, name).causal


def test_all_layers_run_again() -> None:
    config = sliding("nanbeige", 4, num_loops=3)
    assert (config.layers, config.heads, config.own.normed) == (12, config.heads[:1] * 12, True)
    assert [int(LoopRecorder.stored(config, f"blk.{layer}.x")[4]) for layer in range(12)] == [0, 1, 2, 3] * 3
    assert not sliding("nanbeige", 4, num_loops=3, skip_loop_final_norm=True).own.normed
    assert not sliding("nanbeige", 4, num_loops=1).own.normed
    for wrong in (0, MAX_LAYERS // 4 + 1):
        with pytest.raises(ModelError, match=r"^nanbeige\.num_loops: expected an integer from 1 to "):
            sliding("nanbeige", 4, num_loops=wrong)


def test_two_stacks_run_in_turn() -> None:
    keys = {"hrm__layers_per_stack": 2, "hrm__h_cycles": 2, "hrm__l_cycles": 3}
    stacks = sliding("hrm_text", 16, **keys).own
    assert [stacks.high(layer) for layer in range(16)] == ([False] * 6 + [True] * 2) * 2
    assert [stacks.block(layer) for layer in range(16)] == [0, 1, 0, 1, 0, 1, 2, 3] * 2
    assert sliding("llama", 16, **keys).own is None
    message = r"^hrm_text\.block_count: expected hrm\.layers_per_stack 2 \* .* = 16 layers of all passes, found 15$"
    with pytest.raises(ModelError, match=message):
        sliding("hrm_text", 15, **keys)
    with pytest.raises(ModelError, match=r"^hrm_text\.hrm\.l_cycles: expected an integer from 1 to .*, found 0$"):
        sliding("hrm_text", 4, **{**keys, "hrm__l_cycles": 0})
