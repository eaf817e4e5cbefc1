"""Grok 2 as published: experts in pieces of several GPUs, and SGLang's tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from tests.localllm.convert.checkpoints import read_json, tensors_of, write
from tests.localllm.convert.support import check_refused, digest, save, values


def _save_pieces(folder: Path, cards: int, left_out: str = "") -> None:
    """Write Grok 2's published shards: one file of common tensors, and files with each GPU's slice of every expert."""
    given = tensors_of("grok-2")
    experts = {name: x for name, x in given.items() if ".experts." in name}
    (folder / "model.safetensors").unlink(missing_ok=True)
    save(folder / "pytorch_model-00009-TP-common.safetensors", {x: y for x, y in given.items() if x not in experts})
    for card in range(cards):
        for number, matrix in enumerate(("w1", "w2", "w3")):
            path = folder / f"pytorch_model-{number:05}-TP-{card:03}.safetensors"
            own = {
                name: np.ascontiguousarray(np.split(x, cards, axis=int(matrix == "w2"))[card])
                for name, x in experts.items()
                if f".{matrix}." in name
            }
            if path.name != left_out:
                save(path, own)


@pytest.mark.parametrize("cards", [1, 2, 8])
def test_pieces_of_grok_2_are_put_together(cards: int, tmp_path: Path) -> None:
    _save_pieces(write("grok-2", tmp_path), cards)
    with open_checkpoint(tmp_path) as model:
        found = {key: [list(x.shape), digest(values(x))] for key, x in model.tensors.items()}
        rows = model.tensors["blk.1.ffn_down_exps.weight"].read(33, 65)  # rows of the second and third expert
        whole = values(model.tensors["blk.1.ffn_down_exps.weight"]).reshape(-1, 24)
        np.testing.assert_array_equal(rows.view(np.float32), whole[33:65])
    assert found == read_json("hf_own")["grok-2"]["tensors"]


def test_a_piece_of_grok_2_that_is_missing(tmp_path: Path) -> None:
    _save_pieces(write("grok-2", tmp_path), 4, "pytorch_model-00001-TP-002.safetensors")
    check_refused(tmp_path, r"ffn_down_exps.weight: expected shape .*24.*18")


def test_pieces_that_do_not_fit(tmp_path: Path) -> None:
    _save_pieces(write("grok-2", tmp_path), 2)
    name = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    save(tmp_path / "pytorch_model-00008-TP-001.safetensors", {name: np.zeros((31, 12), np.float32)})
    check_refused(tmp_path, f"tensor '{name}' is also in pytorch_model-00001-TP-001.safetensors")
    (tmp_path / "pytorch_model-00008-TP-001.safetensors").rename(tmp_path / "pytorch_model-00008-TP-002.safetensors")
    check_refused(tmp_path, "they must be equally high to form one matrix")
    save(tmp_path / "pytorch_model-00008-TP-002.safetensors", {"model.norm.weight": np.zeros(32, np.float32)})
    check_refused(tmp_path, "tensor 'model.norm.weight' is also in pytorch_model-00009-TP-common.safetensors")


def test_pieces_of_other_tensors_are_refused(tmp_path: Path) -> None:
    _save_pieces(write("grok-2", tmp_path), 2)
    for card in range(2):
        path = tmp_path / f"pytorch_model-00008-TP-{card:03}.safetensors"
        save(path, {"model.layers.0.other.weight": np.zeros((4, 4), np.float32)})
    check_refused(tmp_path, "tensor 'model.layers.0.other.weight' is in 2 pieces; only Grok's experts may be split")


def test_the_tokenizer_of_grok_2_as_published(tmp_path: Path) -> None:
    (write("grok-2", tmp_path) / "tokenizer.json").rename(tmp_path / "tokenizer.tok.json")
    check_refused(tmp_path, "holds tokenizer.tok.json, SGLang's own form of a tokenizer; put tokenizer.json, ")
