"""Messages name options as Python arguments by default, and as command-line flags on request."""

from __future__ import annotations

import pickle

import pytest

from localllm.base.notices import FILE, N, Notice, Setting, Together, Written, said


def spell(setting: Setting) -> str:
    flag = f"--{setting.name}"
    return flag if setting.value is None or setting.value is True else f"{flag} {setting.value}"


@pytest.mark.parametrize(
    ("setting", "python", "typed"),
    [
        (Setting("backend", "cpu"), 'backend="cpu"', "--backend cpu"),
        (Setting("gpu_layers", 40), "gpu_layers=40", "--gpu_layers 40"),
        (Setting("ctx_size", N), "ctx_size=N", "--ctx_size N"),
        (Setting("imatrix", FILE), "imatrix=FILE", "--imatrix FILE"),
        (Setting("force", True), "force=True", "--force"),
        (Setting("threads"), "threads", "--threads"),
    ],
)
def test_an_option_is_written_in_two_ways(setting: Setting, python: str, typed: str) -> None:
    message = Notice("use ", setting, "; or not")
    assert message == f"use {python}; or not"
    assert message.typed(spell) == f"use {typed}; or not"


def test_options_to_give_together_and_values_written_differently() -> None:
    both = Together((Setting("cache_type_k", "q8_0"), Setting("cache_type_v", "q8_0")))
    message = Notice(both, ": ", Written("None", "-1"))
    assert message == 'cache_type_k="q8_0", cache_type_v="q8_0": None'
    assert message.typed(spell) == "--cache_type_k q8_0 --cache_type_v q8_0: -1"


def test_a_message_in_a_message_and_in_an_error_keeps_its_options() -> None:
    inner = Notice("raise ", Setting("ctx_size"))
    assert Notice("file: ", inner).typed(spell) == "file: raise --ctx_size"
    assert Notice("file: ", said(ValueError(inner))).typed(spell) == "file: raise --ctx_size"
    assert said(ValueError("plain")) == "plain"
    assert said(ValueError()) == ""


def test_a_message_survives_pickling() -> None:
    message = Notice("use ", Setting("backend", "cpu"))
    again = pickle.loads(pickle.dumps(message))
    assert (again, again.typed(spell)) == (message, "use --backend cpu")
