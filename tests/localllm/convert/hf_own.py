"""Tiny checkpoints of models that transformers lacks, with the tensor names of the publishers' code.

The stored reference is the output of llama.cpp's converter: metadata keys, shapes, and digests of the F32 data.

    python -m tests.localllm.convert.hf_own LLAMA_CPP [MODEL...]    # regenerates data/hf_own.json.gz, or these models,
    # with llama.cpp's source

The command needs torch, transformers and sentencepiece.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.hf_own_classes import BESIDE, FURTHER
from tests.localllm.convert.hf_own_packed import OWN_PACKED, stored
from tests.localllm.convert.hf_own_rwkv import RWKV
from tests.localllm.convert.hf_own_speech import SPEECH
from tests.localllm.convert.hf_programs import PROGRAMS
from tests.localllm.convert.hf_programs_last import LAST
from tests.localllm.convert.hf_programs_newer import NEWER
from tests.localllm.convert.hf_synthetic import DATA, write_folder
from tests.localllm.convert.hf_tokenizers import VOCABULARY
from tests.localllm.convert.support import save

Shapes = dict[str, list[int]]
WIDTH, HEADS, KV, HEAD, FFN, LAYERS = 32, 4, 2, 8, 48, 2
_QWEN = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "mask_token_id": 9, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": HEAD}
_TOP: Shapes = {"model.embed_tokens": [VOCABULARY, WIDTH], "model.norm": [WIDTH], "lm_head": [VOCABULARY, WIDTH]}
_NORMS: Shapes = {"input_layernorm": [WIDTH], "post_attention_layernorm": [WIDTH]}
_ATTENTION: Shapes = {
    "self_attn.q_proj": [HEADS * HEAD, WIDTH], "self_attn.k_proj": [KV * HEAD, WIDTH],
    "self_attn.v_proj": [KV * HEAD, WIDTH], "self_attn.o_proj": [WIDTH, HEADS * HEAD],
}  # fmt: skip
_MLP: Shapes = {"gate_proj": [FFN, WIDTH], "up_proj": [FFN, WIDTH], "down_proj": [WIDTH, FFN]}
_HEAD_NORMS: Shapes = {"self_attn.q_norm": [HEAD], "self_attn.k_norm": [HEAD]}


def weights(shapes: Shapes, prefix: str = "", suffix: str = ".weight") -> list[tuple[str, list[int], float]]:
    """Return (name, shape, mean of the random values) of each tensor."""
    return [(prefix + name + suffix, shape, float("norm" in name or "ln" in name)) for name, shape in shapes.items()]


def _layers(shapes: Shapes, biases: tuple[str, ...] = (), prefix: str = "model.layers.{}.") -> list[Any]:
    found = []
    for layer in range(LAYERS):
        found += weights(shapes, prefix.format(layer))
        found += weights({name: shapes[name][:1] for name in biases}, prefix.format(layer), ".bias")
    return found


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _experts(shapes: Shapes) -> Shapes:
    return {f"mlp.experts.{i}.{name}": shape for i in range(4) for name, shape in shapes.items()}


_ROUTED: Shapes = {**_NORMS, **_ATTENTION, **_HEAD_NORMS, "mlp.gate": [4, WIDTH], **_experts(_MLP)}
_LLADA: Shapes = {
    "attn_norm": [WIDTH], "ff_norm": [WIDTH], "q_proj": [WIDTH, WIDTH], "k_proj": [KV * HEAD, WIDTH],
    "v_proj": [KV * HEAD, WIDTH], "attn_out": [WIDTH, WIDTH], "ff_proj": [FFN, WIDTH], "up_proj": [FFN, WIDTH],
    "ff_out": [WIDTH, FFN],
}  # fmt: skip

_COGVLM: Shapes = {
    **_NORMS,
    **{f"self_attn.{x}_expert_query_key_value": [3 * WIDTH, WIDTH] for x in ("language", "vision")},
    **{f"self_attn.{x}_expert_dense": [WIDTH, WIDTH] for x in ("language", "vision")},
    **_below("mlp.language_mlp.", _MLP), **_below("mlp.vision_mlp.", _MLP),
}  # fmt: skip

# Name: config.json, tensors, tokenizer.
OWN: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "dream": (
        {**_QWEN, "architectures": ["DreamModel"], "model_type": "Dream"},
        weights(_TOP) + _layers({**_NORMS, **_ATTENTION, **_below("mlp.", _MLP)},
                                tuple(f"self_attn.{x}_proj" for x in "qkv")),
        "qwen2",
    ),
    "llada": (
        {"architectures": ["LLaDAModelLM"], "model_type": "llada", "vocab_size": VOCABULARY, "d_model": WIDTH,
         "n_heads": HEADS, "n_kv_heads": KV, "n_layers": LAYERS, "mlp_hidden_size": FFN, "max_sequence_length": 256,
         "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "activation_type": "silu", "block_type": "llama",
         "layer_norm_type": "rms", "alibi": False, "rope": True, "mask_token_id": 9, "weight_tying": False,
         "eos_token_id": 2, "pad_token_id": 0},
        weights({"wte": [VOCABULARY, WIDTH], "ln_f": [WIDTH], "ff_out": [VOCABULARY, WIDTH]}, "model.transformer.")
        + _layers(_LLADA, prefix="model.transformer.blocks.{}."),
        "llama3",
    ),
    "llada-moe": (
        {**_QWEN, **_EXPERTS, "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "rope_theta": 50000.0,
         "expert_intermediate_size": FFN, "norm_topk_prob": None},
        weights(_TOP) + _layers(_ROUTED), "qwen2",
    ),
    "rnd1": (
        {**_QWEN, **_EXPERTS, "architectures": ["RND1"], "model_type": "rnd1", "moe_intermediate_size": FFN,
         "norm_topk_prob": True},
        weights(_TOP) + _layers(_ROUTED), "qwen2",
    ),
    "cogvlm": (
        {**_QWEN, "architectures": ["CogVLMForCausalLM"], "model_type": "cogvlm", "num_key_value_heads": HEADS,
         "num_multi_query_heads": HEADS, "rope_theta": 10000.0, "mask_token_id": None,
         "vision_config": {"hidden_size": 16}},
        weights(_TOP) + _layers(_COGVLM) + weights({"model.vision.linear_proj.linear_proj": [WIDTH, 16]}),
        "spm",
    ),
    **RWKV,
    **PROGRAMS,
    **NEWER,
    **LAST,
    **OWN_PACKED,
    **SPEECH,
    **FURTHER,
}  # fmt: skip


def write_own(name: str, folder: Path, **config: Any) -> None:
    """Write a checkpoint with some keys of config.json replaced, or removed if None."""
    folder.mkdir(exist_ok=True)
    given, tensors, tokenizer = OWN[name]
    left = {key: value for key, value in {**given, **config}.items() if value is not None}
    write_folder({"config": left, "tensors": tensors, "tokenizer": tokenizer}, folder)
    if not left:  # the model has no config.json
        (folder / "config.json").unlink()
    if name in BESIDE:
        BESIDE[name](folder)
    if name in OWN_PACKED:
        save(folder / "model.safetensors", *stored(name, tensors))


def kind(tensor: Any) -> list[str]:
    """Return the tensor type as a list, which is empty for F32."""
    return [] if tensor.tensor_type.name == "F32" else [tensor.tensor_type.name]


COMPUTED = {  # tensors whose last bits differ between machines
    "kimi-k3": ".ssm_a", "plamo2": ".ssm_a", "mamba-lm": ".ssm_a",
    "qwen3tts": "token_embd.weight", "pockettts": "token_embd.weight",
}  # fmt: skip


def sample(values: np.ndarray) -> list[Any]:
    """Return every n-th row, starting at the last. The reference stores these rows as values."""
    found: list[Any] = values[:: -1 - len(values) // 32].tolist()
    return found


def _told(tensor: Any, computed: str) -> list[Any]:
    return [(sample if tensor.name.endswith(computed) else digest)(tensor.data), *kind(tensor)]


def digest(values: np.ndarray) -> str:
    """Return a digest of the values in F32. Bytes and int32 are hashed unconverted."""
    kept = values.dtype if values.dtype in (np.uint8, np.int32) else np.float32
    return hashlib.sha256(np.ascontiguousarray(values, kept).tobytes()).hexdigest()[:16]


def read_expected() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(gzip.decompress((DATA / "hf_own.json.gz").read_bytes()))
    return found


_PROGRAM = """
import importlib, runpy, sys
import transformers
transformers.PreTrainedConfig.max_position_embeddings = 256  # it fails on scaled rotations of models it does not know
source = sys.argv.pop(1)
sys.path[:0] = [source, source + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"  # it knows real vocabularies alone
# These need files that are tested elsewhere.
for module, name in (("chatglm", "ChatGLMModel"), ("qwen", "QwenModel"), ("deci", "DeciModel")):
    model = getattr(importlib.import_module("conversion." + module), name)
    model.set_vocab = model._set_vocab_gpt2
from conversion.baichuan import BaichuanModel  # its change calls itself without end for all other tensors
fused, plain = BaichuanModel.modify_tensors, conversion.base.TextModel.modify_tensors
BaichuanModel.modify_tensors = lambda self, x, name, layer: (fused if "W_pack" in name else plain)(self, x, name, layer)
import inspect, textwrap
import conversion.plamo as plamo
for name in ("shuffle_attn_q_weight", "shuffle_attn_output_weight"):  # they know the sizes of PLaMo 13B alone
    text = textwrap.dedent(inspect.getsource(getattr(plamo.PlamoModel, name)))
    exec(text.replace("5120", "160").replace("128", "4"), scope := dict(vars(plamo)))
    setattr(plamo.PlamoModel, name, scope[name])
sys.argv[0] = source + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _expected(name: str, source: str) -> dict[str, Any]:
    """Return the metadata and tensors that llama.cpp's converter writes."""
    import gguf

    with tempfile.TemporaryDirectory() as place:
        folder, path = Path(place) / name, Path(place) / "model.gguf"
        write_own(name, folder)
        if OWN[name][2] == "wordpiece":  # llama.cpp's converter requires this class for encoders
            settings = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "BertTokenizer"}))
        if name == "grok-2":  # without a chat template, llama.cpp's converter writes no file
            (folder / "chat_template.jinja").write_text("{{ messages }}")
        command = [sys.executable, "-c", _PROGRAM, source, str(folder), "--outtype", "f32", "--outfile", str(path)]
        subprocess.run(command, check=True)
        reader = gguf.GGUFReader(path)
        keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        tensors = {
            x.name: [[int(n) for n in reversed(x.shape)], *_told(x, COMPUTED.get(name, "?"))] for x in reader.tensors
        }  # fmt: skip
    skipped = ["tokenizer.chat_template", "tokenizer.ggml.merges", "tokenizer.ggml.pre"]
    if OWN[name][2] not in ("world", "plamo") and name not in SPEECH:  # other tests cover these keys
        skipped += ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"]
    return {"keys": {key: value for key, value in keys.items() if key not in skipped}, "tensors": tensors}


if __name__ == "__main__":
    before = read_expected() if sys.argv[2:] else {}
    everything = {
        own: before[own] if before and own not in sys.argv[2:] else _expected(own, sys.argv[1]) for own in OWN
    }
    text = json.dumps(everything, separators=(",", ":")).encode()
    (DATA / "hf_own.json.gz").write_bytes(gzip.compress(text, mtime=0))
