"""The end of a plan: the last norm, and the logits of the tokens that follow."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.models.builder import Part
from localllm.plan import Plan, Value, Weight


@dataclass(frozen=True, slots=True)
class Output(Part):
    """Maps the last layer's hidden states (T, width) to logits (T, vocabulary)."""

    def finish(
        self, x: Value, norm: str, name: str = "output", every_row: bool = False, hidden: Value | None = None
    ) -> Plan:
        """Finish the plan with the named norm and output matrix. With `every_row`, select the requested tokens here.

        `hidden` is the input of multi-token-prediction heads if it differs from the output's input.
        """
        normed = self.builder.norm(norm, x) if norm else x
        chosen = self.recorder.select_rows(normed) if every_row else normed
        logits = self.logits(chosen, name)
        read = hidden or (normed if self.builder.row.heads_norm else x)
        return self.recorder.finish(logits, self.tensors.used(), read, chosen if chosen.rows == logits.rows else None)

    def logits(self, x: Value, name: str) -> Value:
        """Return the logits of normed hidden states; without the named matrix, the output is tied to
        the embedding table."""
        config, tensors = self.config, self.tensors
        given, rows = f"{name}.weight" in tensors, self.rows(name)
        weight = tensors.matrix(f"{name}.weight" if given else "token_embd.weight", rows, config.width)
        scale = config.logit_scale * (self.builder.scale(name) if given else self.tied_scale)
        logits = self.recorder.linear(x, weight, self.bias(name, rows), scale)
        return self.recorder.softcap(logits, config.logit_softcap) if config.logit_softcap else logits

    def rows(self, name: str) -> int:
        """Return the number of tokens that have logits."""
        return self.config.vocabulary

    def bias(self, name: str, rows: int) -> Weight | None:
        return self.tensors.optional(f"{name}.bias", rows)

    @property
    def tied_scale(self) -> float:
        """The factor on logits if the output is tied to the embedding table."""
        return 1.0
