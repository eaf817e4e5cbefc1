"""Records one transformer layer: attention and a feed-forward, each added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from localllm.models.attention import Attention
from localllm.models.builder import Part
from localllm.models.config import Config
from localllm.models.feed_forward import FeedForward
from localllm.models.recurrent import Recurrence
from localllm.plan import Value


@dataclass(frozen=True, slots=True)
class LayerRecorder(Part):
    """Records one layer for the hidden states of T tokens. One layer selects the tokens whose logits are requested."""

    attention: Attention
    recurrence: Recurrence
    feed_forward: FeedForward
    every_row: bool = False  # the last layer keeps the hidden states of all tokens
    embeddings: bool = False  # the plan ends in embeddings

    @staticmethod
    def stored(config: Config, name: str) -> str:
        """Return the name of a tensor in the GGUF."""
        return name

    def begin(self, x: Value) -> Value:
        """Return the input of the first layer from the token embeddings."""
        return x

    def end(self, x: Value) -> Value:
        """Return the input of the output norm from the last layer's output."""
        return x

    def hidden(self, x: Value) -> Value | None:
        """Return the input of multi-token-prediction heads from the last layer's output; None if it
        equals the input of the output norm.
        """
        return None

    def layer(self, x: Value, layer: int) -> Value:
        """Record attention and the feed-forward, in sequence or in parallel."""
        builder, name = self.builder, f"blk.{layer}."
        row, recorder = builder.row, builder.recorder
        normed = self.input_norm(name + row.attention_norm, x)
        read, mixers, selects = self.mixer_input(x, normed, layer), self.mixers(layer), self.selects(layer)
        mixed = [mixer.mixed(read, layer) for mixer in mixers]
        x = self.base(x, normed)
        if selects:
            mixed, x = [recorder.select_rows(value) for value in mixed], recorder.select_rows(x)
        y = reduce(recorder.add, [mixer.output(value, layer) for mixer, value in zip(mixers, mixed, strict=True)])
        if builder.config.parallel:
            if row.ffn_norm != row.attention_norm:
                normed = self.input_norm(name + row.ffn_norm, x)
            elif selects:
                normed = recorder.select_rows(normed)
            return recorder.add(x, recorder.add(self.feed_forward(normed, layer, x, x), y))
        before, x = x, self.residual(x, y, name + row.attention_post_norm)
        normed = self.input_norm(name + row.ffn_norm, x)
        y = self.feed_forward(normed, layer, x, before)
        return self.residual(self.base(x, normed), y, name + row.ffn_post_norm)

    def mixers(self, layer: int) -> list[Attention | Recurrence]:
        """Return the mixers of the layer: attention, recurrence, or both."""
        attention: list[Attention | Recurrence] = [self.attention] if self.config.attends[layer] else []
        return [*attention, self.recurrence] if self.config.recurs[layer] else attention

    def selects(self, layer: int) -> bool:
        """Return whether later layers read only the hidden states of tokens whose logits are requested.

        This is the last layer with its own KV cache; later layers read cached keys and values of all tokens.
        """
        return not self.every_row and layer == max(self.config.kv_layer)

    def mixer_input(self, x: Value, normed: Value, layer: int) -> Value:
        """Return what attention and recurrent mixers read."""
        return normed

    def base(self, x: Value, normed: Value) -> Value:
        """Return what the output of a block with input x is added to."""
        return x

    def residual(self, x: Value, y: Value, norm: str) -> Value:
        """Return x + y; depending on the architecture, y is normed or scaled first."""
        if self.builder.row.post_norms:
            y = self.post_norm(norm, y)
        if self.config.residual_scale != 1.0:
            y = self.recorder.scale(y, self.config.residual_scale)
        return self.recorder.add(x, y)

    def post_norm(self, name: str, y: Value) -> Value:
        """Return the norm of a block's output."""
        return self.builder.norm(name, y)

    def input_norm(self, name: str, x: Value) -> Value:
        """Return the named norm of x, or x if the architecture has no such norm (the name ends in ".")."""
        return x if name.endswith(".") else self.builder.norm(name, x)
