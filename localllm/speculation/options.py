"""What is asked of speculation, checked when it is set; nothing else is loaded for it."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.errors import LocalLLMError

KINDS = ("off", "ngram", "draft", "auto")
MOST_DRAFTED = 15  # with the token before them, 16 rows: what the costs are measured for


class SpeculationError(LocalLLMError):
    """Speculation cannot be had as it was asked for."""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """`kind` is who guesses: nobody, the text so far (ngram), the draft model, or whichever pays (auto)."""

    kind: str = "off"
    draft: str = ""  # GGUF file of the draft model, or a model in the box
    longest: int = MOST_DRAFTED  # tokens guessed in one go at most

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpeculationError(f"speculation is {self.kind!r}: it can be {', '.join(KINDS)}")
        if not 1 <= self.longest <= MOST_DRAFTED:
            raise SpeculationError(f"{self.longest} drafted tokens: give 1 to {MOST_DRAFTED}")
        if self.kind == "draft" and not self.draft:
            raise SpeculationError("speculation with a draft model needs one: give it (-md FILE), or use ngram")
        if self.draft and self.kind == "ngram":
            raise SpeculationError("a draft model is given, but n-grams alone are to draft: use draft or auto")

    @staticmethod
    def of(kind: str | None, draft: str, longest: int = MOST_DRAFTED) -> SpeculationOptions:
        """With a draft model and no `kind`, what pays; with neither, nothing."""
        return SpeculationOptions(kind or ("auto" if draft else "off"), draft, longest)
