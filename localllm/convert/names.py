"""GGUF names of a checkpoint's tensors by the gguf package's map, and the order of the tensors in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache

_LAYER = re.compile(r"((?:.*?\.)?)([0-9]{1,5})\.")
# Names of norm parameters in checkpoints of 2019.
_OLD_SUFFIXES = {"gamma": "weight", "beta": "bias"}
_BLOCK = re.compile(r"(?:(enc|dec)\.)?blk\.([0-9]+)\.")
_BARE = (".ssm_a", ".ssm_d")  # names without a suffix in GGUF files
# Names of Meta's files, whose rows have another order.
_PLAIN_LLAMA = ("attention.wq", "attention.wk")
_STACKS = (None, "enc", "dec")
BY_NAME = "by name"
# The order of tensors, from the token embedding through a layer ("blk") to the output.
_ORDER = """
token_embd blk attn_norm post_attention_norm attn_norm_2 ffn_norm post_ffw_norm
time_mix_lerp_x time_mix_lerp_fused time_mix_w0 time_mix_w1 time_mix_w2 time_mix_a0
time_mix_a1 time_mix_a2 time_mix_v0 time_mix_v1 time_mix_v2 time_mix_g1 time_mix_g2
time_mix_decay time_mix_decay_w1 time_mix_decay_w2 time_mix_first time_mix_k_k
time_mix_k_a time_mix_r_k time_mix_receptance time_mix_key time_mix_value
time_mix_gate time_mix_output time_mix_ln channel_mix_lerp_k channel_mix_lerp_r
channel_mix_key channel_mix_receptance channel_mix_value attn_qkv attn_q attn_q_a
attn_q_a_norm attn_q_b attn_kv attn_kv_a_mqa attn_kv_a_norm
attn_kv_b attn_k_b attn_v_b attn_k attn_v attn_output attn_output.scale
attn_output_a attn_output_b attn_output_norm vis_attn_qkv vis_attn_output
shortconv.in_proj shortconv.conv shortconv.out_proj ssm_in ssm_ba ssm_beta ssm_alpha
ssm_conv1d ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v ssm_x ssm_dt ssm_a ssm_f_a ssm_f_b
ssm_g_a ssm_g_b ssm_d ssm_norm ssm_out ssm_dt_norm ssm_b_norm ssm_c_norm
ffn_gate ffn_up ffn_down ffn_down.scale vis_gate vis_up vis_down
attn_q_norm attn_k_norm attn_gate attn_sinks attn_sub_norm ffn_sub_norm inp_gate
proj post_norm laurel_l laurel_r laurel_post_norm layer_output_scale
altup_correct_scale altup_correct_coef altup_predict_coef altup_router
altup_router_norm ffn_gate_inp ffn_gate_inp.scale ffn_down_exps.scale ffn_gate_exps
ffn_up_exps ffn_gate_up_exps ffn_down_exps ffn_gate_exps.bias ffn_up_exps.bias
ffn_down_exps.bias ffn_gate_shexp ffn_up_shexp ffn_down_shexp ffn_gate_inp_shexp
exp_probs_b ffn_gate_chexps ffn_up_chexps ffn_down_chexps ffn_latent_down
ffn_latent_up post_ffw_norm_1 post_ffw_norm_2 pre_ffw_norm_2
attn_compressor_kv attn_compressor_gate attn_compressor_norm attn_compressor_ape
indexer_compressor_kv indexer_compressor_gate indexer_compressor_norm
indexer_compressor_ape indexer.attn_q_b indexer.attn_k indexer.k_norm indexer.proj
hc_attn_norm hc_attn_down hc_attn_up hc_attn_inject hc_attn_fn hc_attn_base
hc_attn_scale hc_ffn_norm hc_ffn_down hc_ffn_up hc_ffn_inject hc_ffn_fn hc_ffn_base
hc_ffn_scale output_norm output token_embd_norm position_embd
per_layer_token_embd per_layer_model_proj per_layer_proj_norm
altup_proj altup_unembd_proj output_hc_norm output_hc_down output_hc_up output_hc_fn
output_hc_base output_hc_scale
"""


@dataclass(frozen=True, slots=True)
class NameMap:
    """The GGUF names of one architecture by checkpoint names, without suffixes; `{bid}` is the number of a layer."""

    whole: Mapping[str, str]
    inner: Mapping[str, str]  # the parts of both names after the number of the layer
    places: Set[str]  # what names of tensors in layers begin with
    has_output: bool  # whether the package knows an output matrix of the architecture

    @classmethod
    def of(cls, names: str) -> NameMap:
        """Return the map for architectures, separated by spaces. Llama replaces an architecture that gguf lacks."""
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES, TensorNameMap

        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        known = {tensor for name in names.split() for tensor in MODEL_TENSORS[numbers.get(name, MODEL_ARCH.LLAMA)]}
        has_output = MODEL_TENSOR.OUTPUT in known
        known.add(MODEL_TENSOR.OUTPUT)  # checkpoints may store a tied output matrix
        tables = (TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg)
        whole = {
            name: TENSOR_NAMES[tensor]
            for table in tables
            for tensor, several in table.items()
            for name in several
            if tensor in known and not name.endswith(_PLAIN_LLAMA)
        }
        pairs = [(name.partition("{bid}."), key.partition("{bid}.")) for name, key in whole.items() if "{bid}" in name]
        inner: dict[str, str] = {}
        for name, key in pairs:
            inner[name[2]] = key[2] if inner.get(name[2], key[2]) == key[2] else ""  # "": the name is ambiguous
        # `TensorRegistry` renames what begins with transformer.
        places = {name[0] for name, _ in pairs}
        places |= {"model.layers.", *(name.replace("transformer.", "model.", 1) for name in places)}
        return cls(whole, inner, places, has_output)

    def find(self, name: str, layers: int) -> str | None:
        """Return the GGUF name of a tensor outside of layers or in one of this number of layers, or None."""
        name = name.replace(".dt_bias", ".dt_proj.bias")
        base, _, suffix = name.rpartition(".")
        suffix = _OLD_SUFFIXES.get(suffix, suffix)
        if key := self._key(name, layers):
            return key if key.endswith(_BARE) else f"{key}.bias" if name.endswith("_bias") else f"{key}.weight"
        if suffix in ("weight", "bias") and (key := self._key(base, layers)):
            return f"{key}.{suffix}"
        key = self._key(name.removesuffix("_bias"), layers)
        return f"{key}.bias" if key else None

    def _key(self, name: str, layers: int) -> str | None:
        """Return the GGUF name without suffix. Checkpoints of models with a head have one more component in front."""
        layer = _LAYER.match(name)
        if layer is not None and int(layer[2]) < layers:
            rest = name[layer.end() :]
            places = [before for before in (layer[1], layer[1].partition(".")[2]) if before in self.places]
            forms = [f"{before}{{bid}}.{rest}" for before in places]
            key = next((self.whole[form] for form in forms if form in self.whole), "")
            if key or (places and self.inner.get(rest)):
                return (key or f"blk.{{bid}}.{self.inner[rest]}").replace("{bid}", str(int(layer[2])))
        return self.whole.get(name) or self.whole.get(name.partition(".")[2])


def place(name: str, order: str) -> tuple[int, int, int, int, str]:
    """Return the sort key of a tensor: the token embedding, the layers, then the others. `order` lists what differs in
    an architecture, as runs of keys that follow each other: `attn_q attn_norm, ffn_up ffn_gate`.

    With `BY_NAME`, the others come before the layers, an encoder before the decoder, and names sort by the alphabet.
    """
    layer, ranks = _BLOCK.match(name), _ranks(order)
    if name.startswith("token_embd."):
        return 0, 0, 0, 0, ""
    if order == BY_NAME:
        return (2, _STACKS.index(layer[1]), int(layer[2]), 0, name) if layer else (1, 0, 0, 0, name)
    key = name[layer.end() :] if layer else name
    base, _, suffix = key.rpartition(".")
    rank = ranks.get(key, ranks.get(base, len(ranks)))
    first = layer is None and rank < ranks["blk"]
    return 1 if first else 2 if layer else 3, 0, int(layer[2]) if layer else 0, 2 * rank + (suffix == "bias"), name


@cache
def _ranks(order: str) -> dict[str, int]:
    keys = _ORDER.split()
    for run in order.split(", ") if order not in ("", BY_NAME) else ():
        first, *moved = run.split()
        keys = [key for key in keys if key not in moved]
        keys[keys.index(first) + 1 : keys.index(first) + 1] = moved
    return {key: rank for rank, key in enumerate(keys)}
