"""Multi-head latent attention (MLA, arXiv:2405.04434): all heads share one cached latent vector per position.

A head's key is a matrix times the latent vector, concatenated with a rotated part that all heads share; its value is
another matrix times the latent vector. Both matrices are absorbed: the first is applied to the queries, the second to
the attention output. Attention then has a single KV head whose keys are the latent vector and the rotated part, and
whose values are the latent vector. Prefill and decode use the same form, so results are bitwise independent of the
chunk size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localllm.models.attention import NOT_ROTATED, Attention
from localllm.models.config import LatentConfig
from localllm.models.rope import score_factor
from localllm.plan import Rope, Value, Weight


@dataclass(frozen=True, slots=True)
class LatentAttention(Attention):
    """Maps normed hidden states (T, width) to latent head outputs (T, heads * latent width), and
    head outputs to (T, width)."""

    def mixed(self, x: Value, layer: int) -> Value:
        builder = self.builder
        config, recorder, latent = builder.config, builder.recorder, self.latent(layer)
        name, heads, window = f"blk.{layer}.attn_", config.heads[layer], config.windows[layer]
        ropes = (self.sliding if window else self.full) if config.rotated[layer] else NOT_ROTATED
        narrow = self.narrow(name, x)
        q_plain, q = self.queries(name, narrow, heads, latent)
        of, scale = latent.rank + latent.rotated, builder.scale(name + "kv_a_mqa")
        row = builder.norm(name + "kv_a_norm", builder.rows(name + "kv_a_mqa", x, 0, latent.rank, of, scale))
        k = row
        if latent.rotated:
            k = builder.optional_norm(name + "k_norm", builder.rows(name + "kv_a_mqa", x, latent.rank, of, of, scale))
            k = self.turned(k, ropes.key)
            q = self.turned(q, ropes.query)
        if latent.plain:
            q_plain = self.turned(q_plain, _at_rest(ropes.query, latent.plain))
            absorbed = recorder.head_linear(q_plain, self.key_matrices(name, heads, latent))
            q, k = (recorder.concat(absorbed, q, heads), recorder.concat(row, k)) if latent.rotated else (absorbed, row)
        self.stored[layer] = recorder.append(k, row, 1, prefix=True)
        score_scale = config.attention_scale[layer] * (score_factor(config.rope) if config.rotated[layer] else 1.0)
        selection = None if self.selector is None else self.selector.selection(layer, x, narrow, ropes.key)
        sinks = builder.tensors.optional(name + "sinks.weight", heads)
        seen = recorder.attention(q, self.stored[layer], heads, score_scale, window, sinks=sinks, selection=selection)
        if not self.has_gate(layer):
            return seen
        values, gates = self.values(seen, layer), builder.tensors.height(name + "gate.weight")
        gate = builder.product(name + "gate", x, values.width if gates == values.width else heads)
        return recorder.glu(gate, values, builder.row.gated or "sigmoid")

    def output(self, mixed: Value, layer: int) -> Value:
        """Apply the value matrices unless gating has already done so, then the output projection."""
        return Attention.output(self, mixed if self.has_gate(layer) else self.values(mixed, layer), layer)

    def has_gate(self, layer: int) -> bool:
        return self.builder.row.gated is not None and f"blk.{layer}.attn_gate.weight" in self.tensors

    def values(self, mixed: Value, layer: int) -> Value:
        matrices = self.value_matrices(f"blk.{layer}.attn_", self.config.heads[layer], self.latent(layer))
        return self.recorder.head_linear(mixed, matrices)

    def latent(self, layer: int) -> LatentConfig:
        latent = self.config.window_latent if self.config.windows[layer] else self.config.latent
        assert latent is not None, "not a model with latent attention"
        return latent

    def narrow(self, name: str, x: Value) -> Value:
        """Return the input of the query projection: x, or the normed down-projection of x."""
        builder, rank = self.builder, self.tensors.height(name + "q_a.weight")
        return builder.norm(name + "q_a_norm", builder.linear(name + "q_a", x, rank, x.width)) if rank else x

    def queries(self, name: str, x: Value, heads: int, latent: LatentConfig) -> tuple[Value, Value]:
        """Return the unrotated and the rotated part of all queries; if only one part exists, return it twice.

        `x` is the result of `narrow`.
        """
        builder, matrix = self.builder, name + "q"
        if builder.tensors.height(name + "q_a.weight"):
            matrix = name + "q_b"
        of = latent.plain + latent.rotated
        weight, scale = builder.tensors.matrix(f"{matrix}.weight", heads * of, x.width), builder.scale(matrix)
        if not latent.rotated:
            plain = builder.recorder.linear(x, weight, None, scale)
            return plain, plain
        rotated = builder.recorder.linear(x, weight.rows_of_each(of, latent.plain, of), None, scale)
        if not latent.plain:
            return rotated, rotated
        return builder.recorder.linear(x, weight.rows_of_each(of, 0, latent.plain), None, scale), rotated

    def turned(self, x: Value, rope: Rope | None) -> Value:
        """Rotate all dimensions of every head; the head width is `rope.n_rot`."""
        return x if rope is None else self.recorder.rotate(x, rope.n_rot, rope)

    def key_matrices(self, name: str, heads: int, latent: LatentConfig) -> Weight:
        """Return the absorbed key matrices (heads, latent width, unrotated width): a tensor, or transposed rows of
        `kv_b`.
        """
        tensors = self.tensors
        if name + "kv_b.weight" not in self.tensors:
            return self.matrices(name + "k_b", heads, latent.rank, latent.plain)
        return tensors.transposed(name + "kv_b.weight", heads, latent.plain, latent.plain + latent.value, latent.rank)

    def value_matrices(self, name: str, heads: int, latent: LatentConfig) -> Weight:
        """Return the value matrices (heads, value width, latent width)."""
        if name + "kv_b.weight" not in self.tensors:
            return self.matrices(name + "v_b", heads, latent.value, latent.rank)
        of = latent.plain + latent.value
        both = self.tensors.matrix(name + "kv_b.weight", heads * of, latent.rank)
        return replace(both.rows_of_each(of, latent.plain, of), shape=(heads, latent.value, latent.rank))

    def matrices(self, name: str, heads: int, rows: int, columns: int) -> Weight:
        """Return a stack of matrices; GGUFs of models with a single head omit the first dimension."""
        shapes = [(heads, rows, columns), *([(rows, columns)] if heads == 1 else [])]
        return replace(self.tensors.either(name + ".weight", *shapes), shape=(heads, rows, columns))


def _at_rest(rope: Rope | None, width: int) -> Rope | None:
    """Return a rotation by angle 0 that only applies the query temperature; None without a temperature."""
    if rope is None or not rope.temperature:
        return None
    return replace(rope, n_rot=width, inverse_frequency=(0.0,) * (width // 2), magnitude=1.0)
