"""An explanation: the account of an answer, and functions that format it as text."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.explain.account import Account
from localllm.explain.text import amount
from localllm.tokenizer import Tokenizer

_ENDS = {
    "end": "an end-of-answer token",
    "stop": "a stop string",
    "length": "the limit of tokens",
    "context": "the end of the context",
    "cancelled": "Ctrl-C",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of how a model generated an answer."""

    model: str
    device: str
    question: str
    answer: str
    account: Account
    tokenizer: Tokenizer

    @property
    def ended_by(self) -> str:
        choices = self.account.record.choices
        if self.account.reason == "end" and choices and choices[-1].token not in self.tokenizer.eog:
            return "the end of the grammar"
        return _ENDS[self.account.reason]

    @property
    def roofs(self) -> str:
        """The measured limits as a sentence."""
        roofs = self.account.roofs
        told = [f"memory {amount(roofs.bytes, 'B/s')}" if roofs.bytes else ""]
        told.append(f"arithmetic {amount(roofs.operations, 'op/s')}" if roofs.operations else "")
        found = ", ".join(part for part in told if part)
        return f"Roofs, measured before and after the answer: {found}." if found else "No roof could be measured."

    @property
    def limits(self) -> str:
        """A note about the limits that this executable cannot measure, or ""."""
        if self.account.clocked:
            return ""
        return "Only the cpu backend has a clock for single operations; on this device only whole passes are timed."

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, including control tokens; "<media>" for a token of a picture or a sound."""
        return self.tokenizer.piece(token) if token >= 0 else b"<media>"

    def is_control(self, token: int) -> bool:
        return token < 0 or self.tokenizer.is_control(token)
