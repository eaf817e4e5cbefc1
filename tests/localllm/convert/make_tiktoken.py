"""Write data/tiktoken.json: a vocabulary in tiktoken's format, and the token ids that tiktoken gives with
three models' split rules.

The models are Kimi, Qwen 1 and GLM 4.

    python -m tests.localllm.convert.make_tiktoken    # needs tiktoken
"""

from __future__ import annotations

import base64
import json
import random

from tests.localllm.convert.hf_synthetic import DATA
from tests.localllm.convert.hf_tokenizers import TEXT, bpe_tokenizer

_UPPER, _LOWER = (rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    [
        r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ]
)  # fmt: skip
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULES = {"texts": KIMI, "qwen": rf"{SHORT}\p{{N}}{SIGNS}", "chatglm4": rf"{SHORT}\p{{N}}{{1,3}}{SIGNS}"}
# Kimi's rule differs for camel case; see the note in `tiktoken_tokens`
WORDS = TEXT.replace("HappensNext in camelCase", "happens next in Camel case")
TEXTS = [
    WORDS,
    WORDS.upper(),
    "  日本 語テキスト 12345 it's IT'LL  \n\n\n x",
    "Ünïcödé 🙂🙂 def f(x):\r\n\treturn x**2",
]


def main() -> None:
    import tiktoken

    from localllm.tokenizer.encoders import BYTE_LETTERS

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
    main()
