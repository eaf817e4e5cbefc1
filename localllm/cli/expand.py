"""Replace the user's short names of models (`own_names.py`) on a command line by the names of the models."""

from __future__ import annotations

import os

from localllm.cli.app import CommandLine, UsageError
from localllm.cli.own_names import own_names

_TEXTS = ("search", "top")  # commands whose arguments are not models
_SEVERAL = ("bench",)  # commands whose arguments are all models


def expanded(line: CommandLine) -> CommandLine:
    """Return a command line with the user's short names replaced, and with the names and their file.

    Raise UsageError if -hf names no repository.
    """
    if line.name == "config":  # its arguments are not models, and it may create the file
        return line
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
        from localllm.hub.errors import StoreError
        from localllm.hub.short_names import wanted_reference

        try:
            values["hf_repo"] = str(wanted_reference(given))
        except StoreError as error:
            raise UsageError(f"-hf/-hfr/--hf-repo: {error} (localllm {line.name} --help lists the options)") from None
    return line._replace(values={**values, "own_names": names, "changed_file": line.values.get("config", "")})
