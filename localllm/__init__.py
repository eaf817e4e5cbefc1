"""Run large language models from GGUF files: `localllm.load(path).generate(prompt)`.

The names below are the Python API. They are looked up when used, so that `localllm --help` imports no NumPy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.errors import LocalLLMError
    from localllm.model import Model, load
    from localllm.sampling.options import SamplerOptions
    from localllm.session import Piece, Session, Statistics

if not (_here := Path(__file__).parent).joinpath("quant", "__init__.py").is_file():
    __path__.append(str(_here.parent))  # a checkout on a system without links: the other rooms lie beside this folder

__all__ = ["LocalLLMError", "Model", "Piece", "SamplerOptions", "Session", "Statistics", "load"]
__version__ = "0.1.0"

_HOMES = {
    "LocalLLMError": "localllm.errors",
    "Model": "localllm.model",
    "load": "localllm.model",
    "SamplerOptions": "localllm.sampling.options",
    "Piece": "localllm.session",
    "Session": "localllm.session",
    "Statistics": "localllm.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'localllm' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
