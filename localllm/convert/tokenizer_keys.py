"""Convert the tokenizer of a Hugging Face checkpoint to GGUF keys: tokens, types, scores or merges, special tokens, and
chat templates. Afterwards a sample text is encoded with both tokenizers; a note reports different ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from localllm.base.printable import printable
from localllm.convert.bpe_tokens import from_bytes, from_merges, from_pieces, from_utf8
from localllm.convert.encoder_tokens import from_unigram, from_unigram_pieces, from_wordpiece
from localllm.convert.errors import ConvertError
from localllm.convert.files import read_file
from localllm.convert.hf_config import HfConfig
from localllm.convert.plain_bpe import as_fast
from localllm.convert.plamo_tokens import FILE as PLAMO
from localllm.convert.plamo_tokens import from_plamo
from localllm.convert.recipe import TokenizerModel
from localllm.convert.sentencepiece import UNIGRAM, read_pieces
from localllm.convert.special import special_keys
from localllm.convert.templates import template_keys
from localllm.convert.tiktoken_tokens import from_tiktoken, tiktoken_kind
from localllm.convert.tokens import ADDED_SCORE, CONTROL, TokenizerFiles, optional
from localllm.convert.world_tokens import FILE as WORLD
from localllm.convert.world_tokens import from_world
from localllm.sandbox import Confined, ConfinedError, folder_tokenizer
from localllm.tokenizer import Tokenizer

_CHECK = (
    "Hello, World! It's 12345 o'clock; we'LL see...\n\n\tdef f(x_1):\n        return x_1 ** 2  # two\r\n"
    "Über naïve façade – 3.14159 €100 日本語のテキスト и русский текст العربية हिन्दी 🙂👍🏽 \u00a0 end   "
)


_INCOMPLETE = {  # tokenizer classes whose code is not run
    "ChatGLMTokenizer": "the special tokens of ChatGLM 2 and 3 are only in the tokenizer's code, which is not run; "
    "save a fast tokenizer (tokenizer.json) into the folder, or take a GGUF file",
}
_SGLANG = "tokenizer.tok.json"  # the tokenizer file of Grok 2
_BY_SCORE = (  # GGUF has no unigram tokenizer model with byte fallback.
    "tokenizer.model is a unigram model; the file merges its pieces by score, as llama.cpp's does, and may split a "
    "text differently"
)
_OWN_FILES = {WORLD: from_world, PLAMO: from_plamo}
_ENCODERS = {"WordPiece": from_wordpiece, "Unigram": from_unigram}


@dataclass(frozen=True, slots=True)
class TokenizerKeys:
    keys: Mapping[str, Any]
    notes: tuple[str, ...]


def tokenizer_keys(
    folder: Path,
    config: HfConfig,
    rows: int,
    kind: TokenizerModel = "",
    templates: Mapping[str, str] = MappingProxyType({}),
    further: Mapping[int, str] = MappingProxyType({}),
) -> TokenizerKeys:
    """Return the `tokenizer.*` keys for an embedding with this number of rows; raise ConvertError for an unsupported
    tokenizer.

    `kind` is the architecture's `tokenizer.ggml.model`, if the checkpoint's files do not determine it, or imply a
    different value. `templates` are chat templates by name for a checkpoint without templates. `further` are control
    tokens by id, for rows beyond the vocabulary.
    """
    settings, fast = optional(folder / "tokenizer_config.json"), optional(folder / "tokenizer.json")
    files = TokenizerFiles(folder, fast or as_fast(folder, settings), settings, rows)
    keys = _with_further(_vocabulary(files, kind), further)
    if keys["tokenizer.ggml.model"] != "rwkv":  # config.json of RWKV checkpoints has the ids of another tokenizer
        keys |= special_keys(folder, files.fast, files.settings, config, keys)
    keys |= template_keys(folder, files.settings, templates)
    if kind == "gemma4":  # output degrades without BOS, which the checkpoint adds in its chat template
        keys["tokenizer.ggml.add_bos_token"] = True
    tokenizer = Tokenizer.from_metadata(keys)
    if not fast and kind == "llama" and (pieces := _pieces_file(folder)) and read_pieces(pieces).kind == UNIGRAM:
        return TokenizerKeys(keys, (_BY_SCORE,))
    if not fast:
        of_tiktoken = None if files.fast else tiktoken_kind(files)
        return TokenizerKeys(keys, (of_tiktoken.note,) if of_tiktoken is not None and of_tiktoken.note else ())
    return TokenizerKeys(keys, _differences(files.path, tokenizer, around=kind != "gemma4"))


def _with_further(keys: dict[str, Any], further: Mapping[int, str]) -> dict[str, Any]:
    texts, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    scores = keys.get("tokenizer.ggml.scores")
    for i, text in further.items():
        if i < len(texts):
            texts[i], types[i] = text, CONTROL
            if scores is not None:
                scores[i] = ADDED_SCORE
    return keys


def _vocabulary(files: TokenizerFiles, kind: TokenizerModel) -> dict[str, Any]:
    pieces, model = _pieces_file(files.folder), files.model
    name = str(model.get("type"))
    if name in _ENCODERS:
        return _ENCODERS[name](files)
    if not files.fast and (of_tiktoken := tiktoken_kind(files)) is not None:
        return from_tiktoken(files, of_tiktoken)
    if (lacking := _INCOMPLETE.get(str(files.settings.get("tokenizer_class")))) and not files.fast:
        raise ConvertError(f"{files.folder}: {lacking}")
    by_bytes = bool(files.fast) and not model.get("byte_fallback")
    if pieces is not None and not by_bytes and not (files.fast and kind == "gemma4"):
        found = read_pieces(pieces)
        return (from_unigram_pieces if found.kind == UNIGRAM and kind != "llama" else from_pieces)(found, files)
    for name_of_file, convert in _OWN_FILES.items():
        if not files.fast and (files.folder / name_of_file).is_file():
            return convert(files)
    if not files.fast and (files.folder / _SGLANG).is_file():
        raise ConvertError(
            f"{files.folder}: holds {_SGLANG}, SGLang's own form of a tokenizer; put tokenizer.json, "
            "tokenizer_config.json and chat_template.jinja of the same tokenizer into the folder"
        )
    if not files.fast:
        raise ConvertError(
            f"{files.folder}: no tokenizer.json or tokenizer.model; load its tokenizer with transformers "
            "(AutoTokenizer) and save it into the folder"
        )
    if name != "BPE":
        known = ", ".join(("BPE", *_ENCODERS))
        raise ConvertError(f"{files.path}: is a {printable(name)} model; supported: {known}")
    return from_bytes(files) if by_bytes else from_utf8(files) if kind == "gemma4" else from_merges(files)


def _pieces_file(folder: Path) -> Path | None:
    """Return the path of the checkpoint's SentencePiece file."""
    return next((path for name in ("tokenizer.model", "spiece.model") if (path := folder / name).is_file()), None)


def _differences(path: Path, ours: Tokenizer, around: bool) -> tuple[str, ...]:
    """Encode a text with both tokenizers. Return a note if the ids or, with `around`, the added special tokens
    differ."""
    json = read_file(path).decode("utf-8", "replace")
    try:
        with Confined(folder_tokenizer.__name__, folder_tokenizer.limits(json)) as confined:
            theirs = confined.call({"json": json, "text": _CHECK})
    except ConfinedError as error:
        raise ConvertError(f"{path}: the folder's tokenizer fails on a text of a few lines: {error}") from None
    if "error" in theirs:
        raise ConvertError(f"{path}: cannot be read: {printable(theirs['error'], 200)}")
    if ours.encode(_CHECK, add_special=False) != theirs["plain"]:
        return ("the file's tokenizer gives different ids than the folder's for a multilingual text",)
    given, added = ours.encode(_CHECK), len(theirs["whole"]) - len(theirs["plain"])
    if around and given != theirs["whole"]:
        return (f"around a text the folder's tokenizer puts {added} special tokens, the file's "
                f"{len(given) - len(theirs['plain'])}",)  # fmt: skip
    return ()
