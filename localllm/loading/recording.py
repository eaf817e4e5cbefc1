"""Records a model's plan. Processes that record the same file in the same way get the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localllm.gguf import GGUFFile
from localllm.loading.drafters import with_drafter
from localllm.models import MediaInput, architecture_of, has_head, read_config, record, record_with_heads
from localllm.plan import Plan, Tensor


@dataclass(frozen=True, slots=True)
class Recording:
    """How to record a plan: for which context size, ending in embeddings or logits, and with which heads."""

    context: int  # tokens
    embeddings: bool = False
    heads: int = 0  # maximum number of heads for drafting
    media: MediaInput | None = None  # the embeddings that the plan takes besides tokens

    def plan(
        self, file: GGUFFile, drafter: GGUFFile | None = None, weights: Mapping[str, Tensor] | None = None
    ) -> Plan:
        """Record the plan of `file`. `drafter` is another GGUF, whose heads draft; `weights` replaces the tensors.

        Raises ModelError, or SpeculationError for a drafter that does not fit.
        """
        tensors = weights or file.tensors
        if drafter is not None and self.heads:
            return with_drafter(file, drafter, tensors, self.context, self.heads, self.media)
        architecture = architecture_of(file.metadata)
        config = read_config(file.metadata, architecture.name)
        if self.heads and has_head(config, architecture, tensors):
            return record_with_heads(file.metadata, architecture, tensors, self.context, self.heads, media=self.media)
        return record(config, architecture, tensors, self.context, self.embeddings, media=self.media)
