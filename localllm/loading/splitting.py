"""How a model is loaded in several processes: the interface between the loader and `localllm.distributed`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from localllm.backends.base import Backend, CacheTypes, Limits
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.gguf import GGUFFile
from localllm.loading.recording import Recording
from localllm.options import LoadOptions
from localllm.plan import Plan

CPU_STAGES = "cpu stages"  # name of a backend whose stages all run on CPUs: with the bits of one process


@dataclass(frozen=True, slots=True)
class Whole:
    """A model before it is split: its files, its plan and how it was recorded, and the sizes to allocate."""

    file: GGUFFile
    drafter: GGUFFile | None
    recording: Recording
    plan: Plan
    limits: Limits
    cache: CacheTypes
    options: LoadOptions


class Splitter(Protocol):
    """Divides a model over processes."""

    line: str  # where the layers are, once `backend` has decided it

    def free_memory(self, options: LoadOptions) -> int:
        """Return the bytes that are free for weights and caches, over all machines."""
        ...

    def backend(self, whole: Whole, threads: int) -> Backend | None:
        """Decide where the layers run, and return a backend that binds the plan of `whole` there.

        None: in this process alone, as without a splitter.
        """
        ...


def check_splitting(options: LoadOptions) -> None:
    """Raise LocalLLMError for options that place layers within one process."""
    for setting in (Setting("gpu_layers", options.gpu_layers), Setting("n_cpu_moe", options.n_cpu_moe)):
        if setting.value not in ("auto", 0):
            raise LocalLLMError(
                Notice(setting, " divides one machine, and ", Setting("ray"), " the model; leave one out")
            )
