"""The user's short names of models: the table `[models]` of the configuration file, NAME = "USER/REPO:QUANT".

The command line replaces them before a command runs, and `serve` does so in requests.
"""

from __future__ import annotations

import os
import re
from typing import Any

from localllm.base.printable import printable
from localllm.cli.app import CommandLine, UsageError
from localllm.cli.tomlfile import TomlFile, read_toml
from localllm.hub.errors import StoreError
from localllm.hub.reference import reference
from localllm.loading.resolve import BOX

TABLE = "models"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,95}")
_TEXTS = ("search", "config", "top")  # commands whose arguments are not models
_SEVERAL = ("bench",)  # commands whose arguments are all models


def names_in(file: TomlFile | None) -> dict[str, str]:
    """Return the names in a configuration file, in lower case, and what they mean. Raise UsageError with FILE:LINE."""
    raw = file.content.get(TABLE) if file is not None else None
    if file is None or not isinstance(raw, dict):
        return {}
    return {name.lower(): _checked(file, name, value) for name, value in raw.items()}


def _checked(file: TomlFile, name: str, value: Any) -> str:
    place, shown = file.place(TABLE, name), printable(name, 100)
    if not _NAME.fullmatch(name):
        raise UsageError(f"{place}: {shown!r} cannot be a short name; use letters, digits, . _ : and -")
    if name.lower() in BOX:
        raise UsageError(f"{place}: {shown} is the name of a bundled model; choose another name")
    if not isinstance(value, str):
        raise UsageError(f'{place}: {shown} must be a text such as "USER/REPO:QUANT"')
    try:
        return str(reference(value))
    except StoreError as error:
        raise UsageError(f"{place}: {error}") from None


def own_names(config: str = "") -> dict[str, str]:
    """Return the names in the configuration file, which `config` may name."""
    from localllm.cli.configuration import file_path

    return names_in(read_toml(*file_path(config, os.environ)))


def expanded(line: CommandLine) -> CommandLine:
    """Return a command line with the user's short names replaced. Raise UsageError if -hf names no repository."""
    from localllm.hub.short_names import wanted_reference

    names, values = own_names(line.values.get("config", "")), dict(line.values)

    def full(word: str) -> str:
        return word if os.path.exists(word) else names.get(word.lower().removesuffix(":latest"), word)

    for key in ("model", "hf_repo", "model_draft", "default_model"):
        if isinstance(values.get(key), str):
            values[key] = full(values[key])
    if words := values.get("words", ()) if line.name not in _TEXTS else ():
        count = len(words) if line.name in _SEVERAL else 1
        values["words"] = (*map(full, words[:count]), *words[count:])
    if given := values.get("hf_repo"):
        try:
            values["hf_repo"] = str(wanted_reference(given))
        except StoreError as error:
            raise UsageError(f"-hf/-hfr/--hf-repo: {error} (localllm {line.name} --help lists the options)") from None
    return line._replace(values={**values, "own_names": names})
