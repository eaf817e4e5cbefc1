"""Options of speculative decoding."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from localllm.base.notices import FILE, Notice, Setting
from localllm.options.declare import Options, option
from localllm.options.kinds import PATH, OptionError, integer, one_of

KINDS = ("off", "ngram", "draft", "mtp", "auto")
MOST_DRAFTED = 15  # a verify pass has one token more, and costs are measured up to 16 tokens


@dataclass(frozen=True, slots=True)
class SpeculationOptions(Options):
    """Which drafter to use, and how many tokens to draft."""

    TITLE: ClassVar[str] = "Speculation"
    model_draft: str | os.PathLike[str] = option(
        "", "-md", "--model-draft", "--spec-draft-model",
        help="a smaller model that drafts tokens, or a file of prediction heads", kind=PATH, metavar="MODEL",
        offers="models",
    )  # fmt: skip
    spec: str | None = option(
        None, "--spec", kind=one_of(*KINDS, nothing=None), metavar="KIND",
        help=Notice(
            "drafter: off, ngram (the text so far), draft (", Setting("model_draft"), "), mtp (the model's own "
            "prediction heads), or auto (whichever makes the answer faster)"
        ),
        shown="auto",
    )  # fmt: skip
    draft_max: int = option(
        MOST_DRAFTED, "--draft-max", "--draft", "--draft-n",
        help=f"maximum number of drafted tokens per pass, up to {MOST_DRAFTED}", kind=integer(1), unit="tokens",
    )  # fmt: skip
    draft_earlier: int = option(
        0, "--draft-earlier", kind=integer(0), unit="tokens",
        help="also draft from this many tokens of earlier answers (0: none)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.spec == "draft" and not self.model_draft:
            raise OptionError(
                Notice(
                    "speculation with a draft model requires one: give it (", Setting("model_draft", FILE),
                    "), or use ngram",
                )
            )  # fmt: skip
        if self.model_draft and self.spec == "ngram":
            raise OptionError("a draft model was given, but ngram does not use it: use draft or auto")

    @property
    def may_use_head(self) -> bool:
        """Whether prediction heads may draft: the model's own, or those that `model_draft` contains.

        By default, the model's own are not loaded.
        """
        return self.spec in ("mtp", "auto") or (bool(self.model_draft) and self.kind in ("auto", "draft"))

    @property
    def most_drafted(self) -> int:
        """The maximum number of drafted tokens: `draft_max`, limited to the maximum of a verify pass."""
        return min(self.draft_max, MOST_DRAFTED)

    @property
    def kind(self) -> str:
        """The drafter."""
        return self.spec or "auto"

    @property
    def asked(self) -> bool:
        """Whether drafting was asked for, rather than being the default."""
        return self.kind != "off" and bool(self.spec or self.model_draft)
