"""Find the model that a command line names, and the command to use if the first word is a model."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.base.spelling import closest, either
from localllm.cli import options
from localllm.cli.app import UsageError, one_word
from localllm.loading.resolve import BOX, is_model_folder, resolve

BUNDLED = "demo"  # answers where no model is given and none is configured
_MODEL_FLAGS = ("-m", "--model", "-hf", "-hfr", "--hf-repo")
_PLAIN = re.compile(r"[A-Za-z]+")  # a name or a word of a sentence
_NAME = re.compile(r"[\w.:/\\@~+-]+", re.ASCII)  # characters of a model's name


def with_command(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """If a command line begins with a model, insert `chat` before it. Raise UsageError for an unknown command."""
    first = words[0]
    if first in commands or (first.startswith("-") and first not in _MODEL_FLAGS):
        return list(words)
    if first in _MODEL_FLAGS or _is_model(first):
        return ["chat", *words]
    if meant := _nearest(first, commands):
        problem = f"unknown command {printable(first)!r}; did you mean {meant}?"
        raise UsageError(f"{problem} (localllm --help lists the commands)")
    raise UsageError(
        f"{printable(first)!r} is neither a command nor a model on this computer: localllm --help lists the commands, "
        "localllm list the models, and localllm pull USER/REPO fetches one"
    )


def _is_model(word: str) -> bool:
    """Return whether a word names a model, or has a form that only a path or a model name can have."""
    from localllm.cli.own_names import own_names
    from localllm.hub.reference import REFERENCE
    from localllm.hub.search import is_path
    from localllm.hub.short_names import full_name

    known = word in BOX or is_path(word) or REFERENCE.fullmatch(word) or full_name(word) or word.lower() in own_names()
    return bool(known or _is_here(word))


def _is_here(word: str) -> bool:
    """Return whether a word is a file, a folder of a model, or a model in a store."""
    from localllm.hub import StoreFolders, everything
    from localllm.hub.search import matches

    if os.path.isfile(word) or (os.path.isdir(word) and is_model_folder(Path(word))):
        return True
    return bool(matches(word, everything(StoreFolders.here())))


def is_prompt(word: str) -> bool:
    """Return whether the first word after `run`, `explain` or `embed` is a prompt for the default model, not MODEL.

    A prompt has a character that names of models lack, such as a space, "?" or an accent. A misspelled name or path is
    never a prompt, and neither is an existing file or model.
    """
    if _NAME.fullmatch(word):
        return False
    from localllm.hub.labels import ENDING

    if word.endswith(ENDING) or word.startswith(("/", "./", "../", "~/")):
        return False
    return not _is_here(word)


def model_words(own: options.ModelName) -> int:
    """Return how many of the words after a command that takes a text name the model: 1 or 0."""
    return 0 if own.model or own.hf_repo or not own.words or is_prompt(own.words[0]) else 1


def _nearest(word: str, commands: Collection[str]) -> str:
    """Return the closest command, model and file as text, or "" if none is close."""
    from localllm.cli.own_names import own_names
    from localllm.hub import StoreFolders, everything
    from localllm.hub.search import beside, nearest_models
    from localllm.hub.short_names import known_like

    model = nearest_models(word, everything(StoreFolders.here())) or closest(word, (*BOX, *own_names()))
    models = [model] if model else known_like(word)
    found = [command] if (command := closest(word, commands)) else []
    found += [f"the model {printable(either(models))}"] if models else []
    found += [f"the file {printable(file)}"] if (file := beside(Path(word))) else []
    return " or ".join(found)


def one_model(given: options.ModelName, default: str = "") -> str:
    """Return the given MODEL, after downloading it from the hub if needed. Raise UsageError unless exactly one is
    given."""
    names = [name for name in (*given.words, given.model, given.hf_repo) if name]
    if not names and not default:
        raise UsageError("MODEL is required: give a GGUF file or a name, or demo for the bundled model")
    name = one_word(names, "MODEL", default)
    if given.hf_repo:
        from localllm.cli.commands.pull import fetched

        return os.fspath(fetched(given.hf_repo))
    resolve(name, others=given.own_names)  # fail before a command writes or loads anything
    return name


def title(name: str) -> str:
    """Return the display name of a model: its file name, or the name by which it was found."""
    return Path(name).name if os.path.exists(name) else name


def several_models(given: options.ModelNames) -> tuple[str, ...]:
    """Return the given MODELs, at least one."""
    words = [name for name in (*given.words, *given.model) if name]
    hub = [one_model(options.ModelName((), "", given.hf_repo))] if given.hf_repo else []
    names = [one_model(options.ModelName((name,))) for name in words] + hub
    return tuple(names) or (one_model(options.ModelName()),)


def model_and_words(own: options.ModelName, required: bool = True) -> tuple[str, list[str]]:
    """Return the model and the other arguments of a command. The model may be "" unless it is required."""
    count = model_words(own)
    given = options.ModelName(own.words[:count], own.model, own.hf_repo, own.own_names)
    try:
        name = one_model(given) if given.named or required else ""
    except LocalLLMError as error:
        from localllm.hub.errors import NotHere

        if not isinstance(error, NotHere) or not own.words[:count] or not _PLAIN.fullmatch(own.words[0]):
            raise
        raise NotHere(f"{error}; -p {own.words[0]} makes it a prompt") from None
    return name, list(own.words[count:])


def lasting(name: str) -> str:
    """Return a model name that is valid in any working directory."""
    return os.path.abspath(name) if os.path.exists(name) else name
