"""PLaMo 1, Talkie and NeoBERT give the results of their programs, which are written down here in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.convert import open_checkpoint
from localllm.convert.sentencepiece import UNIGRAM
from localllm.tokenizer import Tokenizer
from tests.localllm.convert.checkpoints import tensors_of, write
from tests.localllm.convert.hf_tokenizers import TEXT, VOCABULARY, spm_file, spm_pieces
from tests.localllm.convert.support import logits_of, write_modules
from tests.localllm.convert.test_stored import embedded
from tests.localllm.convert.weights import ids, numbers
from tests.models.straight_line import rms, rope
from tests.models.support import nmse

F64 = NDArray[np.float64]
Tensors = Mapping[str, F64]
FLOAT32_EPS, ONE = 2.0**-23, np.ones(1)


def silu(x: F64) -> F64:
    return x / (1.0 + np.exp(-x))


def attended(q: F64, k: F64, v: F64, causal: bool) -> F64:
    """Return the attention output (T, H D) of queries, keys and values (T, H, D)."""
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def neo_bert(w: Tensors, ids: Sequence[int], layers: int, heads: int, eps: float) -> F64:
    """Return NeoBERT's last hidden states.

    The fused projection interleaves queries, keys and values per head: (T, heads, 3 D).
    """
    x = w["model.encoder.weight"][list(ids)]
    for n in range(layers):
        of = {name.split(f"encoder.{n}.")[1]: x for name, x in w.items() if f"transformer_encoder.{n}." in name}
        normed = rms(x, of["attention_norm.weight"], eps)
        q, k, v = np.split((normed @ of["qkv.weight"].T).reshape(len(ids), heads, -1), 3, axis=-1)
        q, k = (rope(y, y.shape[-1], False, 10000.0) for y in (q, k))
        seen = attended(q, k, v, causal=False)
        x = x + seen @ of["wo.weight"].T
        gate, up = np.split(rms(x, of["ffn_norm.weight"], eps) @ of["ffn.w12.weight"].T, 2, axis=-1)
        x = x + (silu(gate) * up) @ of["ffn.w3.weight"].T
    return rms(x, w["model.layer_norm.weight"], eps)


def plamo(w: Tensors, ids: Sequence[int], layers: int, heads: int, shared: int, eps: float) -> F64:
    """Return PLaMo's logits. The KV heads are tiled, not interleaved, to one per query head."""
    x = w["model.embed_tokens.weight"][list(ids)]
    for n in range(layers):
        of = {name.removeprefix(f"model.layers.layers.{n}."): x for name, x in w.items()}
        normed = rms(x, of["norm.weight"], eps)
        q = (normed @ of["self_attn.q_proj.weight"].T).reshape(len(ids), heads, -1)
        k, v = ((normed @ of[f"self_attn.{y}_proj.weight"].T).reshape(len(ids), -1, q.shape[-1]) for y in "kv")
        q, k = (rope(y, y.shape[-1], True, 10000.0) for y in (q, k))
        k, v = (np.tile(y, (1, shared, 1)) for y in (k, v))
        seen = attended(q, k, v, causal=True) @ of["self_attn.o_proj.weight"].T
        inner = silu(normed @ of["mlp.gate_proj.weight"].T) * (normed @ of["mlp.up_proj.weight"].T)
        x = x + seen + inner @ of["mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def talkie(w: Tensors, ids: Sequence[int], layers: int, heads: int) -> F64:
    """Return Talkie's logits.

    RoPE rotates in the opposite direction, norms have no weights, and each query head has a gain.
    """
    start = x = rms(w["model.embed.weight"][list(ids)], ONE, FLOAT32_EPS)
    half = x.shape[1] // heads // 2
    for n in range(layers):
        of = {name.removeprefix(f"model.blocks.{n}."): x for name, x in w.items()}
        normed = rms(x, ONE, FLOAT32_EPS)
        q, k, v = (
            (normed @ of[f"attn.attn_{y}.weight"].T).reshape(len(ids), heads, -1) for y in ("query", "key", "value")
        )
        q, k = (np.roll(rope(np.roll(y, half, -1), 2 * half, True, 1e6), half, -1) for y in (q, k))  # turns backwards
        q, k = (rms(y, ONE, FLOAT32_EPS) for y in (q, k))
        seen = attended(q * of["attn.head_gain.head_g"][:, None], k, v, causal=True)
        x = x + of["attn_gain.a_g"] * (seen @ of["attn.attn_resid.weight"].T)
        normed = rms(x, ONE, FLOAT32_EPS)
        inner = silu(normed @ of["mlp.mlp_gate.weight"].T) * (normed @ of["mlp.mlp_linear.weight"].T)
        x = x + of["mlp_gain.a_g"] * (inner @ of["mlp.mlp_resid.weight"].T) + of["embed_skip.a_g"] * start
    return rms(x, ONE, FLOAT32_EPS) @ (w["lm_head"] * w["lm_head_gain.w_g"]).T


def exact(name: str) -> dict[str, F64]:
    return {tensor: x.astype(np.float64) for tensor, x in tensors_of(name).items()}


@pytest.mark.parametrize("shared", [8, 4, 40, 1])
def test_logits_of_plamo(shared: int, tmp_path: Path) -> None:
    """Query head i reads KV head i % KV heads, for any number of KV heads. llama.cpp's converter supports only 40 query
    heads and 5 KV heads.
    """
    given = tensors_of("plamo")
    for name in [name for name in given if "k_proj" in name or "v_proj" in name]:
        given[name] = numbers(name, [160 // shared, 160], 0.0)
    expected = plamo({name: x.astype(np.float64) for name, x in given.items()}, ids(), 2, 40, shared, 1e-6)
    with open_checkpoint(write("plamo", tmp_path, given, n_shared_head=shared)) as model:
        assert model.metadata["plamo.attention.head_count_kv"] == 40 // shared
        assert nmse(logits_of(model, ids()), expected).max() < 1e-10


def test_a_unigram_vocabulary_of_plamo_falls_back_to_bytes(tmp_path: Path) -> None:
    """PLaMo's unigram vocabulary converts to SentencePiece BPE keys with byte fallback, as in llama.cpp.

    As a T5 vocabulary, it would add EOS to every prompt.
    """
    with open_checkpoint(write("plamo", tmp_path)) as model:
        theirs = model.metadata
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(spm_file(spm_pieces(VOCABULARY, [TEXT]), model=UNIGRAM))
    with open_checkpoint(tmp_path) as model:
        assert len(model.notes) == 1
        assert model.notes[0].startswith("tokenizer.model is a unigram model; the file merges its pieces by score")
        tokenizer = Tokenizer.from_metadata(model.metadata)
        for key in ("model", "tokens", "token_type"):
            np.testing.assert_array_equal(model.metadata[f"tokenizer.ggml.{key}"], theirs[f"tokenizer.ggml.{key}"])
        ours = model.metadata["tokenizer.ggml.scores"]  # except the scores of <unk>, <s> and </s>
        np.testing.assert_array_equal(ours[3:], theirs["tokenizer.ggml.scores"][3:])
    found = tokenizer.encode("犬")
    assert found == [1, VOCABULARY - 1, *(3 + byte for byte in "犬".encode())]


def test_logits_of_talkie(tmp_path: Path) -> None:
    with open_checkpoint(write("talkie", tmp_path)) as model:
        assert nmse(logits_of(model, ids()), talkie(exact("talkie"), ids(), 2, 4)).max() < 1e-10


@pytest.mark.parametrize("name", ["neo-bert", "neo-bert-rank"])
def test_rows_and_scores_of_neo_bert(name: str, tmp_path: Path) -> None:
    given = exact(name)
    expected = neo_bert(given, ids(), 2, 4, 1e-5)
    with open_checkpoint(write(name, tmp_path)) as model:
        config, rows, pooler = embedded(model)
    assert nmse(rows, expected).max() < 1e-10
    if name == "neo-bert":
        assert config.pooling == "cls"
        assert nmse(pooler(rows, "cls"), expected[0]) < 1e-10
    else:
        inner = np.tanh(expected[0] @ given["dense.weight"].T + given["dense.bias"])
        scores = inner @ given["classifier.weight"].T + given["classifier.bias"]
        assert nmse(pooler(rows, "rank"), scores) < 1e-10
        assert model.metadata["neo-bert.classifier.output_labels"] == ["no", "maybe", "yes"]


def test_the_pooling_of_sentence_transformers_overrides_neo_bert_s(tmp_path: Path) -> None:
    write("neo-bert", tmp_path)
    write_modules(tmp_path, {"1": ("sentence_transformers.models.Pooling", {"pooling_mode_mean_tokens": True})})
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["neo-bert.pooling_type"] == 1
