"""Each model store is found in the directory that its program uses. The Hugging Face cache follows
huggingface_hub's rules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.hub import StoreFolders

HOME = Path("/home/somebody")
LIBRARY = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
NAMES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HF_HOME": "/disk/hf"},
        {"HF_HOME": "~/hf"},
        {"HF_HOME": "$HOME/hf"},
        {"HF_HUB_CACHE": "/disk/hub", "HF_HOME": "/disk/hf"},
        {"HUGGINGFACE_HUB_CACHE": "/disk/old", "HF_HOME": "/disk/hf"},
        {"XDG_CACHE_HOME": "/disk/cache"},
    ],
)
def test_the_hub_cache_is_that_of_the_library(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    environ = {**clean, "HOME": str(HOME), **environ}
    done = subprocess.run([sys.executable, "-c", LIBRARY], env=environ, capture_output=True, text=True, check=True)
    monkeypatch.setenv("HOME", str(HOME))  # for "~"
    assert str(StoreFolders.of(environ, HOME, "linux").hub) == done.stdout.strip()


@pytest.mark.parametrize(
    ("environ", "platform", "llama", "ollama"),
    [
        ({}, "linux", HOME / ".cache/llama.cpp", HOME / ".ollama/models"),
        ({}, "darwin", HOME / "Library/Caches/llama.cpp", HOME / ".ollama/models"),
        ({"LOCALAPPDATA": "/local"}, "win32", Path("/local/llama.cpp"), HOME / ".ollama/models"),
        ({"XDG_CACHE_HOME": "/x"}, "linux", Path("/x/llama.cpp"), HOME / ".ollama/models"),
        ({"LLAMA_CACHE": "/l", "OLLAMA_MODELS": "/o"}, "linux", Path("/l"), Path("/o")),
    ],
)
def test_other_programs_have_their_variables_and_systems(
    environ: dict[str, str], platform: str, llama: Path, ollama: Path
) -> None:
    found = StoreFolders.of(environ, HOME, platform)
    assert (found.llama, found.ollama[0]) == ((llama,), ollama)
    assert found.lm_studio == (HOME / ".lmstudio/models", HOME / ".cache/lm-studio/models")
