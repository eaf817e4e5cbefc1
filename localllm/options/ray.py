"""Options for running a model on several machines, or in several processes (`localllm.distributed`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from localllm.options.declare import Options, option
from localllm.options.kinds import Kind, OptionError, checked, integer

AUTO = "auto"
MOST_STAGES = 64


def is_address(text: str) -> bool:
    """Return whether `text` is HOST:PORT."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})", text)
    return found is not None and 0 < int(found[2]) < 1 << 16


def _addresses(*words: str) -> Kind:
    """Return a kind for HOST:PORT, and for some words instead."""
    said = " or ".join([*words, "HOST:PORT, such as 192.168.1.7:7380"])

    def read(text: str) -> str:
        if text not in words and not is_address(text):
            raise OptionError(f"{text!r} is not {said}")
        return text

    def allows(value: object) -> bool:
        return isinstance(value, str) and (value in ("", *words) or is_address(value))

    return Kind(read, checked(allows, said), "|".join([*words, "HOST:PORT"]))


ADDRESS, HOST_AND_PORT = _addresses(AUTO), _addresses()


def _stages(text: str) -> int | str:
    try:
        return text if text == AUTO else int(integer(1, MOST_STAGES).read(text))
    except OptionError:
        raise OptionError(f"{text!r} is not a number of stages from 1 to {MOST_STAGES}, or auto") from None


STAGES = Kind(
    _stages,
    checked(
        lambda value: value in ("", AUTO) or not integer(1, MOST_STAGES).problem(value),
        f"a number of stages from 1 to {MOST_STAGES}, or auto",
    ),
    "N",
)


@dataclass(frozen=True, slots=True)
class RayOptions(Options):
    """Where the layers of a model run."""

    TITLE: ClassVar[str] = "Several machines"
    ray: str = option(
        "", "--ray", kind=ADDRESS,
        help="use the machines of a Ray cluster: its address, or auto for the cluster that this machine belongs to",
    )  # fmt: skip
    stages: int | str = option(
        "", "--stages", kind=STAGES,
        help="with --ray: split the layers into N stages, or into the fastest number (auto, the default)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.stages and not self.ray:
            raise OptionError(f"--stages {self.stages} needs --ray auto or --ray HOST:PORT")

    @property
    def number(self) -> int:
        """The number of stages; 0: the fastest number."""
        return self.stages if isinstance(self.stages, int) else 0
