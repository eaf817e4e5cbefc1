"""Read metadata into a `Config`, with llama.cpp's defaults. Every invalid value gives a clear one-line error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.models import ARCHITECTURES, ModelError, architecture_of, read_config
from localllm.models.rope import inverse_frequencies, magnitude

MINIMAL: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 172,
    "llama.attention.head_count": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 512,
}


def config(**changes: Any) -> Any:
    keys = {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return read_config({k: v for k, v in {**MINIMAL, **keys}.items() if v is not None}, "llama")


def test_defaults_of_a_minimal_file() -> None:
    c = config()
    assert (c.layers, c.width, c.heads, c.kv_heads, c.head_dim) == (3, 64, (8, 8, 8), (8, 8, 8), (8, 8, 8))
    assert (c.ffn_width, c.vocabulary, c.context_length, c.eps) == ((172, 172, 172), 512, 2048, 1e-5)
    assert (c.rope.n_rot, c.rope.base, c.rope.scaling, c.rope.factor) == (8, 10000.0, "linear", 1.0)
    assert (c.rope.original_context, c.rope.beta_fast, c.rope.beta_slow) == (2048, 32.0, 1.0)


def test_numpy_numbers_and_per_layer_arrays_are_read() -> None:
    c = config(attention__head_count_kv=np.array([8, 4, 2], np.uint32), block_count=np.uint64(3))
    assert c.kv_heads == (8, 4, 2)
    assert all(type(n) is int for n in (*c.kv_heads, c.layers))


def test_zeros_that_mean_not_set() -> None:
    c = config(rope__scaling__factor=0.0, rope__scaling__original_context_length=0, rope__scaling__yarn_ext_factor=-1.0)
    assert (c.rope.factor, c.rope.original_context, c.rope.extrapolation) == (1.0, 2048, 1.0)


def test_the_factor_of_2023_files_and_of_no_scaling() -> None:
    assert config(rope__scale_linear=4.0).rope.factor == 4.0
    assert config(rope__scaling__type="none", rope__scaling__factor=4.0).rope.factor == 1.0


def test_the_base_stretched_by_alpha() -> None:
    """llama.cpp computes base * alpha ^ (d / (d - 2)) for Hunyuan VL; the head dimension d is 8 here."""
    assert config(rope__scaling__alpha=0.0).rope.base == 10000.0
    assert config(rope__scaling__alpha=1000.0).rope.base == pytest.approx(1e8)
    with pytest.raises(ModelError, match=r"rope\.scaling\.alpha: expected 0 or a number from 1 up, found 0\.5"):
        config(rope__scaling__alpha=0.5)


def test_the_vocabulary_is_the_tokenizers() -> None:
    tokens = {**MINIMAL, "tokenizer.ggml.tokens": ["a"] * 700}
    assert read_config(tokens, "llama").vocabulary == 700


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, None) for key in MINIMAL if key not in ("general.architecture",)),
        ("llama.block_count", 0),
        ("llama.block_count", 2**63),
        ("llama.block_count", -1),
        ("llama.block_count", True),
        ("llama.block_count", 3.0),
        ("llama.block_count", "3"),
        ("llama.embedding_length", 2**31),
        ("llama.embedding_length", [64]),
        ("llama.context_length", 2**40),
        ("llama.vocab_size", 2**32 - 1),
        ("llama.feed_forward_length", [1, 2]),
        ("llama.feed_forward_length", [1, 2, 0]),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", "many"),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", [8, 8]),
        ("llama.attention.head_count_kv", 16),
        ("llama.attention.key_length", 0),
        ("llama.attention.key_length", 2**20),
        ("llama.attention.value_length", 2049),
        ("llama.attention.layer_norm_rms_epsilon", 0.0),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", "1e-5"),
        ("llama.attention.causal", 3),
        ("llama.pooling_type", 5),
        ("llama.pooling_type", "mean"),
        ("llama.attention.head_count", 1025),
        ("llama.attention.head_count_kv", 2**16),
        ("llama.attention.key_length", 2049),
        ("llama.expert_count", 4097),
        ("llama.expert_count", -1),
        ("llama.expert_count", 2**21),
        ("llama.nextn_predict_layers", 3),
        ("llama.rope.dimension_count", 7),
        ("llama.rope.dimension_count", 10),
        ("llama.rope.dimension_count", 0),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.freq_base", float("inf")),
        ("llama.rope.scaling.type", "ntk"),
        ("llama.rope.scaling.type", 3),
        ("llama.rope.scaling.factor", -2.0),
        ("llama.rope.scaling.factor", float("inf")),
        ("llama.rope.scaling.yarn_beta_slow", 0.0),
        ("llama.rope.scaling.yarn_log_multiplier", -1.5),
        ("tokenizer.ggml.tokens", []),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", 5),
    ],
)
def test_a_wrong_key_is_named_with_what_was_found(key: str, value: Any) -> None:
    metadata = {k: v for k, v in {**MINIMAL, key: value}.items() if v is not None}
    with pytest.raises(ModelError) as caught:
        read_config(metadata, "llama")
    assert str(caught.value).startswith(f"{key}: ")
    if type(value) in (int, str, float):
        assert str(value)[:20] in str(caught.value)


def test_an_odd_head_width_must_be_said() -> None:
    with pytest.raises(ModelError, match=r"llama\.attention\.key_length: this key is missing"):
        config(attention__head_count=7)
    assert config(attention__head_count=7, attention__key_length=10).head_dim == (10, 10, 10)


def test_an_unknown_architecture_is_named_with_the_nearest_supported_one() -> None:
    with pytest.raises(
        ModelError, match=r"^general\.architecture: 'qwen9moe' is not supported; .* ones is 'qwen[23]moe'$"
    ):
        architecture_of({"general.architecture": "qwen9moe"})
    with pytest.raises(
        ModelError, match=r"^general\.architecture: the key is missing; \d+ architectures are supported$"
    ):
        architecture_of({})
    with pytest.raises(ModelError, match=r"^general\.architecture: expected a name, found '3'; "):
        architecture_of({"general.architecture": 3})
    assert architecture_of({"general.architecture": "qwen3"}) is ARCHITECTURES["qwen3"]


EXPERTS: dict[str, Any] = {"llama.expert_count": 8, "llama.expert_used_count": 2}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"llama.attention.head_count": 8191, "llama.attention.key_length": 2}, "attention.head_count"),
        ({"llama.attention.head_count": 8, "llama.attention.key_length": 1 << 19}, "attention.key_length"),
        ({"llama.expert_count": 200000, "llama.expert_used_count": 2}, "expert_count"),
        ({"llama.expert_count": 4096, "llama.expert_used_count": 257}, "expert_used_count"),
    ],
)
def test_numbers_that_kernels_are_compiled_for_are_bounded_and_the_error_says_so(
    given: dict[str, Any], key: str
) -> None:
    with pytest.raises(ModelError, match=rf"^llama\.{key}: .*kernels are compiled for this number"):
        read_config({**MINIMAL, **given}, "llama")


def test_layouts_of_heads_are_bounded() -> None:
    def layers(different: int) -> dict[str, Any]:
        heads = [1 + layer % different for layer in range(40)]
        keys = {
            "block_count": 40,
            "attention.head_count": heads,
            "attention.head_count_kv": 1,
            "attention.key_length": 8,
        }
        return {**MINIMAL, **{f"llama.{key}": value for key, value in keys.items()}, "llama.feed_forward_length": 64}

    assert read_config(layers(16), "llama").heads[:17] == (*range(1, 17), 1)
    with pytest.raises(ModelError, match=r"^llama\.attention\.head_count: expected at most 16 different layouts"):
        read_config(layers(17), "llama")


YARN = {
    "attention__key_length": 128,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 16.0,
    "rope__scaling__original_context_length": 4096,
}


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    """With the parameters of YaRN's Llama 2 models, the ramp from kept to interpolated frequencies runs from
    pair 20 to pair 46.
    """
    plain = np.array(inverse_frequencies(config(attention__key_length=128).rope, None))
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(64) / 64), rtol=1e-15)
    scaled = np.array(inverse_frequencies(config(**YARN).rope, None))
    share = np.clip((np.arange(64) - 20) / (46 - 20), 0, 1)
    np.testing.assert_allclose(scaled / plain, share / 16 + 1 - share, rtol=1e-14)
    assert magnitude(config(**YARN).rope) == pytest.approx(1.0 + 0.1 * np.log(16.0), rel=1e-15)


def test_yarn_without_extrapolation_is_linear_scaling() -> None:
    rope = config(**YARN, rope__scaling__yarn_ext_factor=0.0, rope__scaling__attn_factor=1.1).rope
    linear = config(**{**YARN, "rope__scaling__type": "linear"}).rope
    np.testing.assert_allclose(inverse_frequencies(rope, None), inverse_frequencies(linear, None), rtol=1e-15)
    assert (magnitude(rope), magnitude(linear)) == (1.1, 1.0)


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(1, 64),
    st.floats(),
    st.sampled_from(["yarn", "none", "llama", 1e-300, 1e300, 5e-324]),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=4),
    st.just(np.array([1, 2, 3])),
    st.just(np.array(["a", "b"])),
)
_KEYS = [
    *MINIMAL,
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.attention.causal",
    "llama.pooling_type",
    "llama.attention.temperature_scale",
    "llama.expert_count",
    "llama.expert_used_count",
    "llama.expert_group_count",
    "llama.nextn_predict_layers",
    "llama.rope.dimension_sections",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.rope.scaling.type",
    "llama.rope.scaling.alpha",
    "llama.rope.scaling.factor",
    "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.yarn_beta_fast",
    "llama.rope.scaling.yarn_ext_factor",
    "llama.rope.scaling.yarn_log_multiplier",
    "tokenizer.ggml.tokens",
]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), _JUNK, max_size=6))
def test_any_junk_ends_in_a_config_or_in_one_line(changes: dict[str, Any]) -> None:
    metadata = {k: v for k, v in {**MINIMAL, **changes}.items() if v is not None}
    message = ""
    try:
        c = read_config(metadata, architecture_of(metadata).name)
        magnitude(c.rope)
        assert len(inverse_frequencies(c.rope, None)) == c.rope.n_rot // 2
    except ModelError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 300
