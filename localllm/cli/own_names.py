"""The user's short names of models: the table `[models]` of the configuration file, NAME = "USER/REPO:QUANT".

`expand.py` replaces them on the command line, and `serve` does so in requests.
"""

from __future__ import annotations

import os
import re
from typing import Any

from localllm.base.printable import printable
from localllm.cli.app import UsageError
from localllm.cli.tomlfile import TomlFile, file_path, read_toml
from localllm.loading.resolve import BOX

TABLE = "models"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,95}")


def own_names(config: str = "") -> dict[str, str]:
    """Return the names in the configuration file, which `config` may name."""
    return names_in(read_toml(*file_path(config, os.environ)))


def names_in(file: TomlFile | None) -> dict[str, str]:
    """Return the names in a configuration file, in lower case, with their models. Raise UsageError with FILE:LINE."""
    raw = file.content.get(TABLE) if file is not None else None
    if file is None or not isinstance(raw, dict):
        return {}
    return {name.lower(): _checked(file, name, value) for name, value in raw.items()}


def _checked(file: TomlFile, name: str, value: Any) -> str:
    from localllm.hub.errors import StoreError
    from localllm.hub.reference import reference

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
