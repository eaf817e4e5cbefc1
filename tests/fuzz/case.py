"""The interface of a fuzzer, and the two correct outcomes of a case: success, or a one-line localllm error."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar, Protocol

from localllm.backends import BackendError
from localllm.base.errors import LocalLLMError
from localllm.models import ModelError
from localllm.quant import QuantError

OURS = (LocalLLMError, ModelError, BackendError, QuantError, OSError)
_BREAKS = ("Cc", "Zl", "Zp")  # Unicode categories: control characters, line and paragraph separators


class Wrong(Exception):
    """The program accepted a case and handled it incorrectly."""


@dataclass(frozen=True, slots=True)
class Case:
    """A case whose files are written. `run` executes the code under test and returns a word for the tally."""

    changes: tuple[str, ...]
    run: Callable[[], str]


class Kind(Protocol):
    """A fuzzer. Its constructor prepares the shared files in `home`, before child processes are forked."""

    together: ClassVar[int]  # number of cases per child process
    seconds: ClassVar[float]  # time after which a case counts as hanging

    def __init__(self, home: Path) -> None: ...

    def make(self, random: Random, folder: Path) -> Case:
        """Return the next case, with its files in the empty `folder`."""
        ...


def random_of(kind: str, seed: int, number: int) -> Random:
    """Return the random generator of a case, its only source of randomness."""
    return Random(f"{kind} {seed} {number}")


def outcome(case: Case) -> tuple[bool, str]:
    """Run a case. Return whether the outcome is correct, and a word or message for it."""
    try:
        return True, case.run()
    except OURS as error:
        text = str(error)
        if not text.strip():
            return False, f"{type(error).__name__} without a message"
        if any(unicodedata.category(c) in _BREAKS for c in text):
            return False, f"message with control characters: {text!r}"
        return True, f"refused: {text}"
    except BaseException as error:
        return False, f"{_place(error)}: {type(error).__name__}: {str(error)[:300]!r}"


def _place(error: BaseException) -> str:
    """Return the file and line that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "nowhere"
    path = Path(trace.tb_frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{trace.tb_lineno}"
