"""`localllm rm`: delete a model that `pull` downloaded."""

from __future__ import annotations

import os

from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.cli.app import one_word
from localllm.cli.options import RemoveOptions
from localllm.cli.terminal.asking import agrees
from localllm.cli.terminal.console import say
from localllm.cli.terminal.formatting import size
from localllm.hub import NotHere, StoreFolders, everything
from localllm.hub.owned import is_owned
from localllm.hub.owned import remove_model as delete
from localllm.hub.search import nearest_models, only_match
from localllm.loading.resolve import BOX


def remove(own: RemoveOptions) -> None:
    """Delete a model after asking. Raise LocalLLMError if `pull` did not download it."""
    name, places = one_word(own.words, "NAME"), StoreFolders.here()
    if name in BOX:
        raise LocalLLMError(f"{name} is part of localllm and cannot be deleted")
    if os.path.lexists(name):
        raise LocalLLMError(f"{name} is your own file; rm deletes only models downloaded by `localllm pull`")
    models = everything(places)
    model = only_match(name, models)
    if model is None:
        near = nearest_models(name, models)
        hint = f"did you mean {printable(near)}? " if near else ""
        raise NotHere(f"no model {printable(name, 300)} on this computer; {hint}`localllm list` shows the models")
    if (
        is_owned(model, places.hub)
        and not own.yes
        and not agrees(f"delete {printable(model.name)} ({size(model.bytes)})?")
    ):
        say("nothing was deleted")
        return
    say(f"deleted {printable(model.name)}: {size(delete(model, places.hub))} freed")
