"""Store what llama.cpp's converter writes for the tiny checkpoints of models that transformers lacks: metadata keys,
shapes, and digests of the F32 data.

    python -m tests.localllm.convert.hf_own LLAMA_CPP [MODEL...]    # regenerates data/hf_own.json.gz, or these models,
    # with llama.cpp's source

The command needs torch, transformers and sentencepiece.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.localllm.convert.checkpoints import DATA, OWN, read_json, write
from tests.localllm.convert.hf_own_multimodal import SPEAKS
from tests.localllm.convert.support import digest, edit_json, sample

COMPUTED = {  # tensors whose last bits differ between machines
    "kimi-k3": ".ssm_a", "plamo2": ".ssm_a", "mamba-lm": ".ssm_a",
    "qwen3tts": "token_embd.weight", "pockettts": "token_embd.weight",
}  # fmt: skip


def _told(tensor: Any, computed: str) -> list[Any]:
    """Return the digest of a tensor, or some of its rows, and its type unless that is F32."""
    kind = [] if tensor.tensor_type.name == "F32" else [tensor.tensor_type.name]
    return [(sample if tensor.name.endswith(computed) else digest)(tensor.data), *kind]


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
        write(name, folder)
        if OWN[name].tokenizer == "wordpiece":  # llama.cpp's converter requires this class for encoders
            edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
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
    if OWN[name].tokenizer not in ("world", "plamo") and name not in SPEAKS:  # other tests cover these keys
        skipped += ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"]
    return {"keys": {key: value for key, value in keys.items() if key not in skipped}, "tensors": tensors}


if __name__ == "__main__":
    before = read_json("hf_own") if sys.argv[2:] else {}
    everything = {
        own: before[own] if before and own not in sys.argv[2:] else _expected(own, sys.argv[1]) for own in OWN
    }
    text = json.dumps(everything, separators=(",", ":")).encode()
    (DATA / "hf_own.json.gz").write_bytes(gzip.compress(text, mtime=0))
