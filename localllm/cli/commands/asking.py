"""The options of a command that answers (chat, run and explain) as one value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.cli.options import DisplayOptions, FormatOptions, KeepingOptions, OpeningOptions
from localllm.cli.terminal.console import YELLOW, say
from localllm.options import AnswerOptions, DiffusionOptions

if TYPE_CHECKING:
    from localllm.template import Family


Own = TypeVar("Own")


class Asking(NamedTuple, Generic[Own]):
    """The options of a request, from the command line and the configuration."""

    where: Mapping[str, str]  # source of each option that is not on the command line
    own: Own  # the options that only this command has
    prompt: str
    opening: OpeningOptions
    answering: AnswerOptions
    display: DisplayOptions
    keeping: KeepingOptions
    sampling: Mapping[str, Any]
    diffusion: DiffusionOptions
    format_: Family | None  # replaces the chat template
    first_messages: Sequence[Mapping[str, str]]  # the beginning of every conversation

    def leave_out(self, names: Collection[str], problem: str, on: str) -> None:
        """Reject options that do not fit the model if the user typed them. If they are configured, print a note.

        Raise LocalLLMError with `problem` and the first option that was typed. A configured option must not prevent the
        use of models that it does not fit, so a note reports that it has no effect (`on` names the subject).
        """
        for name in names:
            if name not in self.where:
                raise LocalLLMError(Notice(f"{problem}; leave ", Setting(name), " out"))
        for name in names:
            say(Notice("note: ", Setting(name), f" ({self.where[name]}) has no effect on {on}"), YELLOW)


def asking(where: Mapping[str, str], own: Own, prompt: str, *groups: Any) -> Asking[Own]:
    """Gather the option groups of a command. The instructions are read if a file has them."""
    given = {type(each): each for each in groups}
    format_: FormatOptions = given[FormatOptions]
    return Asking(
        where,
        own,
        prompt,
        given[OpeningOptions],
        format_.answering(given[AnswerOptions]),
        given.get(DisplayOptions, DisplayOptions()),
        given[KeepingOptions],
        given[dict],
        given.get(DiffusionOptions, DiffusionOptions()),
        format_.template,
        format_.first_messages,
    )


def without_template(answering: AnswerOptions, where: Mapping[str, str]) -> None:
    """Raise LocalLLMError if the user typed instructions for a model that only continues plain text.

    If the instructions are configured, print a note that they have no effect.
    """
    if not answering.system_prompt:
        return
    name = next((each for each in ("system_prompt", "system_prompt_file") if each in where), "")
    if not name:
        raise LocalLLMError("-sys/--system-prompt needs a chat template; put the text into the prompt")
    say(Notice("note: ", Setting(name), f" ({where[name]}) has no effect on plain text"), YELLOW)
