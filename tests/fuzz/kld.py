"""Damaged files of base logits are read row by row, as `perplexity --kl-divergence` does."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np

from localllm.evaluation import Windows
from localllm.evaluation.logits_file import HEAD, MAGIC, LogitsFile, is_logits_file, save_base
from tests.fuzz import values
from tests.fuzz.case import Case, Wrong

WINDOWS, CONTEXT, VOCABULARY = 2, 16, 51


class Kind:
    together: ClassVar[int] = 500
    seconds: ClassVar[float] = 20.0

    def __init__(self, home: Path) -> None:
        windows = Windows(np.arange(WINDOWS * CONTEXT, dtype=np.int32).reshape(WINDOWS, CONTEXT) % VOCABULARY)
        noise = np.random.RandomState(1).standard_normal((WINDOWS * windows.scored, VOCABULARY)).astype(np.float32)
        with save_base(home / "base", windows, VOCABULARY) as keep:
            keep(noise - np.log(np.exp(noise).sum(axis=1, keepdims=True)))
        self._good = (home / "base").read_bytes()

    def make(self, random: Random, folder: Path) -> Case:
        data, changes = self._good, []
        if random.random() < 0.6:
            at = len(MAGIC) + 4 * random.randrange(3)
            new = random.choice((0, 1, 2, 4, 5, 15, 16, 17, 50, 52, values.integer(random)))
            data = data[:at] + struct.pack("<I", new % 2**32) + data[at + 4 :]
            changes.append(f"head at {at} = {new}")
        if random.random() < 0.3:
            at, new = HEAD + 4 * random.randrange(WINDOWS * CONTEXT), values.integer(random)
            data = data[:at] + struct.pack("<I", new % 2**32) + data[at + 4 :]
            changes.append(f"token at {at} = {new}")
        if random.random() < 0.5 or not changes:
            data = values.damage(random, data, random.choice((HEAD, None)))
            changes.append("bytes")
        (folder / "base").write_bytes(data)
        return Case(tuple(changes), lambda: use(folder / "base"))


def use(path: Path) -> str:
    if not is_logits_file(path):
        return "no such file"
    base = LogitsFile(path)
    try:
        tokens, scored = base.windows.tokens, base.windows.scored
        if not 0 <= tokens.min() <= tokens.max() < base.vocabulary:
            raise Wrong("tokens outside of the vocabulary")
        for window in range(min(len(tokens), 50)):
            for start in range(0, scored, 5):
                stop = min(start + 5, scored)
                if base.log_probabilities(window, start, stop).shape != (stop - start, base.vocabulary):
                    raise Wrong(f"window {window}: rows of another shape")
    finally:
        base.close()
    return "read"
