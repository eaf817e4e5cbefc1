"""Options of speculation, checked when set. This module loads nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.errors import LocalLLMError

KINDS = ("off", "ngram", "draft", "auto")
MOST_DRAFTED = 15  # 16 rows with the token before them, the number that costs are measured for


class SpeculationError(LocalLLMError):
    """Speculation is not possible as requested."""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """`kind` is the drafter: off, ngram (the text so far), draft (the draft model), or auto (whichever pays)."""

    kind: str = "off"
    draft: str = ""  # GGUF file of the draft model, or a built-in model
    longest: int = MOST_DRAFTED  # maximum tokens drafted at a time

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpeculationError(f"unknown kind of speculation {self.kind!r}; supported: {', '.join(KINDS)}")
        if not 1 <= self.longest <= MOST_DRAFTED:
            raise SpeculationError(f"{self.longest} drafted tokens: give 1 to {MOST_DRAFTED}")
        if self.kind == "draft" and not self.draft:
            raise SpeculationError("speculation with a draft model requires one: give it (-md FILE), or use ngram")
        if self.draft and self.kind == "ngram":
            raise SpeculationError("a draft model was given, but ngram does not use it: use draft or auto")

    @staticmethod
    def of(kind: str | None, draft: str, longest: int = MOST_DRAFTED) -> SpeculationOptions:
        """The options for these arguments: without `kind`, auto with a draft model, otherwise off."""
        return SpeculationOptions(kind or ("auto" if draft else "off"), draft, longest)
