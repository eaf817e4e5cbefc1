"""Logits are bitwise identical on every processor: x86 with AVX-512, and Arm with and without dot products,
give one digest.
"""

from __future__ import annotations

import hashlib

import localllm

TEXT = "Once upon a time there was a little bird who wanted to book a table for two."
LOGITS = "0b454677a4670ea0c27e440a9bdee1bf"  # changes if the arithmetic changes, in the same way on all processors


def test_the_logits_of_the_model_in_the_box_are_those_of_other_processors() -> None:
    with localllm.load("demo", threads=2) as model:
        found = model.logits(model.tokenize(TEXT) * 4)
    assert hashlib.sha256(found.tobytes()).hexdigest()[:32] == LOGITS
