"""`localllm embed`: embeddings of texts, or scores of documents for a query, on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm import load
from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import read_text
from localllm.base.printable import printable
from localllm.cli.commands.splitting import splitting
from localllm.cli.options import EmbedOptions, OpeningOptions
from localllm.cli.terminal.answer import tell
from localllm.cli.terminal.console import LoadProgress


def embed(own: EmbedOptions, name: str, given: Sequence[str], opening: OpeningOptions) -> None:
    """Print a line for every text: its embedding or its score."""
    texts = _texts(own, given)
    if own.query and own.pooling not in ("auto", "rank"):
        raise LocalLLMError(f"--query ranks documents; it goes with --pooling rank, not {own.pooling}")
    with splitting(opening.machines) as split:
        with LoadProgress() as progress:
            model = load(name, opening.options, progress=progress, embeddings=True, split=split)
        with model:
            tell(model)
            results: Sequence[NDArray[np.float32]]
            if own.query:
                results = list(model.rank(own.query, texts)[:, None])
            elif model.embedder.pooling(own.pooling) == "none":
                results = [model.token_embeddings(text) for text in texts]
            else:
                results = list(model.embed(texts, pooling=own.pooling, normalize=not own.no_normalize))
    _print(own, name, texts, results)


def _texts(own: EmbedOptions, given: Sequence[str]) -> list[str]:
    """Return the texts on the command line, then the lines of a file or of stdin."""
    texts = list(given)
    if own.file:
        texts += read_text(own.file).splitlines()
    elif not texts and not sys.stdin.isatty():
        texts = sys.stdin.read().splitlines()
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise LocalLLMError("no text: give texts after MODEL, or one per line with -f FILE or through a pipe")
    return texts


def _print(own: EmbedOptions, name: str, texts: Sequence[str], results: Sequence[NDArray[np.float32]]) -> None:
    if own.json:
        key = "score" if own.query else "embedding"
        found = [
            {"index": number, key: float(result[0]) if own.query else _numbers(result)}
            for number, result in enumerate(results)
        ]
        print(json.dumps({"model": name, "data": found}))
        return
    for text, result in zip(texts, results, strict=True):
        if own.query:
            print(f"{result[0]:.6f}\t{printable(text)}")
            continue
        for row in result.reshape(-1, result.shape[-1]):
            print(" ".join([f"{number:.6f}" for number in row.tolist()]))


def _numbers(result: NDArray[np.float32]) -> object:
    return [_numbers(row) for row in result] if result.ndim > 1 else [round(x, 8) for x in result.tolist()]
