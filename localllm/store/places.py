"""Where models lie: the stores of localllm and of other programs, each found as that program finds its own.

This is the one place that reads their environment variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HUB, LLAMA, OLLAMA, LM_STUDIO = "Hugging Face", "llama.cpp", "Ollama", "LM Studio"


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of each store, in the order in which they are searched."""

    hub: Path  # the cache that huggingface_hub shares between programs; `pull` writes here
    llama: tuple[Path, ...] = ()
    ollama: tuple[Path, ...] = ()
    lm_studio: tuple[Path, ...] = ()

    @classmethod
    def here(cls) -> Places:
        """Return the folders of this user."""
        return cls.of(os.environ, Path(os.path.expanduser("~")), sys.platform)

    @classmethod
    def of(cls, environ: Mapping[str, str], home: Path, platform: str) -> Places:
        """Return the folders that these variables, this home directory and this system lead to."""

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
