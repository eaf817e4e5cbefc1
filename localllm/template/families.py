"""Chat templates for GGUFs without one, chosen by the special tokens in the vocabulary, or else by the model's name.

Every choice comes with a note, because a wrong template degrades the model without an error. A user may name a format,
or give a template (`given_template`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from localllm.base.files.regular import read_text
from localllm.sandbox import Confined
from localllm.template.chat_template import MAX_SOURCE, ChatTemplate
from localllm.template.errors import TemplateError

_KEY = "tokenizer.chat_template"
_NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('this format has no system messages') }}{% endif %}"
)


class SpecialTokens(Protocol):
    """The tokenizer interface that this module needs."""

    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def special(self) -> Mapping[str, int]: ...
    def id(self, text: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Family:
    """A conversation format. The format is used if the vocabulary has all `tokens` and the model's name contains one of
    `names`.
    """

    name: str
    source: str
    tokens: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # substrings of the model's lower-case name; () matches any name
    stops: tuple[str, ...] = ()


def _turns(form: str, prompt: str, start: str = "{{ bos_token }}") -> str:
    """Return a template that writes every message as `form`, then `prompt` to start the answer."""
    return f"{start}{{% for m in messages %}}{form}{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


FAMILIES: tuple[Family, ...] = (  # the first match is used
    Family(
        "llama3",
        _turns(
            "{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ m.content | trim ~ '<|eot_id|>' }}",
            "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        ),
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    Family(
        "chatml",
        _turns(
            "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}",
            "{{ '<|im_start|>assistant\\n' }}",
            start="",
        ),
        tokens=("<|im_start|>", "<|im_end|>"),
    ),
    Family(
        "gemma4",
        _turns(
            "{{ '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' ~ m.content | trim "
            "~ '<turn|>\\n' }}",
            "{{ '<|turn>model\\n' }}",
        ),
        tokens=("<|turn>", "<turn|>"),
    ),
    Family(
        "gemma",
        _NO_SYSTEM
        + _turns(
            "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' ~ m.content | trim "
            "~ '<end_of_turn>\\n' }}",
            "{{ '<start_of_turn>model\\n' }}",
        ),
        tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
    Family(
        "command-r",
        _turns(
            "{{ '<|START_OF_TURN_TOKEN|>' ~ {'system': '<|SYSTEM_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}"
            ".get(m.role, '<|USER_TOKEN|>') ~ m.content | trim ~ '<|END_OF_TURN_TOKEN|>' }}",
            "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}",
            start="",
        ),
        tokens=("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    ),
    Family(
        "phi3",
        _turns("{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}", "{{ '<|assistant|>\\n' }}", start=""),
        tokens=("<|user|>", "<|assistant|>", "<|end|>"),
    ),
    Family(
        "deepseek",
        _turns(
            "{{ m.content if m.role == 'system' else '<｜User｜>' ~ m.content if m.role == 'user' "
            "else '<｜Assistant｜>' ~ m.content ~ '<｜end▁of▁sentence｜>' }}",
            "{{ '<｜Assistant｜>' }}",
        ),
        tokens=("<｜User｜>", "<｜Assistant｜>"),
    ),
    Family(
        "mistral",
        _NO_SYSTEM
        + _turns("{{ '[INST] ' ~ m.content ~ '[/INST]' if m.role == 'user' else ' ' ~ m.content ~ eos_token }}", ""),
        tokens=("[INST]", "[/INST]"),
    ),
    Family(  # for vocabularies without [INST]
        "mistral-v1",
        _NO_SYSTEM
        + _turns("{{ '[INST] ' ~ m.content ~ ' [/INST]' if m.role == 'user' else m.content ~ eos_token }}", ""),
        tokens=("<s>", "</s>"),
        names=("mistral", "mixtral"),
    ),
    Family(
        "llama2",
        "{% if messages[0].role == 'system' %}"
        "{% set first, messages = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n', messages[1:] %}"
        "{% else %}{% set first = '' %}{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ bos_token ~ '[INST] ' ~ (first if loop.first else '') ~ m.content ~ ' [/INST]' }}"
        "{% else %}{{ ' ' ~ m.content ~ ' ' ~ eos_token }}{% endif %}{% endfor %}",
        tokens=("<s>", "</s>"),
        names=("llama-2", "llama 2", "llama2"),
    ),
    Family(
        "zephyr",
        _turns("{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ eos_token ~ '\\n' }}", "{{ '<|assistant|>\\n' }}", start=""),
        tokens=("<s>", "</s>"),
        names=("zephyr", "tinyllama", "stablelm"),
    ),
    Family(
        "rwkv-world",
        _turns("{{ m.role | capitalize ~ ': ' ~ m.content | trim ~ '\\n\\n' }}", "{{ 'Assistant:' }}"),
        tokens=("<s>",),
        names=("rwkv",),
        stops=("\n\nUser:",),
    ),
    Family(
        "plain",
        _turns(
            "{{ m.content ~ '\\n\\n' if m.role == 'system' else m.role | capitalize ~ ': ' ~ m.content ~ '\\n' }}",
            "{{ 'Assistant:' }}",
            start="",
        ),
        stops=("\nUser:",),
    ),
)


def given_template(given: str) -> Family:
    """Return the format that a user gives by name, as a file name, or as the text of a template (Jinja or plain)."""
    named = next((family for family in FAMILIES if family.name == given), None)
    if named is not None:
        return named
    if "{{" in given or "{%" in given or _is_plain_text(given):
        return Family("given", given)
    try:
        source = read_text(given, 4 * MAX_SOURCE, "strict")
    except FileNotFoundError:
        names = ", ".join(family.name for family in FAMILIES)
        raise TemplateError(f"{given!r} is not a chat template: give a file, a Jinja text, or one of {names}") from None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise TemplateError(f"{given}: the chat template cannot be read: {problem}") from None
    if not source.strip():
        raise TemplateError(f"{given}: the chat template is empty")
    return Family("given", source)


def _is_plain_text(given: str) -> bool:
    """Return whether this is a plain template without Jinja, as accepted by llama-server, and not a
    mistyped file name."""
    file = os.path.exists(given) or "/" in given or "\\" in given or re.search(r"\.\w+$", given)
    return len(given.split()) > 1 and not file


def choose_template(
    metadata: Mapping[str, Any],
    tokenizer: SpecialTokens,
    confined: Confined | None = None,
    given: Family | None = None,
) -> tuple[ChatTemplate, str | None]:
    """Return the GGUF's chat template and None; or a family's template, and a note with the reason for the choice.

    `confined` is the child process that renders the template. `given` replaces the GGUF's template; TemplateError if it
    is invalid.
    """
    texts = {token: text for text, token in tokenizer.special.items()}  # excludes a BOS that is a normal token
    bos, eos = (texts.get(-1 if token is None else token, "") for token in (tokenizer.bos, tokenizer.eos))
    if given is not None:
        return ChatTemplate(given.source, bos, eos, given.stops, confined=confined), None
    source = metadata.get(_KEY)
    why = "the file has no chat template"
    named = next((family for family in FAMILIES if family.name == source), None)  # old RWKV GGUFs name a format
    if named is not None:
        return ChatTemplate(named.source, bos, eos, named.stops, confined=confined), None
    if isinstance(source, str) and source.strip():
        try:
            return ChatTemplate(source, bos, eos, confined=confined), None
        except TemplateError as error:
            why = str(error)
    elif source is not None:
        why = f"{_KEY} of the file is {'empty' if isinstance(source, str) else 'not a string'}"
    name = str(metadata.get("general.name", "")).lower()
    family = next(
        family
        for family in FAMILIES
        if all(tokenizer.id(text) is not None for text in family.tokens)
        and (not family.names or any(part in name for part in family.names))
    )
    seen = " and ".join(family.tokens[:2]) if family.tokens else "no known special tokens"
    note = f"{why}; using the '{family.name}' format, because the vocabulary has {seen}"
    return ChatTemplate(family.source, bos, eos, family.stops, confined=confined), note
