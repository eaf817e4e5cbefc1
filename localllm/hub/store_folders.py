"""The folders of localllm's store and of other programs' stores. Each folder is located in the same way as in its
program.

Only this module reads the environment variables of other programs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HUB, LLAMA, OLLAMA, LM_STUDIO = "Hugging Face", "llama.cpp", "Ollama", "LM Studio"
DERIVED = "derived"  # made by `localllm serve`, see `derived.py`


@dataclass(frozen=True, slots=True)
class StoreFolders:
    """The folders of each store, in search order."""

    hub: Path  # huggingface_hub's cache, shared between programs; `pull` writes here
    llama: tuple[Path, ...] = ()
    ollama: tuple[Path, ...] = ()
    lm_studio: tuple[Path, ...] = ()

    @property
    def derived(self) -> Path:
        """The folder of derived models."""
        return self.hub / ".localllm"

    @classmethod
    def here(cls) -> StoreFolders:
        """Return the current user's folders."""
        return cls.of(os.environ, Path(os.path.expanduser("~")), sys.platform)

    @classmethod
    def of(cls, environ: Mapping[str, str], home: Path, platform: str) -> StoreFolders:
        """Return the folders for these environment variables, home directory and platform."""

        def named(variable: str) -> Path | None:
            value = environ.get(variable, "")
            return Path(os.path.expandvars(os.path.expanduser(value))) if value else None

        cache = named("XDG_CACHE_HOME") or home / ".cache"
        hub_home = named("HF_HOME") or cache / "huggingface"
        llama = named("LLAMA_CACHE")
        if llama is None and platform == "darwin":
            llama = home / "Library" / "Caches" / "llama.cpp"
        elif llama is None and platform == "win32":
            llama = (named("LOCALAPPDATA") or home / "AppData" / "Local") / "llama.cpp"
        ollama = named("OLLAMA_MODELS")
        return cls(
            hub=named("HF_HUB_CACHE") or named("HUGGINGFACE_HUB_CACHE") or hub_home / "hub",
            llama=(llama or cache / "llama.cpp",),
            ollama=(ollama,) if ollama else (home / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")),
            lm_studio=(home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"),
        )
