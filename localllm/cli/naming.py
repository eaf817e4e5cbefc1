"""Find the model that a command line names, and the command to use if the first word is a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from localllm.base.printable import printable
from localllm.base.spelling import closest
from localllm.cli import options
from localllm.cli.app import UsageError, one_word
from localllm.loading.resolve import BOX, is_model_folder, resolve

_MODEL_FLAGS = ("-m", "--model", "-hf", "-hfr", "--hf-repo")


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
    from localllm.cli.expand import own_names
    from localllm.hub import StoreFolders, everything
    from localllm.hub.reference import REFERENCE
    from localllm.hub.search import is_path, matches
    from localllm.hub.short_names import full_name

    path = Path(word)
    if (
        path.is_file()
        or is_model_folder(path)
        or word in BOX
        or is_path(word)
        or REFERENCE.fullmatch(word)
        or full_name(word)
        or word.lower() in own_names()
    ):
        return True
    return bool(matches(word, everything(StoreFolders.here())))


def _nearest(word: str, commands: Collection[str]) -> str:
    """Return the closest command, model and file as text, or "" if none is close."""
    from localllm.hub import StoreFolders, everything
    from localllm.hub.search import beside, nearest_models

    model = nearest_models(word, everything(StoreFolders.here())) or closest(word, BOX)
    found = [command] if (command := closest(word, commands)) else []
    found += [f"the model {printable(model)}"] if model else []
    found += [f"the file {printable(file)}"] if (file := beside(Path(word))) else []
    return " or ".join(found)


def one_model(given: options.ModelName, default: str = "") -> str:
    """Return the given MODEL, after downloading it from the hub if needed. Raise UsageError unless exactly one is
    given."""
    names = [name for name in (*given.words, given.model, given.hf_repo) if name]
    if not names and not default:
        raise UsageError("MODEL is required: give a GGUF file or a name, or demo for the built-in model")
    name = one_word(names, "MODEL", default)
    if given.hf_repo:
        from localllm.cli.commands.pull import fetched

        return os.fspath(fetched(given.hf_repo))
    resolve(name)  # fail before a command writes or loads anything
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


def model_and_words(own: options.ModelName) -> tuple[str, list[str]]:
    """Return the model and the other arguments of a command. The model is the first argument unless a flag names it."""
    count = 0 if own.model or own.hf_repo else 1
    return one_model(options.ModelName(own.words[:count], own.model, own.hf_repo)), list(own.words[count:])
