"""The pooling head: pools the hidden states of a text into one vector, then applies the GGUF's head matrices.

A classifier turns the vector into scores (rerankers); dense layers transform it (EmbeddingGemma).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.models.architecture import Architecture
from localllm.models.config import Config, Pooling
from localllm.models.errors import ModelError
from localllm.models.tensors import Tensors
from localllm.plan import Tensor, Weight

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
_MAX_FEATURES = 1 << 16  # maximum rows of a dense layer; known models have 3072
_MAX_LABELS = 1 << 16  # maximum scores of a classifier; known models have 1 or 2


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """The matrices after pooling; None if the GGUF lacks them. A classifier has at least one of the first two."""

    classifier: Weight | None  # (rows, width)
    output: Weight | None  # (labels, rows of the classifier, or width)
    classifier_bias: Weight | None = None
    classifier_norm: Weight | None = None
    output_bias: Weight | None = None
    dense: tuple[Weight, ...] = ()

    @classmethod
    def read(cls, config: Config, tensors: Tensors) -> PoolingHead:
        """Read the head of a model; raise ModelError for a tensor of unexpected shape."""
        classifier, bias = _layer(tensors, "cls", config.width, config.width)
        rows = 0 if classifier is None else classifier.shape[0]
        output, output_bias = _layer(tensors, "cls.output", rows or config.width, _MAX_LABELS)
        norm = tensors.optional("cls.norm.weight", rows) if rows else None
        return cls(classifier, output, bias, norm, output_bias, _dense(config, tensors))

    @classmethod
    def of(cls, config: Config, architecture: Architecture, tensors: Mapping[str, Tensor]) -> PoolingHead:
        return cls.read(config, Tensors(tensors, architecture.ignored))

    @property
    def ranks(self) -> bool:
        """Whether the head has a classifier."""
        return self.classifier is not None or self.output is not None


def _layer(tensors: Tensors, name: str, width: int, most: int) -> tuple[Weight | None, Weight | None]:
    """Return the matrix and the bias of a layer of at most `most` rows; None if the GGUF lacks them."""
    matrix = f"{name}.weight"
    rows = tensors.height(matrix)
    if rows > most:
        raise ModelError(f"{matrix}: expected at most {most} rows, found {rows}")
    if matrix not in tensors:
        return None, None
    weight = tensors.matrix(matrix, rows, width) if rows else tensors.row(matrix, width)
    return weight, tensors.optional(f"{name}.bias", rows or 1)


def _dense(config: Config, tensors: Tensors) -> tuple[Weight, ...]:
    found, width = [], config.width
    for name in ("dense_2.weight", "dense_3.weight"):
        rows = tensors.height(name)
        if rows > _MAX_FEATURES:
            raise ModelError(f"{name}: expected at most {_MAX_FEATURES} rows, found {rows}")
        if rows:
            found.append(tensors.matrix(name, rows, width))
            width = rows
    return tuple(found)


class Pooler:
    """Pools the hidden states of a text into one vector, as the model specifies."""

    def __init__(self, config: Config, head: PoolingHead) -> None:
        self._config, self.ranks = config, head.ranks
        self._dense = [_values(weight) for weight in head.dense]
        self._classifier, self._output = _given(head.classifier), _given(head.output)
        self._classifier_bias, self._output_bias = _given(head.classifier_bias), _given(head.output_bias)
        self._classifier_norm = _given(head.classifier_norm)

    def __call__(self, rows: F32, pooling: Pooling) -> F32:
        """Return one float32 vector for hidden states (T, width): an embedding, or scores if `pooling` is "rank".

        With "none", return a vector per token, (T, width).
        """
        x = _pooled(rows.astype(np.float64), self._config.classifier_pooling if pooling == "rank" else pooling)
        if pooling == "rank":
            x = self._scores(x)
        for matrix in self._dense if pooling != "rank" else ():
            x = x @ matrix.T
        return x.astype(np.float32)

    def _scores(self, x: F64) -> F64:
        """Return the classifier's scores, one per label; some rerankers return probabilities."""
        modern = self._config.architecture == "modern-bert"
        if self._classifier is not None:
            x = _plus(self._classifier @ x, self._classifier_bias)
            x = _gelu(x) if modern else np.tanh(x)
            if self._classifier_norm is not None:
                x = x - x.mean()
                x = x / np.sqrt((x * x).mean() + self._config.eps) * self._classifier_norm
        if self._output is not None:
            x = _plus(self._output @ x, self._output_bias)
        if self._config.architecture in _PROBABILITIES:
            x = np.exp(x - x.max())
            x = x / x.sum()
        return x


_PROBABILITIES = ("qwen3", "qwen3vl")  # rerankers whose scores are logits of "yes" and "no"


def unit(x: F32) -> F32:
    """Return x (..., width) divided by its L2 norm; zero vectors stay zero."""
    length = np.sqrt((x.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
    return np.asarray(x / np.where(length > 0.0, length, 1.0), np.float32)


def _pooled(rows: F64, pooling: Pooling) -> F64:
    match pooling:
        case "none":
            return rows
        case "mean":
            return np.asarray(rows.mean(axis=0))
        case "cls":
            return np.asarray(rows[0])
        case "last":
            return np.asarray(rows[-1])
    raise AssertionError(f"{pooling} gives no vector")


def _gelu(x: F64) -> F64:
    return np.asarray(0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * x * (1.0 + 0.044715 * x * x))))


def _plus(x: F64, bias: F64 | None) -> F64:
    return x if bias is None else x + bias.reshape(-1)


def _given(weight: Weight | None) -> F64 | None:
    return None if weight is None else _values(weight)


def _values(weight: Weight) -> F64:
    """Return the float64 values of a matrix (rows, columns), or of a vector (width,)."""
    rows = weight.shape[0] if len(weight.shape) > 1 else 1
    values = quant.dequantize(weight.read(0, rows), weight.format).astype(np.float64)
    return values if len(weight.shape) > 1 else values[0]
