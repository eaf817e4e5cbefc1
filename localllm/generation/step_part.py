"""The tokens of one request in a step."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.engine import CacheSequence, Wanted
from localllm.generation.request_state import RequestState


@dataclass(slots=True)
class StepPart:
    """The tokens of one request in a step."""

    state: RequestState
    count: int
    wanted: Wanted = "last"
    prompt: bool = False  # whether the tokens are prefill tokens
    known: bool = False  # whether known tokens of the answer are verified, which count as prefill

    @property
    def sequence(self) -> CacheSequence:
        sequence = self.state.sequence
        assert sequence is not None
        return sequence
