"""Shell completion of arguments. Each function takes the start of a word and returns complete words."""

from __future__ import annotations

from pathlib import Path


def models(incomplete: str) -> list[str]:
    """Return bundled models, GGUF files, folders that may contain models, and names from the model stores."""
    from localllm.hub import StoreFolders, everything
    from localllm.loading.resolve import BOX

    named = [each.name for each in everything(StoreFolders.here()) if not each.problem]
    known = [name for name in (*BOX, *sorted(named)) if name.startswith(incomplete)]
    return known + _paths(incomplete, (".gguf",))


def files(incomplete: str) -> list[str]:
    return _paths(incomplete, ("",))


def types(incomplete: str) -> list[str]:
    """Return the types that `quantize` writes, and paths, since its first arguments are files."""
    from localllm.quant.mixes import MIXES

    return [name for name in (*MIXES, "COPY") if name.startswith(incomplete.upper())] + models(incomplete)


def presets(incomplete: str) -> list[str]:
    """Return the built-in presets."""
    from localllm.cli.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def _paths(incomplete: str, endings: tuple[str, ...]) -> list[str]:
    """Return files with one of the suffixes, and folders with a trailing slash."""
    folder, slash, name = incomplete.rpartition("/")
    try:
        found = sorted(Path(folder + slash or ".").expanduser().iterdir())
    except OSError:
        return []
    return [
        folder + slash + path.name + ("/" if path.is_dir() else "")
        for path in found
        if path.name.startswith(name)
        and (path.is_dir() or path.name.endswith(endings))
        and (name or path.name[0] != ".")
    ]
