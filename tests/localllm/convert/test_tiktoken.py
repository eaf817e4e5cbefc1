"""Checkpoints with only a tiktoken vocabulary give the tiktoken package's ids; invalid files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.convert import ConvertError
from localllm.convert.tokenizer_keys import TokenizerKeys
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.vocab import read_vocab
from tests.localllm.convert.checkpoints import DATA
from tests.localllm.convert.test_tokenizer_keys import keys_of as converted

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


def keys_of(
    folder: Path, lines: list[str], settings: dict[str, Any] = SETTINGS, rows: int = ROWS, name: str = "tiktoken.model"
) -> TokenizerKeys:
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return converted(folder, rows=rows, **settings)


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, LINES)
    assert keys.notes == ("capitals inside words do not begin a token, as in llama.cpp; Kimi's own code splits there",)
    ours = Tokenizer.from_metadata(keys.keys)
    for text, ids in STORED["texts"]:
        assert ours.encode(text, add_special=False) == ids
        assert ours.decode(ids) == text
    assert ours.encode("<|im_end|>", add_special=False, parse_special=True) == [COUNT + 2]
    tokens = keys.keys["tokenizer.ggml.tokens"]
    assert tokens[COUNT : COUNT + 4] == ["[BOS]", "[EOS]", "<|im_end|>", f"<|reserved_token_{COUNT + 3}|>"]
    assert tokens[COUNT + 256] == f"[PAD{COUNT + 256}]"
    assert (keys.keys["tokenizer.ggml.bos_token_id"], keys.keys["tokenizer.ggml.eos_token_id"]) == (COUNT, COUNT + 1)


def test_the_vocabulary_of_qwen_1(tmp_path: Path) -> None:
    """Qwen 1 defines its special tokens only in code. Their ids follow the tokens of the file."""
    settings = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer"]}}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": COUNT}))
    found = keys_of(tmp_path, LINES, settings, name="qwen.tiktoken")
    ours, keys = Tokenizer.from_metadata(found.keys), {x.rpartition(".")[2]: y for x, y in found.keys.items()}
    assert found.notes == ()
    for text, ids in STORED["qwen"]:
        assert ours.encode(text) == ids
    assert keys["pre"] == "qwen2"  # one token per digit; this vocabulary has no multi-digit tokens
    assert keys["tokens"][COUNT : COUNT + 4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>"]
    assert keys["tokens"][COUNT + 207 : COUNT + 209] == ["<|extra_204|>", f"[PAD{COUNT + 208}]"]
    assert (keys["bos_token_id"], keys["eos_token_id"], keys["add_bos_token"]) == (COUNT, COUNT, False)
    assert {COUNT, COUNT + 2} <= read_vocab(found.keys).ends
    assert ours.encode("<|im_end|>", parse_special=True) == [COUNT + 2]


def test_the_vocabulary_of_glm_4(tmp_path: Path) -> None:
    """GLM 4's tiktoken vocabulary has the file name of a SentencePiece model."""
    specials = ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|observation|>")
    settings = {
        "tokenizer_class": "ChatGLM4Tokenizer", "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {str(COUNT + i): {"content": x, "special": True} for i, x in enumerate(specials)},
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [COUNT, COUNT + 3, COUNT + 4]}))
    found = keys_of(tmp_path, LINES, settings, name="tokenizer.model")
    ours = Tokenizer.from_metadata(found.keys)
    assert found.notes == ()
    for text, ids in STORED["chatglm4"]:
        assert ours.encode(text) == ids
    assert found.keys["tokenizer.ggml.pre"] == "chatglm-bpe"  # up to three digits per token
    assert found.keys["tokenizer.ggml.eos_token_id"] == COUNT
    assert {COUNT, COUNT + 3, COUNT + 4} <= read_vocab(found.keys).ends


def test_another_tokenizer_of_tiktoken_is_refused_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"names no tokenizer of Kimi or Qwen.*save it as a fast one"):
        keys_of(tmp_path, LINES, {"tokenizer_class": "GPT2Tokenizer"})


def test_older_tokenizers_of_chatglm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"the special tokens of ChatGLM 2 and 3 are only in the tokenizer's code"):
        keys_of(tmp_path, LINES, {"tokenizer_class": "ChatGLMTokenizer"}, name="tokenizer.model")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*LINES[:3], "?? 3"], "line 4 is not a token and its rank"),
        ([*LINES[:3], LINES[3].split()[0]], "line 4 is not a token and its rank"),
        ([*LINES, f"QUFBQUFBQUFB {ROWS}"], "does not belong to an embedding of"),
        ([*LINES, "QUFBQUFBQUFB -1"], "does not belong to an embedding of"),
        ([*LINES, "QUFB" * 100 + f" {COUNT}"], "does not belong to an embedding of"),
        ([*LINES, LINES[0].split()[0] + f" {COUNT}"], "occurs twice"),
        ([*LINES, "QUFBQUFBQUFB 0"], "two with the same rank"),
        ([], "no tokens"),
    ],
)
def test_damaged_files_are_one_line(lines: list[str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=expected) as caught:
        keys_of(tmp_path, lines)
    assert "\n" not in str(caught.value)
