"""Options of text diffusion, with the names and values of llama-diffusion-cli (llama.cpp's common/arg.cpp, 2026-10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from localllm.base.notices import Notice, Setting
from localllm.options.declare import Options, option
from localllm.options.kinds import Kind, OptionError, checked, integer, number, optional

ALGORITHMS = ("origin", "entropy", "margin", "random", "confidence")  # llama.cpp's order: its numbers also work
STEPS = 128
EPS = 0.001  # default of the time schedule, as in the reference implementations
BLOCK_LENGTH = 32  # default of the block schedule, as in the reference implementations
CANVAS = 512  # default for the total number of prompt and answer tokens


def _algorithm(text: str) -> str:
    if text in ALGORITHMS:
        return text
    if text.isdecimal() and int(text) < len(ALGORITHMS):
        return ALGORITHMS[int(text)]
    raise OptionError(f"{text!r} is not one of {', '.join(ALGORITHMS)}")


def _known(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in ALGORITHMS)


_ALGORITHM = Kind(_algorithm, checked(_known, f"one of {', '.join(ALGORITHMS)}"), "NAME")
_AMOUNT = optional(number(float, lambda value: 0 <= value < 1e6, "a number from 0 to 1000000"))
_EPS = optional(number(float, lambda value: 0 < value < 1, "a number above 0 and below 1"))


@dataclass(frozen=True, slots=True)
class DiffusionOptions(Options):
    """How a text diffusion model denoises its canvas. None means the default."""

    TITLE: ClassVar[str] = "Diffusion"
    diffusion_steps: int | None = option(
        None, "--diffusion-steps", kind=optional(integer(1)), shown=str(STEPS), help="number of denoising steps"
    )
    diffusion_algorithm: str | None = option(
        None, "--diffusion-algorithm", kind=_ALGORITHM, shown="confidence",
        help="which tokens to fix first: the most confident by confidence, entropy or margin, or any (random, origin)",
    )  # fmt: skip
    diffusion_eps: float | None = option(
        None, "--diffusion-eps", kind=_EPS, shown=f"{EPS}, or blocks", metavar="N",
        help="fix tokens anywhere; masked share at the last step",
    )  # fmt: skip
    diffusion_block_length: int | None = option(
        None, "--diffusion-block-length", kind=optional(integer(1)), shown=f"{BLOCK_LENGTH} for LLaDA",
        help="fix blocks of this size, from left to right",
    )  # fmt: skip
    diffusion_alg_temp: float | None = option(
        None, "--diffusion-alg-temp", kind=_AMOUNT, shown="0",
        help="temperature for choosing the tokens to fix (0: the most confident)",
    )  # fmt: skip
    diffusion_cfg_scale: float | None = option(
        None, "--diffusion-cfg-scale", kind=_AMOUNT, shown="0",
        help="strength of classifier-free guidance (0: off; otherwise two passes per step)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.diffusion_eps is not None and self.diffusion_block_length is not None:
            both = Setting("diffusion_eps"), " and ", Setting("diffusion_block_length")
            raise OptionError(Notice(*both, " exclude each other; give one"))

    @property
    def given_names(self) -> list[str]:
        """The names of the options that were given, in order of declaration."""
        return [name for name, value in self.values().items() if value is not None]
