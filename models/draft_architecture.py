"""Architectures of GGUFs that draft for a model of another architecture; `models.families` holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from localllm.models.architecture import Architecture
from localllm.models.config import Config, MediaInput
from localllm.plan import Plan, Tensor, Weight


class Drafter(NamedTuple):
    """The content of a GGUF that drafts for a model."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors by name. In a plan, their names begin with `prefix` and differ from the model's."""
        return {name: replace(Weight.of(each), tensor=prefix + name) for name, each in self.tensors.items()}


class Target(NamedTuple):
    """A model that drafts are made for."""

    config: Config
    architecture: Architecture
    tensors: Mapping[str, Tensor]
    context: int | None  # as in `forward.record`, like the next field
    media: MediaInput | None = None


@dataclass(frozen=True, slots=True)
class DraftArchitecture:
    """One architecture of such files."""

    name: str  # `general.architecture`, and the prefix of the metadata keys
    # (model, drafter) -> the plan of the model, and the drafter as a further stage
    record: Callable[[Target, Drafter], Plan]
