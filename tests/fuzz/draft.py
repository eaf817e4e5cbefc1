"""Damaged draft models, and draft models with other vocabularies. With any draft model, the answer must equal
decoding without one.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import ClassVar

import localllm
from localllm.generation.speculation import costs
from localllm.options import LoadOptions, SpeculationOptions
from tests.fuzz import fence, values
from tests.fuzz.case import Case, Wrong
from tests.fuzz.gguf import (
    change_architecture,
    change_counts,
    change_key,
    change_numbers,
    change_tensor,
    change_tokenizer,
)
from tests.fuzz.image import decode
from tests.fuzz.models import bases
from tests.localllm.support import write_model

PROMPT, TOKENS = "the theatre in the rain: ", 12
_CHANGES = (change_tokenizer, change_tokenizer, change_tokenizer, change_key, change_tensor, change_numbers)


class Kind:
    together: ClassVar[int] = 20
    seconds: ClassVar[float] = 60.0

    def __init__(self, home: Path) -> None:
        fence.install()
        costs.ENOUGH = 0.0  # seconds; forward passes are timed only once
        self._target = write_model(home / "target.gguf")
        self._drafts = {"same": decode(self._target.read_bytes()), **bases(home)}
        self._answer = answer(self._target, None)
        for name in ("same", "llama plain", "qwen2"):
            (home / "draft.gguf").write_bytes(self._drafts[name].encode())
            use(self._target, home / "draft.gguf", self._answer)

    def make(self, random: Random, folder: Path) -> Case:
        name = random.choice(("same", *self._drafts))
        image, changes, path = self._drafts[name].copy(), [name], folder / "draft.gguf"
        for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
            rare = (change_counts, change_architecture)
            changes.append(random.choice(rare if random.random() < 0.05 else _CHANGES)(random, image))
        data = image.encode()
        if random.random() < 0.03:
            data = values.damage(random, data, len(data) - len(image.data))
            changes.append("bytes")
        path.write_bytes(data)
        return Case(tuple(changes), lambda: use(self._target, path, self._answer))


def answer(target: Path, draft: Path | None) -> list[int | None]:
    """Return the tokens of the greedy answer."""
    who = SpeculationOptions() if draft is None else SpeculationOptions(draft, "draft")
    options = LoadOptions(ctx_size=128, threads=1, backend="cpu", speculation=who)
    with localllm.load(target, options) as model:
        return [piece.token for piece in model.generate(PROMPT, max_tokens=TOKENS, temperature=0.0)]


def use(target: Path, draft: Path, expected: list[int | None]) -> str:
    found = answer(target, draft)
    if found != expected:
        raise Wrong(f"another answer than without a draft: {found} instead of {expected}")
    return "answered"
