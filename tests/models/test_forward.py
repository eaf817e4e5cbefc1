"""Plans give the results of llama.cpp and of implementations from the papers. Inconsistent GGUFs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.models import ModelError, architecture_of, read_config, record
from localllm.plan import Linear, Norm, Rotate, SelectRows
from tests.models import tiny
from tests.models.straight_line import forward
from tests.models.support import Driver, MemoryWeight, bind_reference, nmse, plan_of
from tests.models.tiny import CONTEXT, FFN, PROMPT, TOKENS, VARIANTS, VOCABULARY, WIDTH
from tests.models.tiny_families import FAMILIES

LLAMA_CPP = np.load(Path(__file__).parent / "data" / "tiny_llama_cpp.npz")


def run(model: tiny.Model, tokens: np.ndarray = TOKENS, prompt: int = PROMPT) -> np.ndarray:
    """Return the logits of every position: the prompt as one batch, then one token at a time."""
    driver = Driver(bind_reference(plan_of(*model), positions=CONTEXT))
    rows = [driver.step([(0, tokens[:prompt])])] if prompt else []
    return np.concatenate(rows + [driver.step([(0, [token])]) for token in tokens[prompt:]])


@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
def test_logits_equal_those_of_llama_cpp(name: str) -> None:
    metadata, tensors = (VARIANTS | FAMILIES)[name]()
    table_of_halves = architecture_of(metadata).activation == "gelu"  # ggml computes GELU from an F16 table
    limit = 1e-6 if table_of_halves else 1e-10
    assert nmse(run((metadata, tensors)), LLAMA_CPP[name]).max() < limit


def test_every_variant_differs_from_the_others() -> None:
    """A feature that both llama.cpp and localllm ignore would pass any comparison. So each variant must change the
    logits.
    """
    assert nmse(LLAMA_CPP["llama linear"], LLAMA_CPP["llama factor of no scaling"]).max() > 1e-3
    assert nmse(LLAMA_CPP["phi3 long"], LLAMA_CPP["phi3 short"]).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "key", "other"),
    [
        ("llama experts", "expert_used_count", 3),
        ("glm4moe", "expert_weights_norm", False),
        ("glm4moe", "expert_weights_scale", 1.0),
        ("glm4moe", "expert_gating_func", 1),
        ("gpt-oss", "attention.sliding_window", 6),
        ("gemma2", "attention.sliding_window", 0),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "final_logit_softcapping", 0.0),
        ("gemma3", "rope.scaling.factor", 4.0),
        ("gemma3", "attention.sliding_window_pattern", 2),
        ("gemma3 pattern", "rope.freq_base_swa", 10000.0),
        ("granite", "embedding_scale", 1.0),
        ("granite", "residual_scale", 1.0),
        ("granite", "attention.scale", 0.0),
        ("granite", "logit_scale", 1.0),
        ("granite without rope", "rope.scaling.finetuned", True),
        ("glm4", "rope.dimension_sections", [2, 2, 0, 0]),
    ],
)
def test_every_key_changes_the_logits(name: str, key: str, other: Any) -> None:
    metadata, tensors = FAMILIES[name]()
    changed = metadata | {f"{metadata['general.architecture']}.{key}": other}
    assert nmse(run((changed, tensors)), LLAMA_CPP[name]).max() > 1e-5


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gpt-oss", "blk.0.attn_sinks.weight"),
        ("gpt-oss", "blk.2.ffn_gate_inp.bias"),
        ("gpt-oss", "blk.1.ffn_down_exps.bias"),
        ("glm4moe", "blk.1.exp_probs_b.bias"),
        ("llama experts", "blk.1.ffn_up_exps.scale"),
        ("llama fused qkv", "blk.0.attn_qkv.bias"),
        ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight"),
        ("stablelm head norms", "blk.0.attn_k_norm.weight"),
    ],
)
def test_every_optional_tensor_changes_the_logits(name: str, tensor: str) -> None:
    assert nmse(run(change(FAMILIES[name](), tensor, None)), LLAMA_CPP[name]).max() > 1e-6


STYLES: dict[str, dict[str, Any]] = {
    "llama": {"seed": 20, "per_layer": (*tiny.QKV_BIAS, "attn_output.bias", *tiny.FFN_BIAS)},
    "qwen2": {
        "seed": 21,
        "per_layer": tiny.QKV_BIAS,
        "tied": True,
        "extra": lambda random: {"output.bias": random.standard_normal(VOCABULARY)},
    },
    "qwen3": {"seed": 22, "head_dim": 16, "per_layer": ("attn_q_norm.weight", "attn_k_norm.weight")},
}


@pytest.mark.parametrize("n_rot", [4, 8])
@pytest.mark.parametrize("architecture", STYLES)
def test_logits_equal_a_straight_line_float64_forward(architecture: str, n_rot: int) -> None:
    style = STYLES[architecture]
    metadata, tensors = tiny.make(architecture, **style, n_rot=n_rot)
    values = {name: tensor.values() for name, tensor in tensors.items()}
    expected = forward(
        values,
        TOKENS,
        layers=2,
        heads=4,
        kv_heads=[2, 2],
        head_dim=style.get("head_dim", 8),
        n_rot=n_rot,
        neox=architecture != "llama",
    )
    assert nmse(run((metadata, tensors)), expected).max() < 1e-11


def test_heads_may_differ_from_layer_to_layer() -> None:
    metadata, tensors = tiny.make("llama", seed=23)
    other = tiny.make("llama", seed=24, kv_heads=4)[1]
    tensors |= {name: other[name] for name in other if name.startswith("blk.1.")}
    metadata["llama.attention.head_count_kv"] = [2, 4]
    values = {name: tensor.values() for name, tensor in tensors.items()}
    expected = forward(values, TOKENS, layers=2, heads=4, kv_heads=[2, 4], head_dim=8, n_rot=8, neox=False)
    assert nmse(run((metadata, tensors)), expected).max() < 1e-11


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_a_quantized_model_computes_with_the_numbers_its_bytes_mean(format: str) -> None:
    """Rows are whole quantization blocks: a width of 32 is one block of Q8_0 or Q4_0, and the inner width of
    64 is two.
    """
    metadata, tensors = tiny.make("llama", seed=25)
    inner = np.random.RandomState(0).standard_normal((4, 64, WIDTH)) / 6
    for i in range(2):
        tensors[f"blk.{i}.ffn_gate.weight"] = MemoryWeight.of(f"blk.{i}.ffn_gate.weight", inner[i])
        tensors[f"blk.{i}.ffn_up.weight"] = MemoryWeight.of(f"blk.{i}.ffn_up.weight", inner[i] * 0.5)
        tensors[f"blk.{i}.ffn_down.weight"] = MemoryWeight.of(f"blk.{i}.ffn_down.weight", inner[2 + i].T)
    metadata["llama.feed_forward_length"] = 64
    packed = {n: MemoryWeight.of(n, t.values(), format if len(t.shape) == 2 else "F32") for n, t in tensors.items()}
    plain = {n: MemoryWeight.of(n, t.values()) for n, t in packed.items()}
    np.testing.assert_array_equal(run((metadata, packed)), run((metadata, plain)))
    # Quantization must have changed the weights.
    assert nmse(run((metadata, packed)), run((metadata, tensors))).max() > 1e-12


@pytest.mark.parametrize("prompt", [0, 1, 7, 24])
def test_chunking_of_the_prompt_does_not_change_a_bit(prompt: int) -> None:
    model = VARIANTS["qwen3"]()
    np.testing.assert_array_equal(run(model, prompt=prompt), run(model))


def test_sequences_in_one_batch_do_not_see_each_other() -> None:
    model = VARIANTS["llama plain"]()
    other = TOKENS[::-1].copy()
    driver = Driver(bind_reference(plan_of(*model), positions=CONTEXT), sequences=2)
    parts = [driver.step([(1, other[:5]), (0, TOKENS[:9])]), driver.step([(0, TOKENS[9:16]), (1, other[5:6])])]
    ours = np.concatenate([parts[0][5:], parts[1][:7]])
    theirs = np.concatenate([parts[0][:5], parts[1][7:]])
    np.testing.assert_array_equal(ours, run(model)[:16])
    np.testing.assert_array_equal(theirs, run(model, other)[:6])


def test_only_wanted_rows_reach_the_last_feed_forward_and_the_output_matrix() -> None:
    plan = plan_of(*VARIANTS["llama plain"]())
    selected = [op.x.width for op in plan.operations if isinstance(op, SelectRows)]
    assert selected == [WIDTH, WIDTH]
    linears = {op.weight.name: op.out.rows for op in plan.operations if isinstance(op, Linear)}
    assert {name for name, rows in linears.items() if rows == "logits"} == {
        "output.weight",
        *(f"blk.1.{part}.weight" for part in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")),
    }
    driver = Driver(bind_reference(plan, positions=CONTEXT))
    some = driver.step([(0, TOKENS)], logit_rows=[23, 4])
    np.testing.assert_array_equal(some, run(VARIANTS["llama plain"]())[[23, 4]])


def test_smollm3_rotates_three_layers_of_four() -> None:
    plan = plan_of(*VARIANTS["smollm3"]())
    rotated = [op.x.name for op in plan.operations if isinstance(op, Rotate) and "attn_q" in op.x.name]
    assert rotated == [f"blk.{layer}.attn_q.weight" for layer in (0, 1, 2, 4, 5, 6)]


def test_head_norms_are_applied_wherever_the_file_has_them() -> None:
    model = tiny.make("llama", seed=26, per_layer=("attn_q_norm.weight",))
    assert [op.groups for op in plan_of(*model).operations if isinstance(op, Norm) and op.groups > 1] == [4, 4]


def change(model: tiny.Model, name: str, weight: MemoryWeight | None) -> tiny.Model:
    metadata, tensors = model
    rest = {n: t for n, t in tensors.items() if n != name}
    return metadata, rest if weight is None else rest | {name: weight}


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_norm.weight",
        "blk.1.attn_k.weight",
        "blk.0.ffn_norm.weight",
        "blk.1.ffn_down.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=rf"^{name}: this tensor is missing; expected shape \("):
        plan_of(*change(VARIANTS["llama plain"](), name, None))


def test_qwen3_needs_its_head_norms() -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm\.weight: .*expected shape \(8\)"):
        plan_of(*tiny.make("qwen3", seed=1))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("token_embd.weight", (VOCABULARY + 1, WIDTH)),
        ("output.weight", (WIDTH, VOCABULARY)),
        ("blk.0.attn_q.weight", (WIDTH, WIDTH - 2)),
        ("blk.0.attn_q.bias", (WIDTH + 1,)),
        ("blk.1.ffn_up.weight", (FFN * WIDTH,)),
        ("blk.1.ffn_norm.weight", (1, WIDTH)),
        ("rope_freqs.weight", (8,)),
        ("blk.0.attn_v.scale", (2,)),
    ],
)
def test_a_wrong_shape_says_found_and_expected(name: str, shape: tuple[int, ...]) -> None:
    model = change(VARIANTS["llama plain"](), name, MemoryWeight.of(name, np.ones(shape)))
    found = ", ".join(map(str, shape))
    with pytest.raises(ModelError, match=rf"^{name}: expected shape \(.*\), found \({found}\)$"):
        plan_of(*model)


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("llama experts", "blk.0.ffn_gate_inp.weight", (7, WIDTH)),
        ("llama experts", "blk.0.ffn_gate_exps.weight", (8, FFN + 8, WIDTH)),
        ("llama experts", "blk.1.ffn_down_exps.weight", (7, WIDTH, FFN)),
        ("llama experts", "blk.1.ffn_up_exps.weight", (8 * FFN, WIDTH)),
        ("llama experts", "blk.1.ffn_up_exps.scale", (1,)),
        ("gpt-oss", "blk.0.attn_sinks.weight", (1,)),
        ("gpt-oss", "blk.0.ffn_down_exps.bias", (WIDTH, 8)),
        ("qwen2moe", "blk.0.ffn_gate_shexp.weight", (8, WIDTH)),
        ("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight", (1, WIDTH)),
        ("llama fused qkv", "blk.0.attn_qkv.weight", (32, WIDTH)),
        ("llama fused qkv", "blk.0.attn_qkv.bias", (32,)),
        ("phi3", "blk.0.ffn_up.weight", (FFN, WIDTH)),
        ("olmo2", "blk.0.attn_q_norm.weight", (16,)),
        ("stablelm head norms", "blk.0.attn_q_norm.weight", (2, 16)),
        ("phi3 long", "rope_factors_long.weight", (3,)),
    ],
)
def test_a_wrong_shape_of_a_family_is_named(family: str, name: str, shape: tuple[int, ...]) -> None:
    model = change(FAMILIES[family](), name, MemoryWeight.of(name, np.ones(shape)))
    with pytest.raises(ModelError, match=r"^(blk|rope)\S+: expected shape \(.*\) ?.*, found \("):
        plan_of(*model)


def test_a_missing_expert_matrix_is_named() -> None:
    for part in ("ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"):
        with pytest.raises(ModelError, match=rf"^blk\.1\.{part}\.weight: this tensor is missing"):
            plan_of(*change(FAMILIES["llama experts"](), f"blk.1.{part}.weight", None))


def test_parts_of_a_bias_end_between_blocks() -> None:
    """A fused bias is split at any element, even if the 4 elements of the queries do not fill a quantization
    block of 32.
    """
    metadata, tensors = tiny.make("llama", seed=1, heads=1, kv_heads=1, head_dim=4)
    for part in "qkv":
        del tensors[f"blk.0.attn_{part}.weight"]
    tensors["blk.0.attn_qkv.weight"] = MemoryWeight.of("blk.0.attn_qkv.weight", np.ones((12, WIDTH)))
    bias = MemoryWeight("blk.0.attn_qkv.bias", "Q8_0", (12,), np.zeros((1, 34), np.uint8))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_qkv\.bias: Q8_0: .*12"):
        plan_of(metadata, tensors | {bias.name: bias})


def test_the_context_chooses_between_two_sets_of_frequency_factors() -> None:
    metadata, tensors = FAMILIES["phi3 short"]()
    row = architecture_of(metadata)
    config = read_config(metadata, row.name)
    for context, name in ((None, "short"), (256, "short"), (257, "long")):
        plan = record(config, row, tensors, context)
        frequencies = next(op.rope.inverse_frequency for op in plan.operations if isinstance(op, Rotate))
        factors = tensors[f"rope_factors_{name}.weight"].values()
        np.testing.assert_allclose(frequencies, 10000.0 ** (-np.arange(4) / 4) / factors, rtol=1e-12)


def test_a_format_that_cannot_be_a_weight_is_named() -> None:
    name = "blk.0.attn_q.weight"
    rows = np.zeros((WIDTH, WIDTH * 4), np.uint8)
    for format in ("I32", "Q9_9"):
        with pytest.raises(ModelError, match=rf"{name}: format {format} .*supported: .*F16.*Q4_0"):
            plan_of(*change(VARIANTS["llama plain"](), name, MemoryWeight(name, format, (WIDTH, WIDTH), rows)))
    down = "blk.0.ffn_down.weight"  # 40 columns do not fill blocks of 32
    with pytest.raises(ModelError, match=rf"{down}: Q8_0: .*40"):
        plan_of(*change(VARIANTS["llama plain"](), down, MemoryWeight(down, "Q8_0", (WIDTH, FFN), rows)))


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_frequency_factors_must_divide(bad: float) -> None:
    factors = MemoryWeight.of("rope_freqs.weight", np.array([1.0, bad, 1.0, 1.0]))
    with pytest.raises(ModelError, match=r"^rope_freqs\.weight: contains (a zero|NaN)"):
        plan_of(*change(VARIANTS["llama plain"](), "rope_freqs.weight", factors))


def test_a_temperature_needs_whole_heads_rotated() -> None:
    metadata, tensors = tiny.make("mistral3", seed=1, n_rot=4, keys={"attention.temperature_scale": 0.1})
    with pytest.raises(ModelError, match=r"mistral3\.attention\.temperature_scale.*8, found 4"):
        plan_of(metadata, tensors)


def test_a_plan_names_the_tensors_that_it_was_made_of() -> None:
    """The names include weight tensors, and tensors whose values are stored in operations: scales, and the frequency
    factors for the context.
    """
    metadata, tensors = VARIANTS["llama scales after biases"]()
    tensors["blk.0.attn_q.input_scale"] = MemoryWeight.of("blk.0.attn_q.input_scale", np.ones(1))
    assert tensors.keys() - plan_of(metadata, tensors).tensors == {"blk.0.attn_q.input_scale"}
    for name, other in (("long", "short"), ("short", "long")):
        metadata, tensors = FAMILIES[f"phi3 {name}"]()
        assert tensors.keys() - plan_of(metadata, tensors).tensors == {f"rope_factors_{other}.weight"}
