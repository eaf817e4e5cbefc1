"""Measure the quality of a model on a text: perplexity, and the divergence of its distributions from a base model's.

`cut_windows` splits a text into windows, a `ModelSource` or a `LogitsFile` provides log probabilities, `evaluate`
scores the windows, and `statistics` summarizes the scores.
"""

from __future__ import annotations

from localllm.evaluation.likelihood import Mean, Scores, compare, log_softmax, score, statistics
from localllm.evaluation.logits_file import LogitsFile, save_base
from localllm.evaluation.windows import (
    LogitsSource,
    ModelSource,
    TextTooShort,
    Windows,
    cut_windows,
    evaluate,
    strided_size,
)

__all__ = [
    "LogitsFile",
    "LogitsSource",
    "Mean",
    "ModelSource",
    "Scores",
    "TextTooShort",
    "Windows",
    "compare",
    "cut_windows",
    "evaluate",
    "log_softmax",
    "save_base",
    "score",
    "statistics",
    "strided_size",
]
