"""Write `data/deepseek4.npz`: the logits of Hugging Face transformers for a tiny DeepSeek 4 with the test models'
weights.

    python -m tests.models.make_deepseek4

140 tokens fill pools of 4 positions and one pool of 128. The first layer chooses experts by token, and layers with
pools use YaRN. At least one of the indexer's 16 head scores is always positive, so no two pools have equal scores.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.kit import chosen, values
from tests.models.support import MemoryWeight

NAME, VOCABULARY, WIDTH, HEADS, SIZE, ROTATED, RANK = "deepseek4", 96, 64, 4, 64, 16, 32
GROUPS, LOW, INDEX_HEADS, INDEX_SIZE, TOP, WINDOW = 2, 16, 16, 32, 3, 8
EXPERTS, USED, FFN, SCALE, LIMIT, STREAMS, ITERATIONS = 4, 2, 48, 1.5, 1.0, 4, 20
RATIOS, HASHED, CONTEXT, FACTOR, TRAINED = (0, 4, 128, 4), 1, 1024, 4.0, 64
TOKENS = np.random.RandomState(4).randint(0, VOCABULARY, 140)
DATA = Path(__file__).parent / "data" / "deepseek4.npz"

_PARTS = {  # tensor names in a GGUF -> in transformers
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight", "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight", "attn_kv.weight": "self_attn.kv_proj.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_norm.weight", "attn_output_a.weight": "self_attn.o_a_proj.weight",
    "attn_output_b.weight": "self_attn.o_b_proj.weight", "attn_sinks.weight": "self_attn.sinks",
    **{
        f"{ours}_compressor_{part}.weight": f"self_attn.compressor.{theirs}{module}"
        for ours, theirs in (("attn", ""), ("indexer", "indexer."))
        for part, module in (
            ("kv", "kv_proj.weight"), ("gate", "gate_proj.weight"), ("ape", "position_bias"),
            ("norm", "kv_norm.weight"),
        )
    },
    "indexer.attn_q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "indexer.proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    **{f"hc_{x}_{part}.weight": f"{x}_hc.{part}" for x in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "ffn_gate_inp.weight": "mlp.gate.weight", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid", "ffn_down_exps.weight": "mlp.experts.down_proj",
    **{f"ffn_{x}_shexp.weight": f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")},
}  # fmt: skip
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    **{f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}  # fmt: skip


def metadata() -> dict[str, Any]:
    """Return the GGUF metadata."""
    keys = {
        "vocab_size": VOCABULARY, "context_length": CONTEXT, "embedding_length": WIDTH, "block_count": len(RATIOS),
        "feed_forward_length": FFN, "expert_feed_forward_length": FFN, "expert_shared_count": 1,
        "expert_count": EXPERTS, "expert_used_count": USED, "expert_weights_scale": SCALE, "expert_weights_norm": True,
        "expert_gating_func": 4, "swiglu_clamp_exp": np.full(len(RATIOS), LIMIT, np.float32),
        "attention.head_count": HEADS, "attention.head_count_kv": 1, "attention.key_length": SIZE,
        "attention.value_length": SIZE, "attention.layer_norm_rms_epsilon": 1e-6, "attention.q_lora_rank": RANK,
        "attention.sliding_window": WINDOW, "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": INDEX_SIZE, "attention.indexer.top_k": TOP,
        "attention.output_group_count": GROUPS, "attention.output_lora_rank": LOW,
        "attention.compress_ratios": np.array(RATIOS, np.int32), "attention.compress_rope_freq_base": 160000.0,
        "hyper_connection.count": STREAMS, "hyper_connection.sinkhorn_iterations": ITERATIONS,
        "hyper_connection.epsilon": 1e-6, "hash_layer_count": HASHED, "rope.dimension_count": ROTATED,
        "rope.freq_base": 10000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": FACTOR,
        "rope.scaling.original_context_length": TRAINED, "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }  # fmt: skip
    return {"general.architecture": NAME, **{f"{NAME}.{key}": value for key, value in keys.items()}}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the GGUF's tensors."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, WIDTH), "output.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,),
        "output_hc_fn.weight": (STREAMS, STREAMS * WIDTH), "output_hc_base.weight": (STREAMS,),
        "output_hc_scale.weight": (1,),
    }  # fmt: skip
    for layer, ratio in enumerate(RATIOS):
        mixes, parts = (2 + STREAMS) * STREAMS, 2 if ratio == 4 else 1
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q_a": (RANK, WIDTH), "attn_q_a_norm": (RANK,),
            "attn_q_b": (HEADS * SIZE, RANK), "attn_kv": (SIZE, WIDTH), "attn_kv_a_norm": (SIZE,),
            "attn_output_a": (GROUPS * LOW, HEADS * SIZE // GROUPS), "attn_output_b": (WIDTH, GROUPS * LOW),
            "attn_sinks": (HEADS,), "ffn_gate_inp": (EXPERTS, WIDTH), "ffn_gate_exps": (EXPERTS, FFN, WIDTH),
            "ffn_up_exps": (EXPERTS, FFN, WIDTH), "ffn_down_exps": (EXPERTS, WIDTH, FFN),
            "ffn_gate_shexp": (FFN, WIDTH), "ffn_up_shexp": (FFN, WIDTH), "ffn_down_shexp": (WIDTH, FFN),
        }  # fmt: skip
        for x in ("attn", "ffn"):
            own |= {f"hc_{x}_fn": (mixes, STREAMS * WIDTH), f"hc_{x}_base": (mixes,), f"hc_{x}_scale": (3,)}
        for x, size in (("attn", SIZE), ("indexer", INDEX_SIZE)):
            if ratio == 4 or (ratio and x == "attn"):
                own |= {f"{x}_compressor_{part}": (parts * size, WIDTH) for part in ("kv", "gate")}
                own |= {f"{x}_compressor_ape": (ratio, parts * size), f"{x}_compressor_norm": (size,)}
        if ratio == 4:
            own |= {"indexer.attn_q_b": (INDEX_HEADS * INDEX_SIZE, RANK), "indexer.proj": (INDEX_HEADS, WIDTH)}
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
        if layer < HASHED:
            found[f"blk.{layer}.ffn_gate_tid2eid.weight"] = (VOCABULARY, USED)
        else:
            found[f"blk.{layer}.exp_probs_b.bias"] = (EXPERTS,)
    return found


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return chosen(name, shape, EXPERTS) if "tid2eid" in name else values(name, shape, NAME)


def tensors() -> dict[str, MemoryWeight]:
    return {
        name: MemoryWeight(
            name, "I32" if "tid2eid" in name else "F32", shape,
            np.ascontiguousarray(numbers(name, shape)).view(np.uint8).reshape(int(np.prod(shape[:-1])), -1),
        )
        for name, shape in shapes().items()
    }  # fmt: skip


def state() -> dict[str, np.ndarray]:
    """Return the weights under the names that transformers uses."""
    found, ours = {}, {name: numbers(name, shape) for name, shape in shapes().items()}
    for name, array in ours.items():
        if name in _TOP:
            found[_TOP[name]] = array
            continue
        _, layer, part = name.split(".", 2)
        prefix = f"model.layers.{layer}."
        if part == "ffn_gate_exps.weight":
            both = (array, ours[f"blk.{layer}.ffn_up_exps.weight"])
            found[prefix + "mlp.experts.gate_up_proj"] = np.concatenate(both, axis=1)
        elif part != "ffn_up_exps.weight":
            found[prefix + _PARTS[part]] = array
    return found


def main() -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    config = transformers.DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, moe_intermediate_size=FFN, num_hidden_layers=len(RATIOS),
        num_attention_heads=HEADS, head_dim=SIZE, q_lora_rank=RANK, num_experts_per_tok=USED, n_routed_experts=EXPERTS,
        n_shared_experts=1, routed_scaling_factor=SCALE, max_position_embeddings=CONTEXT,
        layer_types=[kinds[ratio] for ratio in RATIOS],
        mlp_layer_types=["hash_moe"] * HASHED + ["moe"] * (len(RATIOS) - HASHED),
        partial_rotary_factor=ROTATED / SIZE, sliding_window=WINDOW, o_groups=GROUPS, o_lora_rank=LOW,
        index_n_heads=INDEX_HEADS, index_head_dim=INDEX_SIZE, index_topk=TOP, swiglu_limit=LIMIT, hc_mult=STREAMS,
        hc_sinkhorn_iters=ITERATIONS,
        rope_parameters={
            "rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": TRAINED, "beta_fast": 32,
            "beta_slow": 1,
        },
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config).eval().float()
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in state().items()}, strict=False)
    assert not unexpected, unexpected
    assert all("inv_freq" in name for name in missing), missing
    with torch.no_grad():
        logits = model(torch.from_numpy(TOKENS)[None], use_cache=False).logits[0].numpy()
    np.savez_compressed(DATA, logits=logits, transformers=transformers.__version__)
    print(f"{DATA}: {logits.shape}, deviation {logits.std():.3f}")


if __name__ == "__main__":
    main()
