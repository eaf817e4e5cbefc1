"""`localllm serve` with a sampler that follows plans in the prompts (`plans.py`).

    python -m tests.clients.program serve MODEL --port 0

Only the sampler differs from the real program. The prompt goes through template and tokenizer, and the engine evaluates
it. The planned answer is tokenized, and each step samples one token of it. A token that violates the answer's grammar
is an error.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from localllm.cli.main import main
from localllm.model import Model
from localllm.options import SamplingOptions
from localllm.sampling.repetition import Breakers
from localllm.sampling.sampler import Sampler
from localllm.template.formats import find_format
from tests.clients.plans import answer_to


class Planned(Sampler):
    """A sampler that returns the tokens of the planned answer and ignores the logits."""

    def __init__(self, options: SamplingOptions, model: Model) -> None:
        super().__init__(options)
        self._model = model
        self._left: list[int] | None = None  # remaining tokens of the answer in reverse order

    @property
    def required_top_k(self) -> int:
        return 0

    def sample(self, logits: NDArray[np.float32]) -> int:
        if self._left is None:
            tokenizer = self._model.tokenizer
            prompt = tokenizer.decode(self._history, special=True)
            text = answer_to(prompt, find_format(self._model.template[0].source))
            assert tokenizer.eos is not None
            self._left = [*tokenizer.encode(text, add_special=False, parse_special=True), tokenizer.eos][::-1]
        token = self._left.pop() if self._left else int(logits.argmax())
        assert np.isfinite(logits[token]), f"the grammar does not allow {self._model.tokenizer.piece(token)!r}"
        return token


def planned(model: Model, options: SamplingOptions, breakers: Breakers | None = None) -> Sampler:
    return Planned(options, model)


if __name__ == "__main__":
    Model.sampler = planned  # type: ignore[method-assign]
    sys.exit(main())
