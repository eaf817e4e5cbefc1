"""A wrong JSON type anywhere in a checkpoint's config gives either a model or a one-line error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.base.errors import LocalLLMError
from localllm.convert import Checkpoint
from tests.localllm.convert.hf_own_shapes import below, shapes
from tests.localllm.convert.support import save

WRONG: tuple[Any, ...] = (None, True, 7, "x", [], ["x"], [{}], {}, {"type": "x"}, {"type": {}}, 10**30)
TOKENS = [*(chr(c) for c in range(33, 127)), "ab", "cd", "<end>"]
END = TOKENS.index("<end>")
SPLIT = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
FILES: dict[str, Any] = {
    "tokenizer.json": {
        "version": "1.0", "truncation": None, "padding": None, "decoder": None,
        "added_tokens": [
            {"id": END, "content": "<end>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
        ],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "TemplateProcessing", "pair": [],
             "special_tokens": {"<end>": {"id": "<end>", "ids": [END], "tokens": ["<end>"]}},
             "single": [{"SpecialToken": {"id": "<end>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}
        ]},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(TOKENS)}, "byte_fallback": False,
                  "merges": [["a", "b"], ["c", "d"]]},
    },
    "tokenizer_config.json": {
        "bos_token": {"content": "<end>"}, "eos_token": "<end>", "add_bos_token": True,
        "added_tokens_decoder": {str(END): {"content": "<end>", "special": True}},
        "chat_template": [{"name": "default", "template": "x"}],
    },
    "generation_config.json": {"eos_token_id": [END], "top_p": 0.9, "top_k": 3},
    "special_tokens_map.json": {"eos_token": {"content": "<end>"}},
    "added_tokens.json": {"<end>": END},
    "config.json": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": len(TOKENS), "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": [END],
        "text_config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "quantization_config": None,
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    layer = "self_attn.(k|v)_proj 4x8 self_attn.(q|o)_proj 8x8 mlp.(gate|up|down)_proj 8x8 "
    layer = below("model.layers.0.", layer + "(input|post_attention)_layernorm 8")
    tensors = shapes(f"{layer} model.norm 8 model.embed_tokens {len(TOKENS)}x8")
    save(tmp_path / "model.safetensors", {name: np.ones(shape, np.float32) for name, shape, _ in tensors})
    for name, value in FILES.items():
        (tmp_path / name).write_text(json.dumps(value))
    return tmp_path


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value in a JSON value, but to only three items of long lists and objects."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    items = list(items)
    for key, item in items if len(items) <= 15 else items[:3]:
        yield from _places(item, (*at, key))


def _with(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    changed = copy.copy(value)
    changed[at[0]] = _with(value[at[0]], at[1:], new)
    return changed


@pytest.mark.parametrize("by_bytes", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_wrong_shape_anywhere_is_one_line_or_a_model(name: str, by_bytes: bool, folder: Path) -> None:
    tokenizer = _with(FILES["tokenizer.json"], ("model", "byte_fallback"), not by_bytes)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    whole = tokenizer if name == "tokenizer.json" else FILES[name]
    converted = 0
    for at in _places(whole):
        for wrong in WRONG[by_bytes::2]:  # each wrong value is tried under one of the two parameters
            (folder / name).write_text(json.dumps(_with(whole, at, wrong)))
            with suppress(LocalLLMError), Checkpoint(folder) as model:
                converted += len(model.stored) > 0
    assert converted > 0


def test_heads_that_the_weights_do_not_have_are_told(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**FILES["config.json"], "num_attention_heads": 7, "head_dim": 4}))
    with pytest.raises(LocalLLMError, match=r"self_attn.q_proj.weight' has 8 rows, not a multiple of 7 heads; config"):
        Checkpoint(folder)
