"""Qwen 3 rerankers: decoders that answer "yes" or "no". The two tokens' rows of the output matrix form the classifier.
Models with a single score are converted to the same form.
"""

from __future__ import annotations

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.files import read_file
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.jsonfile import objects, read_json
from localllm.convert.recipe import From, Keys, Recipe, Tensors
from localllm.convert.tensor import LazyTensor

# The prompt from the model card, with the placeholders that GGUF readers fill in.
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_NAME = "qwen3-reranker"
_MAX_CARD = 1 << 20  # maximum bytes of README.md to read
_KEYS: Keys = {"pooling_type": 4, "classifier.output_labels": lambda config: ["yes", "no"]}


def _reranks(tied: bool) -> Reader[bool]:
    """Return a check that a checkpoint is a reranker, which only its name or model card shows."""

    def when(config: HfConfig) -> bool:
        folder = config.path.parent
        card = folder / "README.md"
        small = card.is_file() and card.stat().st_size <= _MAX_CARD
        text = read_file(card, _MAX_CARD).decode("utf-8", "replace").lower() if small else ""
        named = _NAME in folder.resolve().name.lower() or f"# {_NAME}" in text
        return named and (config.flag("tie_word_embeddings") is True) == tied

    return when


def _yes_and_no(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the rows of the output matrix for "yes" and "no"."""
    path = config.path.with_name("tokenizer.json")
    whole = read_json(path)
    model = whole.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    ids |= {str(token.get("content")): token.get("id") for token in objects(whole.get("added_tokens"))}
    found = [ids.get(word) for word in ("yes", "no")]
    rows = [i for i in found if type(i) is int and 0 <= i < parts[0].shape[0]]
    if len(rows) < 2:
        raise ConvertError(f"{path}: has no tokens 'yes' and 'no', which rerankers answer with; download it again")
    return t.picked(parts[0], np.array(rows), 2)


def _against_nothing(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the row of the single score and a zero row: the softmax over the two is the sigmoid of the score."""
    if len(parts[0].shape) != 2 or parts[0].shape[0] != 1:
        raise ConvertError(f"{parts[0].name}: is {parts[0].shape}; expected one score, as rerankers have it")
    return t.padded_rows(parts[0], 2)


ROWS = (
    *(
        Recipe(
            "qwen3", ("Qwen3ForCausalLM",), keys=_KEYS, when=_reranks(tied), templates={"rerank": TEMPLATE},
            top={"token_embd": "model.embed_tokens", "output": "lm_head", "cls.output": From((source,), _yes_and_no)},
        )
        for tied, source in ((True, "model.embed_tokens"), (False, "lm_head"))
    ),
    Recipe(
        "qwen3", ("Qwen3ForSequenceClassification",), keys=_KEYS,
        top={"cls.output": From(("score",), _against_nothing)},
    ),
)  # fmt: skip
