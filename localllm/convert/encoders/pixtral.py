"""Rows of Pixtral's encoder of pictures: Pixtral and Mistral Small 3.1 and later."""

from __future__ import annotations

import re

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import PERMUTED
from localllm.convert.encoders import keys as k
from localllm.convert.encoders.row import Encoder, EncoderRow, Settings, Stack
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, class_of
from localllm.convert.jsonfile import objects, read_json
from localllm.convert.recipe import Layer, Tensors, taken
from localllm.convert.tensor import LazyTensor

_BREAK = "[IMG_BREAK]"
_ID = re.compile("[0-9]{1,9}")


def _break_id(config: HfConfig) -> int:
    """Return the token that ends a row of a picture."""
    folder = config.path.parent
    for name in ("tokenizer_config.json", "tokenizer.json"):
        path = folder / name
        if not path.is_file():
            continue
        values = read_json(path)
        table = values.get("added_tokens_decoder")
        found = [(i, entry) for i, entry in table.items()] if isinstance(table, dict) else []
        found += [(entry.get("id"), entry) for entry in objects(values.get("added_tokens"))]
        for i, entry in found:
            if isinstance(entry, dict) and entry.get("content") == _BREAK and _ID.fullmatch(str(i)):
                return int(i)
    raise ConvertError(
        f"{folder}: token {_BREAK} is not in tokenizer_config.json or tokenizer.json; download them again"
    )


def _break_row(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the embedding of the token that ends a row."""
    number, table = _break_id(config), parts[0]
    if len(table.shape) != 2 or number >= table.shape[0]:
        raise ConvertError(f"{table.name}: is {table.shape}, without the row of token {_BREAK}, {number}")
    return t.flattened(t.picked(table, np.array([number]), 1))


def _merged(settings: Settings) -> int | None:
    """Return the patches per side of a token, which only Mistral 3 has."""
    return settings.config.integer("spatial_merge_size") or (2 if "Mistral3" in class_of(settings.config) else None)


_LAYER: Layer = {
    **{key: taken(f"attention.{key[-1]}_proj", PERMUTED["attn_q"]) for key in ("attn_q", "attn_k")},
    "attn_v": "attention.v_proj", "attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm",
    **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("up", "gate", "down")},
}  # fmt: skip
_PIXTRAL = Encoder(
    kind="vision", projector="pixtral", tables=("vision_config",),
    top={
        "v.patch_embd": "vision_tower.patch_conv", "v.pre_ln": "vision_tower.ln_pre",
        "mm.1": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2",
        "mm.input_norm": "multi_modal_projector.norm",
        "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        "v.token_embd.img_break.": taken("embed_tokens.weight", _break_row),
    },
    stacks=(Stack("vision_tower.transformer.layers.{}.", "v.blk.{}.", _LAYER),),
    keys={
        **k.ACTIVATION, "vision.attention.layer_norm_epsilon": k.own("layer_norm_eps", otherwise=1e-5),
        "vision.spatial_merge_size": _merged,
    },
    defaults={
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 1024, "patch_size": 16, "hidden_act": "gelu",
    },
)  # fmt: skip


def _other(config: HfConfig) -> str | None:
    kind = config.inner("vision_config").get("model_type")
    if kind == "pixtral":
        return None
    return f"vision_config has model_type {kind!r}; of this class, only encoders of type pixtral can be converted"


ROWS = (
    EncoderRow(
        classes=("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"), encoders=(_PIXTRAL,),
        starts=("vision_tower.", "multi_modal_projector.", "language_model.model.embed_tokens.",
                "language_model.embed_tokens."),
        spellings=((r"^language_model\.(model\.)?", ""),), check=_other,
    ),
)  # fmt: skip
