"""`localllm pull`: download a model from the Hugging Face hub. `-hf` does the same if the model is not on this
computer."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.app import UsageError, one_word
from localllm.cli.options import PullOptions
from localllm.cli.terminal.console import DownloadProgress, say
from localllm.cli.terminal.formatting import size
from localllm.hub import NotHere, StoreError, StoreFolders, locate
from localllm.hub.reference import Reference
from localllm.hub.short_names import wanted_reference


def pull(own: PullOptions) -> None:
    """Download a model and print its local name."""
    name = one_word(own.words, "USER/REPO[:QUANT]")
    try:
        asked = wanted_reference(name)
    except StoreError as error:
        raise UsageError(str(error)) from None
    print(_pull(asked)[0])


def fetched(text: str) -> Path:
    """Return the file of USER/REPO[:QUANT], from the cache of any known program or newly downloaded."""
    asked = wanted_reference(text)
    try:
        return locate(str(asked))
    except NotHere:
        return _pull(asked)[1]


def _pull(asked: Reference) -> tuple[str, Path]:
    """Download a model if it is not cached. Return its name and its first file."""
    from localllm.hub.client import Hub
    from localllm.hub.fetch import FetchHooks
    from localllm.hub.pull import pull_model
    from localllm.loading.loader import free_memory

    hub, places = Hub(), StoreFolders.here()
    try:
        with DownloadProgress() as progress:
            done = pull_model(hub, asked, places.hub, free_memory(), FetchHooks(progress, say))
    except KeyboardInterrupt:
        say("stopped; run the same command to resume")
        raise
    say(f"{'fetched' if done.fetched else 'already here'}: {size(done.bytes)}, {done.path}")
    return done.name, done.path
