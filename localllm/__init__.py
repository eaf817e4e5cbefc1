"""Run large language models from GGUF files.

    import localllm

    with localllm.load("model.gguf") as model:  # or "demo", the bundled model
        print(model.chat("Who are you?"))
        for piece in model.generate("Once upon a time", max_tokens=100):  # streams
            print(piece.text, end="", flush=True)

`load` opens a GGUF; its options control how the model runs. `Model` has `chat`, `generate`, `conversation`, `tokenize`,
`detokenize`, `logits` and `embed`; each answer is a `Reply`. Every error that a caller can fix is a LocalLLMError,
whose one-line message gives the problem, its place, and the next step.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # true for type checkers; importing it from typing would delay the command line's first output
if TYPE_CHECKING:
    from typing import Any

    from localllm.base.errors import LocalLLMError
    from localllm.chat import Conversation
    from localllm.generation.statistics import Usage
    from localllm.model import Model, load
    from localllm.options import AnswerOptions, DiffusionOptions, LoadOptions, SamplingOptions, SpeculationOptions
    from localllm.reply import Piece, Reply, ToolCall

_here = os.path.dirname(os.path.abspath(__file__))
_unlinked = [room for room in ("quant", "plan", "models", "backends") if not os.path.isdir(os.path.join(_here, room))]
if _unlinked:  # a checkout without symbolic links: the packages are in the parent folder
    import sys
    from importlib.machinery import ModuleSpec, PathFinder

    class _TopLevelRooms:
        """Finds `localllm.quant` and the other top-level packages in the parent folder, and nothing else there."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            package, _, room = name.rpartition(".")
            if package != __name__ or room not in _unlinked:
                return None
            return PathFinder.find_spec(name, [os.path.dirname(_here)])

    sys.meta_path.append(_TopLevelRooms)

__all__ = [
    "AnswerOptions",
    "Conversation",
    "DiffusionOptions",
    "LoadOptions",
    "LocalLLMError",
    "Model",
    "Piece",
    "Reply",
    "SamplingOptions",
    "SpeculationOptions",
    "ToolCall",
    "Usage",
    "load",
]
__version__ = "0.3.0"

_HOMES = {
    "LocalLLMError": "localllm.base.errors",
    "Model": "localllm.model",
    "load": "localllm.model",
    "AnswerOptions": "localllm.options",
    "Conversation": "localllm.chat",
    "DiffusionOptions": "localllm.options",
    "LoadOptions": "localllm.options",
    "SamplingOptions": "localllm.options",
    "SpeculationOptions": "localllm.options",
    "Piece": "localllm.reply",
    "Reply": "localllm.reply",
    "ToolCall": "localllm.reply",
    "Usage": "localllm.generation.statistics",
}


def __getattr__(name: str) -> Any:
    # Imported on demand, so that `localllm --help` does not import NumPy.
    from importlib import import_module

    if name == "quant":
        return import_module("localllm.quant")
    if name not in _HOMES:
        raise AttributeError(f"module 'localllm' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # help(localllm) also shows the names that are imported on demand
