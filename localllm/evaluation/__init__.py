"""Measure a model on a text: perplexity, and KL divergence from a base model.

May import: base, model.
Begin with: windows.py (`cut_windows`, `evaluate`), then likelihood.py (`statistics`).
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
