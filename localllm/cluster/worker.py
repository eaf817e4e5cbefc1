"""Opens one stage of a model in a separate process, from a description that the front wrote."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from localllm.backends.base import Backend, Progress
from localllm.cluster.cut import cut_at
from localllm.cluster.errors import ClusterError
from localllm.cluster.stage import Layout, Stage, bind_stage
from localllm.gguf import GGUFFile, open_gguf
from localllm.gguf.identity import identity
from localllm.loading.recording import Recording


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF on the machine of a stage, and the identity of the front's (`gguf.identity`)."""

    path: str
    identity: str  # "": not checked, because only a part of the file was fetched, with hashes
    absent: tuple[str, ...] = ()  # tensors that were not fetched

    def opened(self) -> GGUFFile:
        """Open the file. Raises ClusterError if it is another model than the front's, and GGUFError."""
        file = open_gguf(self.path)
        file.forget(self.absent)
        try:
            if self.identity and identity(file) != self.identity:
                problem = "this is not the model that is split into stages"
                raise ClusterError(f"{file.path}: {problem}; copy the file from the first machine")
        except BaseException:
            file.close()
            raise
        return file


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a process needs to open a stage: its number, the model, and how the front recorded and cut the plan."""

    number: int
    model: Source
    recording: Recording
    layout: Layout
    drafter: Source | None = None  # another GGUF, whose heads draft


def open_stage(given: Assignment, backend: Backend, progress: Progress | None = None) -> Stage:
    """Bind a stage to `backend`. It reads the weights of the stage's layers, and samples for the file's identity."""
    with ExitStack() as files:  # the weights are in memory afterwards; only the first stage reads tables from its file
        file = files.enter_context(given.model.opened())
        drafter = files.enter_context(given.drafter.opened()) if given.drafter is not None else None
        cut = cut_at(given.recording.plan(file, drafter), given.layout.firsts)
        return bind_stage(given.number, cut, given.layout, backend, progress)
