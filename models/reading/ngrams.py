"""Metadata keys of n-gram embeddings: which layer adds them, and how tokens are hashed to table rows."""

from __future__ import annotations

from localllm.models.config import NgramConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_WIDTH
from localllm.models.reading.keys import Keys

_MAX_TOKENS = 8  # maximum tokens per n-gram; known models have 3
_MAX_HEADS = 64  # maximum heads per order; known models have 8. Kernels store one value per head
_MAX_KERNEL = 64  # maximum convolution taps; known models have 4
_MAX_ROWS = 1 << 31  # maximum table rows; known models have 320 million


def read_ngrams(keys: Keys, vocabulary: int, recurs: tuple[bool, ...]) -> NgramConfig | None:
    """Read the n-gram config; None if the GGUF lacks the keys. `recurs` marks the recurrent layers."""
    layers = keys.metadata.get(keys.prefix + "ple.layers")
    if layers is None or (hasattr(layers, "__len__") and not len(layers)):
        return None
    (layer,) = keys.integers("ple.layers", 1, 0, len(recurs) - 1)
    if not recurs[layer]:
        raise ModelError(f"{keys.prefix}ple.layers: expected a layer with linear attention, found layer {layer}")
    tokens = keys.integer("ple.ngram_size", 2, _MAX_TOKENS)
    heads = keys.integer("ple.heads_per_ngram", 1, _MAX_HEADS) * (tokens - 1)
    sizes = keys.integers("ple.head_vocab_sizes", heads, 1, _MAX_ROWS)
    firsts = keys.integers("ple.head_offsets", heads, 0, _MAX_ROWS)
    largest = (1 << 63) // vocabulary - 1  # keeps products with token ids below 2^63
    return NgramConfig(
        layer=layer,
        width=keys.integer("embedding_length_per_layer_input", 1, MAX_WIDTH // heads),
        multipliers=keys.integers("ple.layer_multipliers", tokens, 0, largest),
        sizes=sizes,
        firsts=firsts,
        end=keys.integer("ple.eos_token_id", 0, vocabulary - 1),
        kernel=keys.integer("ple.conv_kernel", 1, _MAX_KERNEL),
    )
