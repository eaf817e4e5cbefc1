"""Write GGUFs with the true shapes of recurrent, latent-attention, mixture-of-experts and vision models and random
weights. The encoders of the vision models are written by `encoders.py`.

    python benchmarks/shapes.py lfm2-1.2b /tmp/lfm2.gguf [--layers N] [--vocab OTHER.gguf]

The GGUFs are for timing. Matrices are in the mix Q4_K_M as in `make_model.py`: Q6_K for the output and for the value
and down matrices of half of the layers, Q4_K for the rest. In gpt-oss, experts are in MXFP4 and other matrices in Q8_0.
Small tensors are F32. `--layers` writes only the first N layers. `--vocab` copies the tokenizer of another
GGUF, cut or filled to the model's size, with the markers of its pictures: servers send nothing for tokens without text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.make_model import Rows, byte_vocabulary, more_bits
from localllm.gguf import NewTensor, open_gguf, write_gguf

Shapes = dict[str, tuple[int, ...]]
MATRICES = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight", "attn_qkv.weight")
EXACT = (".bias", "ffn_gate_inp.weight", "ssm_norm.weight", "_ape.weight", "_fn.weight")  # always F32


@dataclass(frozen=True, slots=True)
class Model:
    """The metadata of a model, and the tensors of a layer. `tied` models have no output matrix."""

    architecture: str
    layers: int
    width: int
    vocabulary: int
    keys: dict[str, Any]
    layer: Callable[[int], Shapes]
    tied: bool = False
    output_norm: str = "output_norm"
    experts: str = ""  # format of the experts' matrices; "" means the format of the other matrices
    extra: Shapes = field(default_factory=dict)  # additional tensors outside the layers
    markers: tuple[str, ...] = ()  # tokens that the prompt of a picture needs


def attention(width: int, heads: int, kv_heads: int, dim: int, gate: bool = False, norms: bool = False) -> Shapes:
    found = {
        "attn_q.weight": (heads * dim * (1 + gate), width), "attn_k.weight": (kv_heads * dim, width),
        "attn_v.weight": (kv_heads * dim, width), "attn_output.weight": (width, heads * dim),
    }  # fmt: skip
    return found | ({"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)} if norms else {})


def dense(width: int, ffn: int) -> Shapes:
    return {"ffn_gate.weight": (ffn, width), "ffn_up.weight": (ffn, width), "ffn_down.weight": (width, ffn)}


def mixture(width: int, experts: int, ffn: int, shared: int = 0) -> Shapes:
    found = {
        "ffn_gate_inp.weight": (experts, width), "ffn_gate_exps.weight": (experts, ffn, width),
        "ffn_up_exps.weight": (experts, ffn, width), "ffn_down_exps.weight": (experts, width, ffn),
    }  # fmt: skip
    if shared:
        found |= {
            "ffn_gate_shexp.weight": (shared, width), "ffn_up_shexp.weight": (shared, width),
            "ffn_down_shexp.weight": (width, shared),
        }  # fmt: skip
    return found


def delta_net(width: int, key_heads: int, heads: int, dim: int) -> Shapes:
    rows = (2 * key_heads + heads) * dim
    return {
        "attn_qkv.weight": (rows, width), "attn_gate.weight": (heads * dim, width), "ssm_conv1d.weight": (rows, 4),
        "ssm_dt.bias": (heads,), "ssm_a": (heads,), "ssm_beta.weight": (heads, width), "ssm_norm.weight": (dim,),
        "ssm_alpha.weight": (heads, width), "ssm_out.weight": (width, heads * dim),
    }  # fmt: skip


def mamba2(width: int, inner: int, heads: int, groups: int, state: int) -> Shapes:
    mixed = inner + 2 * groups * state
    return {
        "ssm_in.weight": (inner + mixed + heads, width), "ssm_conv1d.weight": (mixed, 4), "ssm_conv1d.bias": (mixed,),
        "ssm_dt.bias": (heads,), "ssm_a": (heads, 1), "ssm_d": (heads, 1), "ssm_norm.weight": (groups, inner // groups),
        "ssm_out.weight": (width, inner),
    }  # fmt: skip


def _lfm2(layer: int) -> Shapes:
    conv = {
        "shortconv.in_proj.weight": (6144, 2048), "shortconv.conv.weight": (2048, 3),
        "shortconv.out_proj.weight": (2048, 2048),
    }  # fmt: skip
    mixer = attention(2048, 32, 8, 64, norms=True) if layer in LFM2_ATTENDS else conv
    return {"attn_norm.weight": (2048,), "ffn_norm.weight": (2048,), **mixer, **dense(2048, 8192)}


def _qwen35(width: int, heads: int, kv_heads: int, feed_forward: Shapes) -> Callable[[int], Shapes]:
    def layer(number: int) -> Shapes:
        full = (number + 1) % 4 == 0
        mixer = attention(width, heads, kv_heads, 256, True, True) if full else delta_net(width, 16, 32, 128)
        return {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,), **mixer, **feed_forward}

    return layer


def _headed(layers: int, width: int, layer: Callable[[int], Shapes]) -> Callable[[int], Shapes]:
    """Return the layers of a model whose last layer, number `layers`, is a multi-token-prediction head."""
    norms = {f"nextn.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head_norm")}
    head = {"nextn.eh_proj.weight": (width, 2 * width), **norms}

    def shapes(number: int) -> Shapes:
        return layer(number) | (head if number == layers else {})

    return shapes


def _deepseek(layer: int) -> Shapes:
    latent = {
        "attn_q.weight": (16 * 192, 2048), "attn_kv_a_mqa.weight": (576, 2048), "attn_kv_a_norm.weight": (512,),
        "attn_k_b.weight": (16, 512, 128), "attn_v_b.weight": (16, 128, 512), "attn_output.weight": (2048, 2048),
    }  # fmt: skip
    fed = dense(2048, 10944) if layer == 0 else mixture(2048, 64, 1408, 2816)
    return {"attn_norm.weight": (2048,), "ffn_norm.weight": (2048,), **latent, **fed}


def _granite(layer: int) -> Shapes:
    mixer = attention(1536, 12, 4, 128) if layer in GRANITE_ATTENDS else mamba2(1536, 3072, 48, 1, 128)
    return {"attn_norm.weight": (1536,), "ffn_norm.weight": (1536,), **mixer, **mixture(1536, 64, 512, 1024)}


def _gpt_oss(layer: int) -> Shapes:
    biases = {
        "attn_q.bias": (4096,), "attn_k.bias": (512,), "attn_v.bias": (512,), "attn_output.bias": (2880,),
        "attn_sinks.weight": (64,), "ffn_gate_inp.bias": (32,), "ffn_gate_exps.bias": (32, 2880),
        "ffn_up_exps.bias": (32, 2880), "ffn_down_exps.bias": (32, 2880),
    }  # fmt: skip
    norms = {"attn_norm.weight": (2880,), "post_attention_norm.weight": (2880,)}
    return {**norms, **attention(2880, 64, 8, 64), **biases, **mixture(2880, 32, 2880)}


def _nemotron(layer: int) -> Shapes:
    experts = {name: shape for name, shape in mixture(2688, 128, 1856, 3712).items() if "gate_" not in name}
    own = {
        "M": mamba2(2688, 4096, 64, 8, 128), "*": attention(2688, 32, 2, 128),
        "E": {"ffn_gate_inp.weight": (128, 2688), "exp_probs_b.bias": (128,), **experts},
    }[NEMOTRON[layer]]  # fmt: skip
    return {"attn_norm.weight": (2688,), **own}


def _dense(width: int, ffn: int, heads: int, kv_heads: int, dim: int, norms: bool = False) -> Callable[[int], Shapes]:
    """Return the layers of a dense model."""
    own = attention(width, heads, kv_heads, dim, norms=norms) | dense(width, ffn)
    return lambda layer: {"attn_norm.weight": (width,), "ffn_norm.weight": (width,), **own}


def _qwen3vl(ffn: int, heads: int) -> dict[str, Any]:
    return {
        "feed_forward_length": ffn, "attention.head_count": heads, "attention.head_count_kv": 8,
        "attention.key_length": 128, "attention.value_length": 128, "rope.freq_base": 5e6, "rope.dimension_count": 128,
        "rope.dimension_sections": np.array([24, 20, 20, 0], np.int32), "n_deepstack_layers": 3,
    }  # fmt: skip


def _gemma4(layer: int) -> Shapes:
    dim = 512 if layer in GEMMA4_FULL else 256
    attends = attention(2560, 8, 2, dim, norms=True)
    norms = {f"{name}.weight": (2560,) for name in GEMMA4_NORMS}
    slices = {"inp_gate.weight": (256, 2560), "proj.weight": (2560, 256), "layer_output_scale.weight": (1,)}
    return {**norms, **attends, **dense(2560, 10240), **slices}


def _gemma3(layer: int) -> Shapes:
    norms = {f"{name}.weight": (2560,) for name in GEMMA4_NORMS[:-1]}
    return {**norms, **attention(2560, 8, 4, 256, norms=True), **dense(2560, 10240)}


GEMMA4_FULL = tuple(range(5, 42, 6))
GEMMA4_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
LFM2_ATTENDS, GRANITE_ATTENDS = (2, 5, 8, 10, 12, 14), (5, 15, 25, 35)
NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
QWEN35 = {
    "attention.key_length": 256, "attention.value_length": 256, "rope.freq_base": 1e7, "rope.dimension_count": 64,
    "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32), "ssm.conv_kernel": 4, "ssm.inner_size": 4096,
    "ssm.state_size": 128, "ssm.time_step_rank": 32, "ssm.group_count": 16, "full_attention_interval": 4,
}  # fmt: skip


QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>")
SMOLVLM_MARKS = (
    "<global-img>", *(f"<row_{y}_col_{x}>" for y in range(1, 7) for x in range(1, 7)), "<fake_token_around_image>",
    "<image>", "<end_of_utterance>",
)  # fmt: skip


def _per_layer(count: int, yes: tuple[int, ...], number: int) -> Any:
    return np.array([number * (layer in yes) for layer in range(count)], np.int32)


MODELS = {
    "gemma4-e4b": Model(
        "gemma4", 42, 2560, 262144,
        {
            "feed_forward_length": 10240, "attention.head_count": 8, "attention.head_count_kv": 2,
            "attention.key_length": 512, "attention.value_length": 512, "attention.key_length_swa": 256,
            "attention.value_length_swa": 256, "rope.dimension_count": 512, "rope.dimension_count_swa": 256,
            "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": 512,
            "attention.sliding_window_pattern": np.array([i not in GEMMA4_FULL for i in range(42)]),
            "attention.shared_kv_layers": 18, "embedding_length_per_layer_input": 256, "final_logit_softcapping": 30.0,
        },
        _gemma4, True,
        extra={
            "per_layer_token_embd.weight": (262144, 42 * 256), "per_layer_model_proj.weight": (42 * 256, 2560),
            "per_layer_proj_norm.weight": (256,), "rope_freqs.weight": (256,),
        },
    ),
    "gemma3-4b": Model(
        "gemma3", 34, 2560, 262144,
        {
            "feed_forward_length": 10240, "attention.head_count": 8, "attention.head_count_kv": 4,
            "attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 1024,
            "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        },
        _gemma3, True,
    ),
    "lfm2-1.2b": Model(
        "lfm2", 16, 2048, 65536,
        {
            "feed_forward_length": 8192, "attention.head_count": 32, "shortconv.l_cache": 3, "rope.freq_base": 1e6,
            "attention.head_count_kv": _per_layer(16, LFM2_ATTENDS, 8),
        },
        _lfm2, True, "token_embd_norm",
    ),
    "qwen3vl-2b": Model(
        "qwen3vl", 28, 2048, 151936, _qwen3vl(6144, 16), _dense(2048, 6144, 16, 8, 128, True), True, markers=QWEN_MARKS
    ),
    "qwen3vl-8b": Model(
        "qwen3vl", 36, 4096, 151936, _qwen3vl(12288, 32), _dense(4096, 12288, 32, 8, 128, True), markers=QWEN_MARKS
    ),
    "smolvlm": Model(  # SmolVLM2 500M, whose output matrix is its own
        "llama", 32, 960, 49280,
        {
            "feed_forward_length": 2560, "attention.head_count": 15, "attention.head_count_kv": 5,
            "attention.key_length": 64, "attention.value_length": 64, "rope.freq_base": 1e5, "rope.dimension_count": 64,
        },
        _dense(960, 2560, 15, 5, 64), markers=SMOLVLM_MARKS,
    ),
    "qwen35-9b": Model(
        "qwen35", 32, 4096, 248320,
        {"feed_forward_length": 12288, "attention.head_count": 16, "attention.head_count_kv": 4, **QWEN35},
        _qwen35(4096, 16, 4, dense(4096, 12288)),
    ),
    "qwen35-1b": Model(  # a smaller hybrid, with a head that predicts the token after the next one
        "qwen35", 13, 2048, 65536,
        {
            "feed_forward_length": 6144, "attention.head_count": 8, "attention.head_count_kv": 2,
            "nextn_predict_layers": 1, **QWEN35,
        },
        _headed(12, 2048, lambda n: _qwen35(2048, 8, 2, dense(2048, 6144))(3 if n == 12 else n)), True,
    ),
    "qwen35-35b-a3b": Model(
        "qwen35moe", 40, 2048, 248320,
        {
            "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512, "expert_count": 256,
            "expert_used_count": 8, "attention.head_count": 16, "attention.head_count_kv": 2, **QWEN35,
        },
        _qwen35(2048, 16, 2, {**mixture(2048, 256, 512, 512), "ffn_gate_inp_shexp.weight": (2048,)}),
    ),
    "deepseek-v2-lite": Model(
        "deepseek2", 27, 2048, 102400,
        {
            "feed_forward_length": 10944, "attention.head_count": 16, "attention.head_count_kv": 1,
            "attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512,
            "attention.key_length_mla": 192, "attention.value_length_mla": 128, "rope.dimension_count": 64,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.yarn_log_multiplier": 0.0707,
            "rope.scaling.original_context_length": 4096, "leading_dense_block_count": 1, "expert_count": 64,
            "expert_used_count": 6, "expert_feed_forward_length": 1408, "expert_shared_count": 2,
            "expert_weights_scale": 1.0, "expert_gating_func": 1,
        },
        _deepseek,
    ),
    "granite-4-h-tiny": Model(
        "granitehybrid", 40, 1536, 100352,
        {
            "feed_forward_length": 512, "expert_shared_feed_forward_length": 1024, "expert_count": 64,
            "expert_used_count": 6, "attention.head_count": 12, "ssm.conv_kernel": 4, "ssm.inner_size": 3072,
            "ssm.state_size": 128, "ssm.time_step_rank": 48, "ssm.group_count": 1, "embedding_scale": 12.0,
            "attention.head_count_kv": _per_layer(40, GRANITE_ATTENDS, 4), "residual_scale": 0.22,
            "attention.scale": 0.0078125, "logit_scale": 6.0, "rope.scaling.finetuned": False,
            "rope.dimension_count": 128,
        },
        _granite, True,
    ),
    "nemotron-3-nano": Model(
        "nemotron_h_moe", 52, 2688, 131072,
        {
            "attention.head_count": 32, "attention.key_length": 128, "attention.value_length": 128,
            "attention.head_count_kv": np.array([2 * (kind == "*") for kind in NEMOTRON], np.int32),
            "feed_forward_length": np.array([1856 * (kind == "E") for kind in NEMOTRON], np.int32),
            "ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.time_step_rank": 64,
            "ssm.group_count": 8, "expert_count": 128, "expert_used_count": 6, "expert_feed_forward_length": 1856,
            "expert_shared_feed_forward_length": 3712, "expert_shared_count": 1, "expert_weights_norm": True,
            "expert_weights_scale": 2.5, "attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 128,
        },
        _nemotron,
    ),
    "gpt-oss-20b": Model(
        "gpt-oss", 24, 2880, 201088,
        {
            "feed_forward_length": 2880, "expert_feed_forward_length": 2880, "expert_count": 32,
            "expert_used_count": 4, "attention.head_count": 64, "attention.head_count_kv": 8,
            "attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 128,
            "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096, "rope.dimension_count": 64,
        },
        _gpt_oss, experts="MXFP4",
    ),
}  # fmt: skip


def tensors(model: Model, layers: int, seed: int) -> Iterator[NewTensor]:
    source, random = Rows(seed), np.random.default_rng(seed)
    usual, better = ("Q8_0", "Q8_0") if model.experts else ("Q4_K", "Q6_K")

    def tensor(name: str, shape: tuple[int, ...], sensitive: bool) -> NewTensor:
        if len(shape) == 1 or shape[-1] < 32 or name.endswith(EXACT):
            low, high = (-1.0, -0.1) if name.endswith("ssm_a") else (0.9, 1.1) if "norm" in name else (-0.1, 0.1)
            numbers = random.uniform(low, high, shape).astype(np.float32)
            return NewTensor(name, "F32", shape, numbers.reshape(-1, shape[-1]).view(np.uint8))
        format = model.experts if model.experts and "_exps" in name else better if sensitive else usual
        if format.endswith("_K") and shape[-1] % 256:  # like llama-quantize, if rows do not fill super-blocks
            format = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}[format]
        return NewTensor(name, format, shape, lambda: source.of(prod(shape[:-1]), shape[-1], format))

    yield tensor("token_embd.weight", (model.vocabulary, model.width), model.tied)
    for name, shape in model.extra.items():
        yield tensor(name, shape, "token_embd" in name)
    for layer in range(layers):
        here = more_bits(layer, layers)
        for name, shape in model.layer(layer).items():
            yield tensor(f"blk.{layer}.{name}", shape, here and name in MATRICES)
    yield tensor(f"{model.output_norm}.weight", (model.width,), False)
    if not model.tied:
        yield tensor("output.weight", (model.vocabulary, model.width), True)


def vocabulary(path: Path, size: int, markers: tuple[str, ...]) -> dict[str, Any]:
    """Return the tokenizer keys of a GGUF with `size` tokens: its first ones, fillers with a text, and the markers."""
    with open_gguf(path) as file:
        words = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.ggml.")}
    tokens, kinds = list(words["tokenizer.ggml.tokens"]), list(words["tokenizer.ggml.token_type"])
    ids = {key: int(value) for key, value in words.items() if key.endswith("_token_id")}
    wanted = [*markers, *(tokens[number] for number in ids.values() if number >= size - len(markers) - len(ids))]
    wanted = [token for token in dict.fromkeys(wanted) if token not in tokens[: size - len(wanted)]]
    kept = tokens[: size - len(wanted)]
    fillers = [f"<filler_{number}>" for number in range(size - len(kept) - len(wanted))]
    found = [*kept, *fillers, *wanted]
    numbers = {token: number for number, token in enumerate(found)}
    words["tokenizer.ggml.tokens"] = found
    words["tokenizer.ggml.token_type"] = np.array(
        [*kinds[: len(kept)], *[1] * len(fillers), *[3] * len(wanted)], np.int32
    )
    if "tokenizer.ggml.scores" in words:
        scores = np.full(size, -1000.0, np.float32)
        scores[: len(kept)] = words["tokenizer.ggml.scores"][: len(kept)]
        words["tokenizer.ggml.scores"] = scores
    pairs = [(pair, *pair.split(" ", 1)) for pair in words["tokenizer.ggml.merges"]]
    words["tokenizer.ggml.merges"] = (
        [pair for pair, a, b in pairs if a in numbers and b in numbers and a + b in numbers]
        if len(kept) < len(tokens)
        else [pair for pair, _, _ in pairs]
    )
    return words | {key: numbers[tokens[number]] for key, number in ids.items()}


def write(name: str, model: Model, out: Path, layers: int = 0, vocab: Path | None = None) -> None:
    """Write the GGUF of a model, or of its first `layers` layers."""
    layers = layers or model.layers
    words = byte_vocabulary(model.vocabulary)
    if vocab is not None:
        words = vocabulary(vocab, model.vocabulary, model.markers)
    keys = {
        "vocab_size": model.vocabulary, "context_length": 32768, "embedding_length": model.width, "block_count": layers,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    keys |= {
        k: v[:layers] if isinstance(v, np.ndarray) and len(v) == model.layers else v for k, v in model.keys.items()
    }
    metadata = {
        "general.architecture": model.architecture,
        "general.name": f"{name} shape, random weights",
        **{f"{model.architecture}.{key}": value for key, value in keys.items()},
        **words,
    }
    write_gguf(out, metadata, tensors(model, layers, 0), overwrite=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--vocab", type=Path)
    arguments = parser.parse_args()
    write(arguments.model, MODELS[arguments.model], arguments.out, arguments.layers, arguments.vocab)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
