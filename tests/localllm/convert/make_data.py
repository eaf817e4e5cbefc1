"""Write the data that other packages give: data/packed.npz, matrices packed by compressed-tensors and their values, and
data/tiktoken.json, a vocabulary in tiktoken's format and the ids that tiktoken gives with three models' split rules.

The models are Kimi, Qwen 1 and GLM 4.

    python -m tests.localllm.convert.make_data packed      # needs torch and compressed-tensors
    python -m tests.localllm.convert.make_data tiktoken    # needs tiktoken
"""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import numpy as np

from localllm.tokenizer.encoders import BYTE_LETTERS
from tests.localllm.convert.checkpoints import DATA
from tests.localllm.convert.hf_tokenizers import REGEXES, TEXT, bpe_tokenizer

# Name: rows, columns, quantization config of the weights.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "symmetric": (20, 96, {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "asymmetric": (21, 80, {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
    "channel": (9, 44, {"num_bits": 4, "strategy": "channel"}),
    "channel, asymmetric": (9, 44, {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    "tensor": (8, 40, {"num_bits": 4, "strategy": "tensor"}),
    "8 bits": (7, 64, {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False}),
    "2 bits": (7, 72, {"num_bits": 2, "strategy": "group", "group_size": 24}),
}


def make_packed() -> None:
    import torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    stored: dict[str, np.ndarray] = {}
    for name, (rows, columns, told) in CASES.items():
        noise = np.random.RandomState(len(stored))
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**told))
        groups = columns // told["group_size"] if told["strategy"] == "group" else 1
        shape = (1,) if told["strategy"] == "tensor" else (rows, groups)
        half = 1 << (told["num_bits"] - 1)
        state = {
            "weight": torch.from_numpy(noise.standard_normal((rows, columns)).astype(np.float32)),
            "weight_scale": torch.from_numpy((0.5 + noise.random_sample(shape)).astype(np.float32) * 2.0 / half),
            "weight_zero_point": torch.from_numpy(noise.randint(-half // 2, half // 2, shape).astype(np.int8)),
        }
        if told.get("symmetric", True):
            state["weight_zero_point"].zero_()
        packed = PackedQuantizationCompressor.compress(state, scheme)
        numbers = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        stored |= {f"{name}:{key}": x.numpy() for key, x in packed.items()} | {f"{name}:numbers": numbers.numpy()}
    np.savez_compressed(DATA / "packed.npz", **stored)


_UPPER, _LOWER = (rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    [
        r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ]
)  # fmt: skip
RULES = {"texts": KIMI, "qwen": REGEXES["qwen2"], "chatglm4": REGEXES["llama3"]}
# Kimi's rule differs for camel case; see the note in `tiktoken_tokens`
WORDS = TEXT.replace("HappensNext in camelCase", "happens next in Camel case")
TEXTS = [
    WORDS,
    WORDS.upper(),
    "  日本 語テキスト 12345 it's IT'LL  \n\n\n x",
    "Ünïcödé 🙂🙂 def f(x):\r\n\treturn x**2",
]


def make_tiktoken() -> None:
    import tiktoken

    model = json.loads(bpe_tokenizer("qwen2", 600, TEXTS).to_str())["model"]
    byte_of = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
    singles = [bytes([byte]) for byte in range(256)]
    random.Random(5).shuffle(singles)
    made = [bytes(byte_of[letter] for letter in "".join(pair)) for pair in model["merges"]]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys([*singles, *made]))}
    stored: dict[str, list[object]] = {"ranks": [base64.b64encode(token).decode() for token in ranks]}
    for name, rule in RULES.items():
        encoding = tiktoken.Encoding(name, pat_str=rule, mergeable_ranks=ranks, special_tokens={})
        stored[name] = [[text, encoding.encode(text)] for text in TEXTS]
    (DATA / "tiktoken.json").write_text(json.dumps(stored, indent=None))


if __name__ == "__main__":
    {"packed": make_packed, "tiktoken": make_tiktoken}[sys.argv[1]]()
