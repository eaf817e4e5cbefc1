"""What `localllm run` is asked, in one value, for the kinds of models that answer in their own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from localllm.cli.options import Display, Keeping, Opening, Run
from localllm.options import AnswerOptions, DiffusionOptions

if TYPE_CHECKING:
    from localllm.template import Family


class Asking(NamedTuple):
    """Everything that the command line asks of an answer."""

    own: Run
    prompt: str
    opening: Opening
    answering: AnswerOptions
    display: Display
    keeping: Keeping
    sampling: Mapping[str, Any]
    diffusion: DiffusionOptions
    format_: Family | None
