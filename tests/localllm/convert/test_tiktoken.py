"""A folder whose vocabulary is tiktoken.model alone: the ids of the tiktoken package, and files that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.convert import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.tiktoken_tokens import NOTE
from localllm.convert.tokenizer_keys import TokenizerKeys, tokenizer_keys
from localllm.tokenizer import Tokenizer
from tests.localllm.convert.hf_synthetic import DATA

STORED = json.loads((DATA / "tiktoken.json").read_text())
COUNT = len(STORED["ranks"])
LINES = [f"{token} {rank}" for rank, token in enumerate(STORED["ranks"])]
ROWS = COUNT + 300
SETTINGS: dict[str, Any] = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]", "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(COUNT + i): {"content": text, "special": True} for i, text in enumerate(("[BOS]", "[EOS]", "<|im_end|>"))
    },
}  # fmt: skip


def keys_of(folder: Path, lines: list[str], settings: dict[str, Any] = SETTINGS, rows: int = ROWS) -> TokenizerKeys:
    (folder / "tiktoken.model").write_text("".join(f"{line}\n" for line in lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer_keys(folder, HfConfig(folder / "config.json", {}, {}), rows)


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, LINES)
    assert keys.notes == (NOTE,)
    ours = Tokenizer.from_metadata(keys.keys)
    for text, ids in STORED["texts"]:
        assert ours.encode(text, add_special=False) == ids
        assert ours.decode(ids) == text
    assert ours.encode("<|im_end|>", add_special=False, parse_special=True) == [COUNT + 2]
    tokens = keys.keys["tokenizer.ggml.tokens"]
    assert tokens[COUNT : COUNT + 4] == ["[BOS]", "[EOS]", "<|im_end|>", f"<|reserved_token_{COUNT + 3}|>"]
    assert tokens[COUNT + 256] == f"[PAD{COUNT + 256}]"
    assert (keys.keys["tokenizer.ggml.bos_token_id"], keys.keys["tokenizer.ggml.eos_token_id"]) == (COUNT, COUNT + 1)


def test_another_tokenizer_of_tiktoken_is_refused_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"names no tokenizer of Kimi.*save it as a fast one"):
        keys_of(tmp_path, LINES, {"tokenizer_class": "QWenTokenizer"})


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*LINES[:3], "?? 3"], "line 4 is not a token and its rank"),
        ([*LINES[:3], LINES[3].split()[0]], "line 4 is not a token and its rank"),
        ([*LINES, f"QUFBQUFBQUFB {ROWS}"], "does not belong to an embedding of"),
        ([*LINES, "QUFBQUFBQUFB -1"], "does not belong to an embedding of"),
        ([*LINES, "QUFB" * 100 + f" {COUNT}"], "does not belong to an embedding of"),
        ([*LINES, LINES[0].split()[0] + f" {COUNT}"], "is there twice"),
        ([*LINES, "QUFBQUFBQUFB 0"], "two of one rank"),
        ([], "holds no tokens"),
    ],
)
def test_damaged_files_are_one_line(lines: list[str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=expected) as caught:
        keys_of(tmp_path, lines)
    assert "\n" not in str(caught.value)
