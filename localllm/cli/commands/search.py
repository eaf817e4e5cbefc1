"""`localllm search`: find models with GGUF files on the Hugging Face hub."""

from __future__ import annotations

import json

from localllm.cli.app import UsageError
from localllm.cli.options import SearchOptions
from localllm.cli.terminal.console import room, say
from localllm.cli.terminal.formatting import in_columns, listing, parameters

_HEADER = ("name", "parameters", "architecture", "downloads", "note")


def search(own: SearchOptions) -> None:
    """Print a line for every short name and repository found, or all facts as JSON."""
    if not own.words:
        raise UsageError("expected words to search for, such as: localllm search llama 3.2")
    from localllm.hub.client import Hub
    from localllm.hub.short_names import named_like
    from localllm.models import ARCHITECTURES

    names = named_like(own.words, own.own_names)
    if names and not own.json:
        print(in_columns([("short name", "model"), *names.items()], indent=0, room=room()) + "\n", flush=True)
    found = Hub().search(" ".join(own.words), own.limit)
    if own.json:
        print(json.dumps({"names": names, "models": [each._asdict() for each in found]}, indent=2))
        return
    if not found:
        if not names:
            say("nothing found; give fewer words, or a part of the name")
        return
    rows = []
    for each in found:
        known = not each.architecture or each.architecture in ARCHITECTURES
        note = ["" if known else "not supported", "gated: accept its terms on the hub" if each.gated else ""]
        count = parameters(each.parameters) if each.parameters else ""
        rows.append((each.repo, count, each.architecture, f"{each.downloads:,}", ", ".join(filter(None, note))))
    print(listing(_HEADER, rows, room()))
    say("`localllm pull NAME` downloads one")
