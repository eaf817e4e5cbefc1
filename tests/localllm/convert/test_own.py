"""Models that transformers lacks convert to the keys, shapes and bytes of llama.cpp's converter, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm import quant
from localllm.convert import ConvertError, LazyTensor, open_checkpoint
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipes.table import RECIPES
from localllm.template import ChatTemplate
from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_own import OWN, digest, read_expected, sample, write_own
from tests.localllm.convert.hf_own_classes import SEES
from tests.localllm.convert.hf_synthetic import numbers
from tests.localllm.convert.support import check_refused, logits_of, save, values
from tests.localllm.convert.test_last import REFUSED as OF_LAST
from tests.localllm.convert.test_programs import REFUSED as OF_PROGRAMS

EXPECTED = read_expected()
# Keys that are not compared: names that derive from the checkpoint's name, and keys that differ in form or
# occur only in llama.cpp's GGUF.
OTHERWISE = (
    *("general.name", "general.basename", "general.finetune", "general.version", "general.size_label"),
    *("general.file_type", "general.quantization_version", "general.type"),
)
PICTURES = ".vis_"  # llama.cpp requires these vision tensors, but its converter of 2026-10-01 omits them
WORLD = "rwkv_vocab_v20230424.txt"
SKIPPED = dict.fromkeys(  # models whose conversion notes skipped tensors
    (*SEES, "cogvlm", "kimi-k3", "deepseek4", "qwen3tts", "pockettts"), 1
)
OF_MODEL: dict[str, tuple[str, ...]] = {
    "llada-moe": ("tokenizer.ggml.mask_token_id",),  # the id is outside the tiny vocabulary
    # We append [SEP], as for other encoders.
    **dict.fromkeys(
        ("jina-bert-v2", "jina-bert-v2-code"), ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_eos_token")
    ),
    # llama.cpp writes the head size of the linear-attention layers; we write the rank of latent attention.
    "bailingmoe3-vl": ("bailingmoe3.attention.value_length",),
    # llama.cpp's layer count includes three MTP layers.
    "mimo2-cards": (
        *("mimo2.block_count", "mimo2.attention.head_count_kv", "mimo2.attention.sliding_window_pattern"),
        "mimo2.nextn_predict_layers",
    ),
    # A factor of 1, scaling type none and a window of 0 have no effect.
    "phi3-vision": ("phi3.rope.scaling.original_context_length", "phi3.attention.sliding_window"),
    "codeshell": ("codeshell.rope.scaling.type", "codeshell.rope.scaling.factor"),
    "deepseek": ("deepseek.rope.scaling.type",),  # scaling type none has no effect
    "deci-blocks": ("deci.attention.head_count",),  # llama.cpp writes one count, we write one per layer
    # llama.cpp's converter writes the epsilon under the LayerNorm key, which llama.cpp itself does not read.
    "exaone": ("exaone.attention.layer_norm_epsilon",),
    "qwen": ("qwen.attention.layer_norm_epsilon", "qwen.context_length"),  # see docs/architectures.md
    "deepseek4": ("deepseek4.attention.compress_ratios",),  # llama.cpp's list includes the MTP layer
    # SGLang's YaRN does not scale attention, so we write an `attn_factor` that cancels the readers' default.
    "grok-2": ("grok.rope.scaling.yarn_attn_factor",),
    **dict.fromkeys(  # we append [SEP], as for other encoders; no token types, no RoPE scaling
        ("neo-bert", "neo-bert-rank"),
        (
            *("tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.token_type_count"),
            "neo-bert.rope.scaling.type",
        ),
    ),
    "qwen3tts": ("tokenizer.ggml.eos_token_id",),  # llama.cpp overwrites the codec's EOS with the text vocabulary's EOS
}
# llama.cpp writes an embedding's pooling type, although the model has a classifier
OF_MODEL["neo-bert-rank"] += ("neo-bert.pooling_type",)
# llama.cpp's converter keeps the checkpoint's interleaved QKV rows, which no program expects. `test_last` checks our
# order by the logits.
REORDERED = {"neo-bert": "attn_qkv.weight", "neo-bert-rank": "attn_qkv.weight"}
OF_SPM = ("tokenizer.ggml.scores",)  # scores of control tokens have no effect
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
    write_own(name, folder := tmp_path / name)
    with open_checkpoint(folder) as model:
        assert len(model.notes) == SKIPPED.get(name, 0)
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
    for key, value in EXPECTED[name]["keys"].items():
        skipped = (*OTHERWISE, *OF_MODEL.get(name, ()), *(OF_SPM if OWN[name][2] == "spm" else ()))
        if key not in skipped and not key.endswith(LAYOUT):
            real = isinstance(value, float)
            assert keys.get(key) == (pytest.approx(value, rel=1e-6) if real else value), key


def of_text(**config: Any) -> dict[str, Any]:
    return {"text_config": {**OWN["kimi-k3"][0]["text_config"], **config}}


def of_talker(**config: Any) -> dict[str, Any]:
    return {"talker_config": {**OWN["qwen3tts"][0]["talker_config"], **config}}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "blocks of another kind": ("llada", {"block_type": "sequential"}, "block_type is sequential; the GGUF"),
    "layer norms": ("llada", {"layer_norm_type": "default"}, "layer_norm_type is default; the GGUF architecture"),
    "ALiBi": ("llada", {"alibi": True}, "alibi is True; the GGUF architecture"),
    "not rotated": ("llada", {"rope": False}, "rope is False; the GGUF architecture"),
    "norms of queries": ("llada", {"attention_layer_norm": True}, "attention_layer_norm is True; the GGUF"),
    "activation": ("llada", {"activation_type": "gelu"}, "hidden_act is gelu; expected silu"),
    "no sizes": ("llada", {"d_model": None}, "hidden_size is missing; expected a whole number"),
    "scores of experts": ("rnd1", {"norm_topk_prob": False}, "norm_topk_prob is False; the GGUF architecture"),
    "scores to sum to one": ("llada-moe", {"norm_topk_prob": True}, "norm_topk_prob is True; the GGUF architecture"),
    "dense layers": ("rnd1", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; the GGUF architecture"),
    "shared keys": ("cogvlm", {"num_multi_query_heads": 2}, "num_multi_query_heads is 2; the GGUF architecture has a"),
    "layers with attention": ("rwkv7", {"attn": {"layers": [1]}}, "attn names layers with attention"),
    "another version": ("arwkv7", {"wkv_version": 6}, "wkv_version is 6; the GGUF architecture"),
    "heads that do not divide": ("rwkv6", {"head_size": 60}, "wkv.head_size: expected an even number that divides"),
    "no end of speech": ("qwen3tts", of_talker(codec_eos_token_id=None), "codec_eos_token_id is missing; expected"),
    "units of another kind": ("qwen3tts", of_talker(hidden_act="gelu"), "hidden_act is gelu; expected silu"),
    "weights of experts": ("grovemoe", {"norm_topk_prob": False}, "norm_topk_prob is False; the GGUF architecture"),
    "no caps": ("kimi-k3", of_text(activation_situ_beta=None), "activation_situ_beta is missing; expected a number"),
    "other units of Kimi K3": ("kimi-k3", of_text(hidden_act="silu"), "hidden_act is silu; expected situ"),
    "rotated": ("kimi-k3", of_text(mla_use_nope=False), "mla_use_nope is False; the GGUF architecture"),
    "shared experts": ("llada-moe", {"num_shared_experts": 1}, "num_shared_experts is 1; the GGUF architecture"),
}  # fmt: skip


TABLES = {"own": REFUSED, "programs": OF_PROGRAMS, "last": OF_LAST}
ALL_REFUSED = {f"{table}: {case}": told for table, cases in TABLES.items() for case, told in cases.items()}


@pytest.mark.parametrize("case", ALL_REFUSED)
def test_what_gguf_cannot_say_is_one_line(case: str, tmp_path: Path) -> None:
    name, config, message = ALL_REFUSED[case]
    write_own(name, tmp_path, **config)
    check_refused(tmp_path, message)


def test_the_vocabulary_of_dream(tmp_path: Path) -> None:
    """Dream's checkpoint has vocab.json and merges.txt, and a tokenizer class with Qwen 2's split rules.

    The keys equal the conversion of tokenizer.json.
    """
    write_own("dream", tmp_path)
    with open_checkpoint(tmp_path) as model:
        theirs = model.metadata
    fast = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(fast["model"]["vocab"]))
    pairs = "\n".join(" ".join(pair) for pair in fast["model"]["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{pairs}\n")
    (tmp_path / "tokenizer.json").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    decoder = {str(i): {"content": text, "special": True} for i, text in enumerate(("<pad>", "<s>", "</s>"))}
    known = {**settings, "tokenizer_class": "DreamTokenizer", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known))
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ()
        for key, value in theirs.items():
            if key.startswith("tokenizer.") and not key.endswith("_token"):
                np.testing.assert_array_equal(model.metadata[key], value, key)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**known, "tokenizer_class": "OtherTokenizer"}))
    with pytest.raises(ConvertError, match=r"holds no tokenizer\.json and no tokenizer\.model"):
        open_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b c\n")
    with pytest.raises(ConvertError, match="merges is not a list of pairs"):
        open_checkpoint(tmp_path)
    (tmp_path / "merges.txt").write_bytes(b"\xff\xff")
    with pytest.raises(ConvertError, match=r"merges\.txt: cannot be read"):
        open_checkpoint(tmp_path)


def test_lerps_in_one_tensor(tmp_path: Path) -> None:
    """Some RWKV-7 checkpoints store the six token-shift weights of a layer as one tensor, in the order of the GGUF."""
    write_own("rwkv7", tmp_path)
    given = {name: numbers(name, shape, base) for name, shape, base in OWN["rwkv7"][1]}
    for layer in range(3):
        parts = [given.pop(f"model.layers.{layer}.attn.x_{x}") for x in "rwkvag"]
        given[f"model.layers.{layer}.attn.x_x"] = np.concatenate(parts).reshape(6, 1, -1)
    save(tmp_path / "model.safetensors", given)
    with open_checkpoint(tmp_path) as model:
        found = {key: [list(x.shape), digest(values(x))] for key, x in model.tensors.items()}
    assert found == EXPECTED["rwkv7"]["tensors"]


def test_values_of_the_first_layer_are_those_of_no_use(tmp_path: Path) -> None:
    """Some RWKV-7 checkpoints have unused value-residual tensors in layer 0.

    The converter ignores them, and the GGUF has placeholders as in llama.cpp.
    """
    write_own("rwkv7", tmp_path)
    given = {name: numbers(name, shape, base) for name, shape, base in OWN["rwkv7"][1]}
    more = {name.replace(".1.", ".0."): x for name, x in given.items() if ".1.attn.v_lora" in name}
    save(tmp_path / "model.safetensors", given | more)
    with open_checkpoint(tmp_path) as model:
        found = {key: [list(x.shape), digest(values(x))] for key, x in model.tensors.items()}
    assert len(more) == 3
    assert found == EXPECTED["rwkv7"]["tensors"]


def test_ranks_that_config_json_leaves_to_a_rule(tmp_path: Path) -> None:
    """If config.json omits the LoRA ranks of RWKV-7, they follow from the hidden size, as in the publisher's code."""
    ranks = {f"{x}_low_rank_dim": None for x in ("decay", "a", "v", "gate")}
    write_own("rwkv7", tmp_path, **ranks)
    with open_checkpoint(tmp_path) as model:
        keys = {key: value for key, value in model.metadata.items() if key.endswith("lora_rank")}
    assert [*keys.values()] == [32, 32, 32, 32]  # ranks for a hidden size of 128
    config = HfConfig(tmp_path, {"hidden_size": 4096}, {})
    assert [RECIPES["rwkv7"].keys[key.removeprefix("rwkv7.")](config) for key in keys] == [128, 128, 96, 480]
    assert RECIPES["rwkv6"].keys["time_decay_extra_dim"](config) == 128


def test_projections_of_qwen3tts_of_another_size(tmp_path: Path) -> None:
    write_own("qwen3tts", tmp_path)
    given = {name: numbers(name, shape, base) for name, shape, base in OWN["qwen3tts"][1]}
    name = "talker.text_projection.linear_fc1.bias"
    save(tmp_path / "model.safetensors", {**given, name: np.zeros(23, np.float32)})
    with pytest.raises(ConvertError, match=r"linear_fc1.bias: is \(23,\); expected \(24,\), as config.json"):
        open_checkpoint(tmp_path)
    del given[name]
    save(tmp_path / "model.safetensors", given)
    with pytest.raises(ConvertError, match=r"'text_projection.linear_fc1.bias' is missing"):
        open_checkpoint(tmp_path)


def test_a_dialogue_with_rwkv(tmp_path: Path) -> None:
    """The prompt equals the output of llama.cpp's built-in template for RWKV."""
    write_own("rwkv6", tmp_path)
    with open_checkpoint(tmp_path) as model:
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


BAD_WORLD = {
    "no id": ("x 'a' 1", "line 1 is not a token with its id and length"),
    "no literal": ("1 a 1", "line 1 is not a token with its id and length"),
    "a program": ("1 'a'+open('x').read()+'' 1", "line 1 is not a token with its id and length"),
    "number": ("1 b'a\\xzz' 1", "line 1 is not a token with its id and length"),
    "length": ("1 'a' 2", "line 1 is not a token with its id and length"),
    "long line": (f"1 '{'a' * 3000}' 3000", "line 1 is not a token with its id and length"),
    "twice": ("1 'a' 1\n1 'b' 1", "line 2: the id 1 of token b'b' is there twice or beyond"),
    "beyond": ("320 'a' 1", "line 1: the id 320 of token b'a' is there twice or beyond"),
    "of the start": ("0 'a' 1", "line 1: the id 0 of token b'a' is there twice or beyond"),
    "few": ("1 'a' 1", "no token for the byte 0x01"),
}


@pytest.mark.parametrize("case", BAD_WORLD)
def test_a_damaged_vocabulary_of_rwkv_is_one_line(case: str, tmp_path: Path) -> None:
    text, message = BAD_WORLD[case]
    write_own("rwkv7", tmp_path)
    (tmp_path / WORLD).write_text(text)
    with pytest.raises(ConvertError, match=message) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / WORLD).write_bytes(b"\xff")
    with pytest.raises(ConvertError, match=r"v20230424\.txt: cannot be read"):
        open_checkpoint(tmp_path)
