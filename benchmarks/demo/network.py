"""The demo model in PyTorch: a Llama of a few layers whose parameters are the tensors of its GGUF.

Parameters are a dict by GGUF name, with weights (output width, input width) as in GGUF. The token embedding is also the
output matrix, and RoPE rotates neighbouring pairs, as in GGUF's `llama` architecture.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Params = dict[str, torch.Tensor]

VOCAB = 4096
CONTEXT = 1024
ROPE_BASE = 10000.0
RMS_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. All row widths are multiples of 256, so that every GGUF block format can store the rows."""

    layers: int
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 768

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


SHAPES = {"target": Shape(layers=4, width=512, heads=8, ffn=1024), "draft": Shape(layers=1, ffn=512)}


def initial(shape: Shape, seed: int) -> Params:
    """Return random weights (output width, input width) and unit norms.

    The token embedding is also the output matrix.
    """
    rng = torch.Generator().manual_seed(seed)
    width, kv_width = shape.width, shape.kv_heads * shape.head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng) * (gain * columns**-0.5)

    params = {"token_embd.weight": torch.randn(VOCAB, width, generator=rng) * 0.02}
    residual = (2 * shape.layers) ** -0.5
    for i in range(shape.layers):
        layer = {
            "attn_norm": torch.ones(width),
            "attn_q": matrix(width, width),
            "attn_k": matrix(kv_width, width),
            "attn_v": matrix(kv_width, width),
            "attn_output": matrix(width, width, residual),
            "ffn_norm": torch.ones(width),
            "ffn_gate": matrix(shape.ffn, width),
            "ffn_up": matrix(shape.ffn, width),
            "ffn_down": matrix(width, shape.ffn, residual),
        }
        params |= {f"blk.{i}.{name}.weight": value for name, value in layer.items()}
    params["output_norm.weight"] = torch.ones(width)
    return params


def rope_table(length: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines (length, head_dim / 2) of RoPE for every position."""
    frequency = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply RoPE to neighbouring pairs of each head: x (rows, heads, T, head_dim)."""
    cos, sin = table[0][: x.shape[2]], table[1][: x.shape[2]]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def hidden(params: Params, shape: Shape, tokens: torch.Tensor) -> torch.Tensor:
    """Return the last layer's normalized hidden states (rows, T, width) for tokens (rows, T)."""
    rows, length = tokens.shape
    table = rope_table(length, shape.head_dim)
    x = params["token_embd.weight"][tokens]  # (rows, T, width)

    def norm(name: str) -> torch.Tensor:
        return F.rms_norm(x, (shape.width,), params[name], RMS_EPS)

    def heads(y: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(y, params[name]).view(rows, length, -1, shape.head_dim).transpose(1, 2)

    for i in range(shape.layers):
        blk = f"blk.{i}."
        y = norm(blk + "attn_norm.weight")
        q = rotate(heads(y, blk + "attn_q.weight"), table)  # (rows, H, T, D)
        k = rotate(heads(y, blk + "attn_k.weight"), table)
        v = heads(y, blk + "attn_v.weight")
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, -1)
        x = x + F.linear(y, params[blk + "attn_output.weight"])
        y = norm(blk + "ffn_norm.weight")
        y = F.silu(F.linear(y, params[blk + "ffn_gate.weight"])) * F.linear(y, params[blk + "ffn_up.weight"])
        x = x + F.linear(y, params[blk + "ffn_down.weight"])
    return norm("output_norm.weight")


def logits(params: Params, shape: Shape, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the next tokens (rows, T, vocab)."""
    return F.linear(hidden(params, shape, tokens), params["token_embd.weight"])
