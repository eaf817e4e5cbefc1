"""BERT and the encoders made from it, whose norms follow the residual add; and ModernBERT."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from localllm.models.architecture import Architecture, LayerRecorder
from localllm.models.config import Config
from localllm.models.properties import Properties, Sliding
from localllm.models.reading import Keys, read_general
from localllm.models.reading.config import read_pooling
from localllm.models.routing import ExpertGating
from localllm.plan import Value


def _read_modern(keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(keys, row, head)
    pooling = read_pooling(keys, "classifier.pooling_type", "last" if config.causal else "mean")
    return replace(config, classifier_pooling=pooling)


class BertLayers(LayerRecorder):
    def residual(self, x: Value, y: Value, norm: str) -> Value:
        builder, second = self.builder, norm.replace(self.builder.row.attention_post_norm, "attn_norm_2")
        out = builder.norm(norm, builder.recorder.add(x, y))
        if second == norm or f"{second}.weight" not in builder.tensors:
            return out
        return builder.norm(second, builder.recorder.add(x, out))  # Jina's code encoder


class ModernBertLayers(LayerRecorder):
    """The first layer's attention has no input norm if the GGUF lacks the tensor."""

    def input_norm(self, name: str, x: Value) -> Value:
        missing = name.startswith("blk.0.") and f"{name}.weight" not in self.tensors
        return x if missing else super().input_norm(name, x)


_bert = partial(
    Architecture, layers=BertLayers, encoder=True, norm="layer", attention_norm="", ffn_norm="", output_norm="",
    attention_post_norm="attn_output_norm", ffn_post_norm="layer_output_norm",
)  # fmt: skip
ROWS = (
    _bert("bert", None, "gelu", ffn="plain"),  # BGE, E5, MiniLM, XLM-RoBERTa, BGE rerankers, ...
    _bert("jina-bert-v2", None, "gelu", ffn="found", alibi=8.0),
    _bert("jina-bert-v3", "neox", "gelu", ffn="plain"),
    Architecture(  # ModernBERT, Granite Embedding R2
        "modern-bert", "neox", "gelu", read=_read_modern, layers=ModernBertLayers, encoder=True, norm="layer",
        ffn="fused", activation_key=True, sliding=Sliding(3, first=True),
    ),
    _bert("nomic-bert", "neox"),  # Nomic Embed 1 and 1.5
    _bert(  # Nomic Embed 2
        "nomic-bert-moe", "neox", "gelu", ffn="plain", routing=ExpertGating("softmax", False, activation="gelu_alone"),
    ),
)  # fmt: skip
