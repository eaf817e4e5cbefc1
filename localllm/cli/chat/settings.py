"""Options that `/set` changes and `/show` prints: sampling, answer, speculation and display options by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from localllm.base.errors import LocalLLMError
from localllm.chat import Conversation
from localllm.cli.app import nearest_name
from localllm.cli.flags import typed
from localllm.cli.options import DisplayOptions
from localllm.cli.values import key_of, keys_of, plain_key, value_of_text
from localllm.model import Model
from localllm.options import (
    AnswerOptions,
    DeclaredOption,
    OptionError,
    Options,
    SamplingOptions,
    SpeculationOptions,
    declared,
)

_USUAL = (  # options that /show always prints, in addition to changed options
    "system_prompt", "think", "spec", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens",
)  # fmt: skip
_FIXED = ("model_draft", "parse_special_in_content")  # fixed when the model was opened
_MOST_SHOWN = 200  # maximum number of characters of a value


class ChatSettings:
    """The options of a running chat. A change takes effect with the next answer."""

    def __init__(
        self,
        model: Model,
        conversation: Conversation,
        answering: AnswerOptions,
        sampling: Mapping[str, Any],
        speculation: SpeculationOptions,
        display: DisplayOptions,
    ) -> None:
        self._model, self._conversation = model, conversation
        self._asked = dict(sampling)  # options set by the user, which override the model file's defaults
        self._groups: dict[type[Options], Options] = {
            AnswerOptions: answering,
            SpeculationOptions: speculation,
            SamplingOptions: model.sampling_defaults.options(sampling),
            DisplayOptions: display,
        }

    @property
    def display(self) -> DisplayOptions:
        display = self._groups[DisplayOptions]
        assert isinstance(display, DisplayOptions)
        return display

    @property
    def answering(self) -> AnswerOptions:
        answering = self._groups[AnswerOptions]
        assert isinstance(answering, AnswerOptions)
        return answering

    @property
    def names(self) -> list[str]:
        """Return the usual name of every option."""
        return [key_of(each) for _, each in self._options()]

    def set(self, name: str, text: str) -> str:
        """Set an option from text in command-line syntax. Return a line that confirms the change."""
        group, each = self._find(name)
        try:
            value = value_of_text(each, text)
        except OptionError as error:
            raise OptionError(f"{key_of(each)}: {typed(error)}") from None
        changed = self._changed(group, each.name, value)
        apply: dict[type[Options], Callable[[Any], None]] = {
            AnswerOptions: self._conversation.use_options,
            SamplingOptions: self._conversation.use_sampling,
            SpeculationOptions: self._speculate,
        }
        if group in apply:
            apply[group](changed)  # raises for an unusable value, before anything is changed
        if group is SamplingOptions:
            self._asked[each.name] = value
        self._groups[group] = changed
        return self._said(group, each)

    def line(self, name: str) -> str:
        """Return the value and meaning of an option."""
        group, each = self._find(name)
        return f"{self._said(group, each)}: {typed(each.option.help)}"

    def _said(self, group: type[Options], each: DeclaredOption) -> str:
        return f"{key_of(each)} is {self._text(group, each)}"

    def rows(self, everything: bool) -> Iterator[tuple[str, str]]:
        """Yield names and values: of all options, or of the usual and the changed options."""
        for group, each in self._options():
            usual = each.name in _USUAL or getattr(self._groups[group], each.name) != each.default
            if everything or usual:
                yield key_of(each), self._text(group, each)

    def _changed(self, group: type[Options], name: str, value: Any) -> Options:
        if group is SamplingOptions:
            return self._model.sampling_defaults.options({**self._asked, name: value})
        values: dict[str, Any] = {name: value}
        if group is SpeculationOptions:  # a loaded draft model stays loaded when another drafter is selected
            draft = self._model.draft
            usable = (value if name == "spec" else getattr(self._groups[group], "spec")) != "ngram"  # noqa: B009
            values["model_draft"] = draft.file.path if draft is not None and usable else ""
        return self._groups[group].changed(values)

    def _speculate(self, options: SpeculationOptions) -> None:
        self._model.use_speculation(options)

    def _options(self) -> Iterator[tuple[type[Options], DeclaredOption]]:
        for group in self._groups:
            for each in declared(group):
                if each.option.flags and each.name not in _FIXED:
                    yield group, each

    def _find(self, name: str) -> tuple[type[Options], DeclaredOption]:
        known: dict[str, tuple[type[Options], DeclaredOption]] = {}
        for group, each in self._options():
            known |= dict.fromkeys(keys_of(each), (group, each))
        found = known.get(plain_key(name).removeprefix("--"))
        if found is None:
            raise LocalLLMError(f"unknown setting {name!r}{nearest_name(name, known) or '; /show all lists them'}")
        return found

    def _text(self, group: type[Options], each: DeclaredOption) -> str:
        value = getattr(self._groups[group], each.name)
        if isinstance(value, bool):
            return "on" if value else "off"
        if value == each.default:
            return typed(each.option.shown) or ("none" if isinstance(value, str | tuple | dict) else "auto")
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = ";".join(map(str, value))
        text = str(value)
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
