"""`localllm list`: the models on this computer, downloaded by localllm or by other programs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from time import time

from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.cli.options import ListModelsOptions
from localllm.cli.terminal.console import YELLOW, room, say
from localllm.cli.terminal.formatting import age, listing, size
from localllm.hub import StoredModel, StoreFolders, everything
from localllm.hub.owned import is_owned

_HEADER = ("name", "size", "quantization", "where", "last used")


def list_models(own: ListModelsOptions) -> None:
    """Print a line for every model, or all facts as JSON. Unreadable models follow on stderr."""
    places = StoreFolders.here()
    models = sorted(everything(places), key=lambda each: -each.used)
    if own.json:
        print(json.dumps({"models": [_facts(each, places) for each in models]}, indent=2))
        return
    whole = [each for each in models if not each.problem]
    if whole:
        print(listing(_HEADER, [_row(each, places) for each in whole], room()))
    for each in models:
        if each.problem:
            say(f"{printable(each.name)} ({each.store}): {each.problem}", YELLOW)
    if not whole:
        say("no models here yet; `localllm pull USER/REPO` downloads one, `localllm chat` uses the bundled one")


def _row(each: StoredModel, places: StoreFolders) -> tuple[str, ...]:
    where = "pulled" if is_owned(each, places.hub) else each.store
    where = where if each.derived is None else f"from {each.derived.base}"
    return each.name, size(each.bytes), _quantization(each), where, age(time() - each.used)


def _facts(each: StoredModel, places: StoreFolders) -> dict[str, object]:
    return {
        "name": each.name,
        "bytes": each.bytes,
        "quantization": "" if each.problem else _quantization(each),
        "store": each.store,
        "base": "" if each.derived is None else each.derived.base,
        "pulled": each.derived is None and is_owned(each, places.hub),
        "paths": [str(path) for path in each.paths],
        "last_used": datetime.fromtimestamp(each.used, UTC).isoformat(timespec="seconds") if each.used else None,
        "problem": each.problem,
    }


def _quantization(each: StoredModel) -> str:
    """Return the quantization in the model's name, or the format of most of the bytes in the file."""
    if each.label:
        return each.label
    from localllm.gguf import open_gguf

    held: dict[str, int] = {}
    try:
        with open_gguf(each.path) as file:
            for tensor in file.tensors.values():
                held[tensor.format] = held.get(tensor.format, 0) + tensor.nbytes
    except LocalLLMError:
        return "unreadable"
    return max(held, key=lambda name: held[name], default="")
