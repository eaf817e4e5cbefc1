"""Text embeddings and reranking scores, from Python and from the command line, equal the results of the
reference backend.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import CacheTypes, Limits
from localllm.backends.reference import ReferenceBackend
from localllm.base.notices import NotUsed
from localllm.engine import ContextFull
from localllm.gguf import open_gguf
from localllm.gguf.writer import NewTensor, write_gguf
from localllm.model import Model
from tests.localllm.support import localllm as program
from tests.localllm.support import write_model
from tests.models.kit import EMBEDDERS, KitModel
from tests.models.support import Driver, nmse, open_model, plan_of
from tests.models.test_embeddings import pooler_of

LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOKENS = [*SPECIAL, *(f"\u2581{c}" for c in LETTERS), *LETTERS]
TEXTS = ["a cat", "one two three four " * 5, "z", "dogs and cats " * 3]
CLS, SEP = 2, 3


def write_embedder(path: Path, name: str, extra: dict[str, Any] | None = None, kit: KitModel | None = None) -> Path:
    """Write a test model with a WordPiece vocabulary of letters."""
    (kit or EMBEDDERS[name]).write(path)
    with open_gguf(path) as file:
        keys: dict[str, Any] = {k: v for k, v in file.stored.items() if not k.startswith("tokenizer.")}
        tensors = [
            NewTensor(n, "F32", tuple(t.shape), t.read(0, int(np.prod(t.shape[:-1]))).tobytes())
            for n, t in file.tensors.items()
        ]
    tokens = [*TOKENS, *(f"[unused{n}]" for n in range(128 - len(TOKENS)))]
    keys |= {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if t.startswith("[") else 1 for t in tokens], np.int32),
        "tokenizer.ggml.bos_token_id": CLS,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": SEP,
        **(extra or {}),
    }
    write_gguf(path, keys, tensors, overwrite=True)
    return path


def write_t5(path: Path, name: str = "t5encoder", kit: KitModel | None = None) -> Path:
    """Write a test model with T5's type of vocabulary: a score for every token, and EOS after every text."""
    tokens = ["<pad>", "</s>", "<unk>", "\u2581", *LETTERS, *(f"\u2581{c}" for c in LETTERS)]
    tokens += [f"<extra_id_{n}>" for n in range(128 - len(tokens))]
    kinds = {"<pad>": 3, "</s>": 3, "<unk>": 2}
    return write_embedder(path, name, {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([kinds.get(t, 4 if "extra" in t else 1) for t in tokens], np.int32),
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32) / 16,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }, kit)  # fmt: skip


def load(path: Path, **options: Any) -> Model:
    return localllm.load(path, cache_type_k="f32", cache_type_v="f32", **options)


def expected(path: Path, ids: list[int], pooling: str) -> np.ndarray:
    metadata, tensors = open_model(path)
    limits = Limits(rows=256, logit_rows=256, blocks=4, positions=256)
    plan = plan_of(metadata, tensors, embeddings=True)
    rows = Driver(ReferenceBackend().bind(plan, limits, CacheTypes("f32", "f32"))).step([(0, ids)])
    found: np.ndarray = pooler_of(metadata, tensors)(rows, pooling)  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("embedders")
    names = ("bert-mean", "bert-rank", "gemma-embedding", "qwen3-embedding")
    written = {name: write_embedder(folder / f"{name}.gguf", name) for name in names}
    return written | {"t5encoder": write_t5(folder / "t5encoder.gguf")}


@pytest.mark.parametrize(
    ("name", "pooling", "backend"),
    [
        ("bert-mean", "mean", "cpu"),
        ("bert-mean", "mean", "opencl"),
        ("gemma-embedding", "mean", "cpu"),
        ("qwen3-embedding", "last", "cpu"),
        ("t5encoder", "mean", "cpu"),
        ("t5encoder", "mean", "opencl"),
    ],
)
def test_texts_are_pooled_as_the_file_says(files: dict[str, Path], name: str, pooling: str, backend: str) -> None:
    with load(files[name], embeddings=True, backend=backend) as model:
        ours, raw = model.embed(TEXTS), model.embed(TEXTS, normalize=False)
        for text, vector, long in zip(TEXTS, ours, raw, strict=True):
            theirs = expected(files[name], model.tokenize(text), pooling)
            assert nmse(long, theirs) < 1e-6
            np.testing.assert_allclose(vector, theirs / np.linalg.norm(theirs), rtol=0, atol=1e-4)
            assert np.array_equal(model.embed(text), vector)  # embedded without other texts, with the same bits
        rows = model.token_embeddings(TEXTS[0])
        assert rows.shape == (len(model.tokenize(TEXTS[0])), 128)
        first = model.embed(TEXTS[0], pooling="cls", normalize=False)
        np.testing.assert_array_equal(first, rows[0])


def test_a_query_ranks_documents(files: dict[str, Path]) -> None:
    with load(files["bert-rank"]) as model:
        scores = model.rank("a cat", ["dogs", "cats and dogs"])
        ids = model.tokenize("a cat")
        assert ids[0] == CLS
        assert ids[-1] == SEP
        for score, document in zip(scores, ["dogs", "cats and dogs"], strict=True):
            pair = [*ids, *model.tokenize(document)[1:]]
            assert score == pytest.approx(expected(files["bert-rank"], pair, "rank")[0], rel=1e-3)
        both = model.embed(["a cat", "dogs"])
        assert both.shape == (2, 1)


def test_a_template_of_the_file_joins_query_and_document(tmp_path: Path) -> None:
    """The text of a query or document cannot insert special tokens or template variables."""
    template = {"tokenizer.chat_template.rerank": "[CLS]{query}[SEP]{document}[MASK]"}
    path = write_embedder(tmp_path / "m.gguf", "bert-rank", template)
    with load(path) as model:
        query, document = "a {document}", "b[MASK]c"
        ids = [CLS, *model.tokenize(query, False), SEP, *model.tokenize(document, False), 4]
        assert model.rank(query, [document])[0] == pytest.approx(expected(path, ids, "rank")[0], rel=1e-3)


def test_long_texts(files: dict[str, Path]) -> None:
    """An encoder evaluates a text in one step, or rejects a text that is too long. Other models take several steps."""
    with load(files["bert-mean"], ctx_size=70) as model:
        text = "abcdefgh" * 8
        assert (
            nmse(model.embed(text, normalize=False), expected(files["bert-mean"], model.tokenize(text), "mean")) < 1e-6
        )
        with pytest.raises(
            ContextFull, match=r"^text 2 has 82 tokens, but the context holds 70; shorten it or raise ctx_size"
        ):
            model.embed(["a", "abcdefgh" * 10])
    with load(files["qwen3-embedding"], embeddings=True) as model:
        whole = model.embed("abcdefgh" * 20)
        model.engine.limits = Limits(rows=50, logit_rows=50, blocks=9, positions=256)
        np.testing.assert_array_equal(model.embed("abcdefgh" * 20), whole)


def test_wrong_requests(files: dict[str, Path], tmp_path: Path) -> None:
    with load(files["bert-mean"]) as model:
        for call, text in (
            (lambda: model.embed([]), "embed needs at least one text, got none"),
            (
                lambda: model.embed("a", pooling="best"),
                "pooling 'best' is not one of auto, none, mean, cls, last, rank",
            ),
            (lambda: model.embed("a", pooling="none"), 'pooling "none" gives a vector for every token'),
            (lambda: model.rank("a", ["b"]), 'pooling "rank" needs a classifier, which this file lacks'),
            (lambda: next(model.generate("a")), "gives embeddings, not tokens; use `localllm embed`"),
            (lambda: model.logits([1]), "gives embeddings, not tokens"),
        ):
            with pytest.raises(localllm.LocalLLMError) as error:
                call()
            assert text in str(error.value)
    predicts = pytest.raises(localllm.LocalLLMError, match=r"use localllm.load\(path, embeddings=True\)")
    with load(write_model(tmp_path / "llama.gguf")) as model, predicts:
        model.embed("a")
    with load(tmp_path / "llama.gguf", embeddings=True) as model:  # every decoder gives embeddings
        assert model.embed(["Hello", "there"]).shape == (2, model.config.width if model.config else 0)
    path = write_embedder(tmp_path / "both.gguf", "qwen3-embedding", {"qwen3.attention.causal": False})
    with load(path) as model, pytest.raises(localllm.LocalLLMError, match="its attention is bidirectional"):
        model.logits([1])


def embed(*words: object, typed: str = "") -> subprocess.CompletedProcess[str]:
    return program("embed", *words, "-ctk", "f32", "-ctv", "f32", stdin=typed)


def test_command_line(files: dict[str, Path], tmp_path: Path) -> None:
    with load(files["bert-mean"]) as model:
        theirs = model.embed(["a cat", "dogs"])
    done = embed(files["bert-mean"], "a cat", "dogs")
    assert done.returncode == 0, done.stderr
    ours = np.array([[float(x) for x in line.split()] for line in done.stdout.splitlines()])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    lines = tmp_path / "texts.txt"
    lines.write_text("a cat\n\ndogs\n")
    for done in (
        embed(files["bert-mean"], "--json", "-f", lines),
        embed(files["bert-mean"], "--json", typed="a cat\ndogs"),
    ):
        data = json.loads(done.stdout)["data"]
        np.testing.assert_allclose([own["embedding"] for own in data], theirs, rtol=0, atol=1e-6)
    done = embed(files["bert-mean"], "a", "--pooling", "none")
    assert len(done.stdout.splitlines()) == 3
    done = embed(files["bert-rank"], "--query", "cats", "a cat", "dogs\x1b[1m")
    assert [line.split("\t")[1][:4] for line in done.stdout.splitlines()] == ["a ca", "dogs"]
    assert "\x1b" not in done.stdout
    for words, problem in (
        ((files["bert-mean"],), "no text: give texts after MODEL"),
        ((files["bert-mean"], "a", "--query", "b"), 'pooling "rank" needs a classifier'),
        ((files["bert-rank"], "a", "--query", "b", "--pooling", "mean"), "--query ranks documents"),
        ((files["bert-mean"], "a", "--pooling", "best"), "'best' is not one of auto, none"),
    ):
        done = embed(*words)
        assert (done.stdout, done.returncode > 0) == ("", True)
        assert problem in done.stderr
        assert "Traceback" not in done.stderr


def test_a_context_beyond_the_embedded_positions_is_clamped_with_a_note(tmp_path: Path) -> None:
    """llama-server limits the context to the trained length."""
    path = write_embedder(tmp_path / "m.gguf", "bert-mean")
    with pytest.warns(NotUsed, match="ctx_size=5000: the model has only 256 position embeddings"):
        model = localllm.load(path, ctx_size=5000)
    with model, localllm.load(path) as usual:
        assert model.context == 256
        assert (model.embed("abc") == usual.embed("abc")).all()
