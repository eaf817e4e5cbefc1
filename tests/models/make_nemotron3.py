"""Write the headers of `kit_models/nemotron3*.npz`: Mamba-2, attention, and experts without a gate (Nemotron 3).

    python -m tests.models.make_nemotron3 OUT.gguf [LATENT]

LATENT is the input width of the experts, as in Nemotron 3 Super; 0 means the model's width. Weights follow
the test models' rule. The .npz files store the GGUF up to the tensor data, and llama.cpp's logits of 40
tokens, the last 8 one by one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from localllm.gguf import NewTensor, write_gguf
from tests.models.kit import values

NAME, WIDTH, VOCABULARY = "nemotron_h_moe", 128, 128
INNER, STATE, HEADS, GROUPS, KERNEL = 128, 32, 4, 2, 4
EXPERTS, USED, FFN, SHARED = 8, 3, 48, 80
LAYERS = "MEAEM"  # M: Mamba-2, E: experts, A: attention


def shapes(latent: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,), "output.weight": (VOCABULARY, WIDTH),
    }  # fmt: skip
    mixed, low = INNER + 2 * GROUPS * STATE, latent or WIDTH
    kinds = {
        "M": {
            "ssm_in.weight": (INNER + mixed + HEADS, WIDTH), "ssm_conv1d.weight": (mixed, KERNEL),
            "ssm_conv1d.bias": (mixed,), "ssm_dt.bias": (HEADS,), "ssm_a": (HEADS, 1), "ssm_d": (HEADS, 1),
            "ssm_norm.weight": (GROUPS, INNER // GROUPS), "ssm_out.weight": (WIDTH, INNER),
        },
        "A": {
            "attn_q.weight": (128, WIDTH), "attn_k.weight": (64, WIDTH), "attn_v.weight": (64, WIDTH),
            "attn_output.weight": (WIDTH, 128),
        },
        "E": {
            "ffn_gate_inp.weight": (EXPERTS, WIDTH), "exp_probs_b.bias": (EXPERTS,),
            "ffn_up_exps.weight": (EXPERTS, FFN, low), "ffn_down_exps.weight": (EXPERTS, low, FFN),
            "ffn_up_shexp.weight": (SHARED, WIDTH), "ffn_down_shexp.weight": (WIDTH, SHARED),
            **({"ffn_latent_down.weight": (low, WIDTH), "ffn_latent_up.weight": (WIDTH, low)} if latent else {}),
        },
    }  # fmt: skip
    for layer, kind in enumerate(LAYERS):
        own = {"attn_norm.weight": (WIDTH,), **kinds[kind]}
        found |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("latent", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    keys = {
        "vocab_size": VOCABULARY, "context_length": 256, "embedding_length": WIDTH, "block_count": len(LAYERS),
        "feed_forward_length": np.array([FFN * USED * (kind == "E") for kind in LAYERS], np.int32),
        "attention.head_count": np.array([4] * len(LAYERS), np.int32),
        "attention.head_count_kv": np.array([2 * (kind == "A") for kind in LAYERS], np.int32),
        "attention.key_length": 32, "attention.value_length": 32, "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 32, "ssm.conv_kernel": KERNEL,
        "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": HEADS, "ssm.group_count": GROUPS,
        "expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": FFN,
        "expert_shared_feed_forward_length": SHARED, "expert_shared_count": 1, "expert_weights_norm": True,
        "expert_weights_scale": 2.5, **({"moe_latent_size": arguments.latent} if arguments.latent else {}),
    }  # fmt: skip
    metadata = {"general.architecture": NAME, "general.name": "nemotron 3 tiny", "tokenizer.ggml.model": "no_vocab"}
    tensors = [
        NewTensor(name, "F32", shape, values(name, shape, NAME).reshape(-1, shape[-1]).view(np.uint8))
        for name, shape in shapes(arguments.latent).items()
    ]
    write_gguf(
        arguments.out, metadata | {f"{NAME}.{key}": value for key, value in keys.items()}, tensors, overwrite=True
    )


if __name__ == "__main__":
    main()
