"""`localllm rm`: delete a model that `pull` fetched."""

from __future__ import annotations

import os

from localllm.box import BOX
from localllm.cli.app import UsageError
from localllm.cli.options import RemoveOptions
from localllm.cli.terminal.asking import agrees
from localllm.cli.terminal.console import say
from localllm.cli.terminal.formatting import size
from localllm.errors import LocalLLMError
from localllm.printable import printable
from localllm.store import StoreFolders, everything
from localllm.store.owned import is_owned
from localllm.store.owned import remove_model as delete
from localllm.store.search import models_named


def remove(own: RemoveOptions) -> None:
    """Delete a model after asking. Raise LocalLLMError if `pull` did not fetch it."""
    if len(own.words) != 1:
        given = f", got {len(own.words)}: {', '.join(own.words)}" if own.words else ""
        raise UsageError(f"expected one NAME{given}")
    name, places = own.words[0], StoreFolders.here()
    if name in BOX:
        raise LocalLLMError(f"{name} comes with localllm and stays")
    if os.path.lexists(name):
        raise LocalLLMError(f"{name} is a file of yours; rm deletes what `localllm pull` has fetched")
    model = models_named(name, everything(places))
    if (
        is_owned(model, places.hub)
        and not own.yes
        and not agrees(f"delete {printable(model.name)} ({size(model.bytes)})?")
    ):
        say("nothing was deleted")
        return
    say(f"deleted {printable(model.name)}: {size(delete(model, places.hub))} freed")
