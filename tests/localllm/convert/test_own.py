"""Models that transformers lacks convert to the keys, shapes and bytes of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm import quant
from localllm.convert import LazyTensor, open_checkpoint
from localllm.template import ChatTemplate
from tests.localllm.convert.checkpoints import OWN, read_json, write
from tests.localllm.convert.hf_own_multimodal import SEES, SPEAKS
from tests.localllm.convert.support import check_refused, digest, edit_json, logits_of, sample, values
from tests.localllm.convert.weights import ids

EXPECTED = read_json("hf_own")
# Keys that are not compared: names that derive from the checkpoint's name, and keys that differ in form or
# occur only in llama.cpp's GGUF.
OTHERWISE = (
    *("general.name", "general.basename", "general.finetune", "general.version", "general.size_label"),
    *("general.file_type", "general.quantization_version", "general.type"),
)
PICTURES = ".vis_"  # llama.cpp requires these vision tensors, but its converter of 2026-10-01 omits them
WORLD, PLAMO = "rwkv_vocab_v20230424.txt", "tokenizer.jsonl"
SKIPPED = (*SEES, *SPEAKS, "kimi-k3", "deepseek4-fp4", "mimo2-cards")  # models with a note on skipped tensors
# Model: keys below its architecture or `tokenizer.ggml` that differ.
OF_MODEL: dict[str, tuple[str, ...]] = {
    "llada-moe": ("mask_token_id",),  # the id is outside the tiny vocabulary
    # We append [SEP], as for other encoders.
    **dict.fromkeys(("jina-bert-v2", "jina-bert-v2-code"), ("eos_token_id", "add_eos_token")),
    # llama.cpp writes the head size of the linear-attention layers; we write the rank of latent attention.
    "bailingmoe3-vl": ("attention.value_length",),
    # llama.cpp's layer count includes three MTP layers.
    "mimo2-cards": (
        "block_count",
        "attention.head_count_kv",
        "attention.sliding_window_pattern",
        "nextn_predict_layers",
    ),
    # A factor of 1, scaling type none and a window of 0 have no effect.
    "phi3-vision": ("rope.scaling.original_context_length", "attention.sliding_window"),
    "codeshell": ("rope.scaling.type", "rope.scaling.factor"),
    "deepseek": ("rope.scaling.type",),  # scaling type none has no effect
    "deci-blocks": ("attention.head_count",),  # llama.cpp writes one count, we write one per layer
    # llama.cpp's converter writes the epsilon under the LayerNorm key, which llama.cpp itself does not read.
    "exaone": ("attention.layer_norm_epsilon",),
    "qwen": ("attention.layer_norm_epsilon", "context_length"),  # see docs/architectures.md
    "deepseek4-fp4": ("attention.compress_ratios",),  # llama.cpp's list includes the MTP layer
    # SGLang's YaRN does not scale attention, so we write an `attn_factor` that cancels the readers' default.
    "grok-2": ("rope.scaling.yarn_attn_factor",),
    # We append [SEP], as for other encoders; no token types, no RoPE scaling.
    "neo-bert": ("eos_token_id", "add_eos_token", "token_type_count", "rope.scaling.type"),
    # llama.cpp also writes an embedding's pooling type, although the model has a classifier.
    "neo-bert-rank": ("eos_token_id", "add_eos_token", "token_type_count", "rope.scaling.type", "pooling_type"),
    "qwen3tts": ("eos_token_id",),  # llama.cpp overwrites the codec's EOS with the text vocabulary's EOS
}
# llama.cpp's converter keeps the checkpoint's interleaved QKV rows, which no program expects. `test_reference` checks
# our order by the logits.
REORDERED = {"neo-bert": "attn_qkv.weight", "neo-bert-rank": "attn_qkv.weight"}
OF_SPM = ("scores",)  # scores of control tokens have no effect
LAYOUT = ".tensor_data_layout"  # suffix of another key without effect


def stored(tensor: LazyTensor, expected: list[Any]) -> list[Any]:
    """Return shape, digest and type in llama.cpp's form: FP8 as Q8_0, convolutions with an extra dimension of 1."""
    kind = expected[2] if len(expected) > 2 else ""
    shape = [*tensor.shape]
    if "ssm_conv1d" in tensor.name and len(expected[0]) > len(shape):
        shape = [1, *shape]
    if isinstance(expected[1], list):  # the reference stores values instead of a digest
        np.testing.assert_allclose(sample(values(tensor)), expected[1], rtol=3e-7, atol=1e-6)
        return [shape, expected[1]]
    if not kind:
        return [shape, digest(values(tensor))]
    raw = tensor.read(0, tensor.rows)
    if tensor.format != kind:
        raw = quant.quantize(values(tensor).reshape(tensor.rows, -1), kind)
    return [shape, digest(raw), kind]


def test_every_model_has_what_llama_cpp_writes() -> None:
    assert EXPECTED.keys() == OWN.keys()


@pytest.mark.parametrize("name", OWN)
def test_files_are_those_of_llama_cpp_s_converter(name: str, tmp_path: Path) -> None:
    with open_checkpoint(write(name, tmp_path / name)) as model:
        assert len(model.notes) == (name in SKIPPED)
        expected = EXPECTED[name]["tensors"]
        found = {key: stored(x, expected[key]) for key, x in model.tensors.items() if PICTURES not in key}
        assert len(model.tensors) - len(found) == (10 if name == "cogvlm" else 0)
        keys = {key: np.asarray(value).tolist() for key, value in model.metadata.items()}
        logits = logits_of(model, ids())
        # text tokens are never generated, so their logits may be infinite
        assert np.isfinite(logits[:, 320 if name == "qwen3tts" else 0 :]).all()
    for key in [key for key in found if key.endswith(REORDERED.get(name, "?"))]:
        assert found[key] != expected[key]
        found[key][1] = expected[key][1]
    assert found == expected
    skipped = (*OF_MODEL.get(name, ()), *(OF_SPM if OWN[name].tokenizer == "spm" else ()))
    below = (f"{keys['general.architecture']}.", "tokenizer.ggml.")
    differing = {*OTHERWISE, *(prefix + key for prefix in below for key in skipped)}
    for key, value in EXPECTED[name]["keys"].items():
        if key not in differing and not key.endswith(LAYOUT):
            assert keys.get(key) == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


def test_the_vocabulary_of_dream(tmp_path: Path) -> None:
    """Dream's checkpoint has vocab.json and merges.txt, and a tokenizer class with Qwen 2's split rules.

    The keys equal the conversion of tokenizer.json.
    """
    with open_checkpoint(write("dream", tmp_path)) as model:
        theirs = model.metadata
    fast = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(fast["model"]["vocab"]))
    pairs = "\n".join(" ".join(pair) for pair in fast["model"]["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{pairs}\n")
    (tmp_path / "tokenizer.json").unlink()
    decoder = {str(i): {"content": text, "special": True} for i, text in enumerate(("<pad>", "<s>", "</s>"))}
    settings = tmp_path / "tokenizer_config.json"
    edit_json(settings, tokenizer_class="DreamTokenizer", added_tokens_decoder=decoder)
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ()
        for key, value in theirs.items():
            if key.startswith("tokenizer.") and not key.endswith("_token"):
                np.testing.assert_array_equal(model.metadata[key], value, key)
    edit_json(settings, tokenizer_class="OtherTokenizer")
    check_refused(tmp_path, r"no tokenizer\.json or tokenizer\.model")
    edit_json(settings, tokenizer_class="DreamTokenizer")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b c\n")
    check_refused(tmp_path, "merges is not a list of pairs")
    (tmp_path / "merges.txt").write_bytes(b"\xff\xff")
    check_refused(tmp_path, r"merges\.txt: cannot be read")


def test_a_dialogue_with_rwkv(tmp_path: Path) -> None:
    """The prompt equals the output of llama.cpp's built-in template for RWKV."""
    with open_checkpoint(write("rwkv6", tmp_path)) as model:
        template = model.metadata["tokenizer.chat_template"]
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "<think>\nwell\n</think> Hello. "}, {"role": "user", "content": "Bye"},
    ]  # fmt: skip
    text = "<s>System: Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant:"
    chat, off, on = ChatTemplate(template, "<s>", "<s>"), " <think>\n</think>", " <think>"
    assert str(chat.render(messages).text) == text
    assert str(chat.render(messages, extra={"enable_thinking": False}).text) == text + off
    assert str(chat.render(messages, extra={"enable_thinking": True}).text) == text + on


_NO_LINE, _TAKEN = "line 1 is not a token with its id and length", "occurs twice or exceeds"
# Vocabulary files of RWKV (model, file, text; {} is a line of the file), and the message.
BAD: list[tuple[str, str, str, str]] = [
    *[("rwkv7", WORLD, text, _NO_LINE) for text in (
        "x 'a' 1", "1 a 1", "1 'a'+open('x').read()+'' 1", "1 b'a\\xzz' 1", "1 'a' 2", f"1 '{'a' * 3000}' 3000",
    )],
    ("rwkv7", WORLD, "1 'a' 1\n1 'b' 1", f"line 2: the id 1 of token b'b' {_TAKEN}"),
    ("rwkv7", WORLD, "320 'a' 1", f"line 1: the id 320 of token b'a' {_TAKEN}"),
    ("rwkv7", WORLD, "0 'a' 1", f"line 1: the id 0 of token b'a' {_TAKEN}"),
    ("rwkv7", WORLD, "1 'a' 1", "no token for the byte 0x01"),
    ("plamo3", PLAMO, "[\n...", "line 1 is not a token with its score and kind"),
    *[("plamo3", PLAMO, f"{{}}\n{{}}\n{line}\n...", "line 3 is not a token with its score and kind")
      for line in ("[1, 2]", '["a"]', '["a", Infinity]')],
    ("plamo3", PLAMO, "{}\n{}\n{}\n{}", "has 4 tokens, but the embedding has 320 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "text", "message"), BAD, ids=lambda x: x[:30])
def test_a_damaged_vocabulary_is_one_line(name: str, file: str, text: str, message: str, tmp_path: Path) -> None:
    path = write(name, tmp_path) / file
    whole, lines = path.read_text().splitlines(), text.split("\n")
    if lines[-1] == "...":  # the rest of the file
        lines[-1:] = whole[len(lines) - 1 :]
    path.write_text("\n".join(whole[i] if line == "{}" else line for i, line in enumerate(lines)))
    check_refused(tmp_path, message)
    path.write_bytes(b"\xff")
    check_refused(tmp_path, f"{re.escape(file)}: cannot be read")
