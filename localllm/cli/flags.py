"""Write options as the command line does: `--backend cpu` where a message says backend="cpu"."""

from __future__ import annotations

from localllm.base.notices import Notice, Setting, said
from localllm.cli import options, tool_options
from localllm.options import (
    AnswerOptions,
    DiffusionOptions,
    LoadOptions,
    Options,
    SamplingOptions,
    ServeOptions,
    declared,
)

_NAMED = (*vars(options).values(), *vars(tool_options).values())
_OWN = (each for each in _NAMED if isinstance(each, type) and issubclass(each, Options))
GROUPS = (
    LoadOptions,
    AnswerOptions,
    SamplingOptions,
    DiffusionOptions,
    ServeOptions,
    *(each for each in _OWN if each is not Options),
)


def typed(text: str | BaseException) -> str:
    """Return a text, or the text of an error, with options in command-line syntax."""
    text = said(text) if isinstance(text, BaseException) else text
    return text.typed(_setting) if isinstance(text, Notice) else text


def flag_of(name: str) -> str:
    """Return the flag that messages use for an option."""
    return next(each.option.flag for group in GROUPS for each in declared(group) if each.name == name)


def _setting(setting: Setting) -> str:
    flag = flag_of(setting.name)
    switch = setting.value is None or setting.value is True
    return flag if switch else f"{flag} {setting.value}"
