"""Train small tokenizers with the split rules and special tokens of real models, and save them as in a
Hugging Face checkpoint.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from localllm.tokenizer.pretokenize import CASED_LETTERS
from tests.localllm.tokenizer.vocabularies import charsmap

VOCABULARY = 320
_SPECIAL = ["<pad>", "<s>", "</s>"]
SPACES = charsmap(dict.fromkeys("\n\t\r\u00a0", " "))  # normalizes white space, as real unigram models do
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
REGEXES = {  # from the tokenizer.json files of Llama 3, Qwen 2, Mistral Nemo and gpt-oss
    "llama3": _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": _CAMEL.replace("{0}", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": _CAMEL.replace("{0}", _SHORT + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNED = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
# Several pre-tokenizer steps, the last one byte-level. Newlines are literal, as in the published tokenizer.json files.
STEPS: dict[str, tuple[str, ...]] = {
    **{style: (regex,) for style, regex in REGEXES.items()},
    "qwen35": (
        _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        _SIGNED + "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "deepseek-llm": (
        *("[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+"),
        "digits",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", "digits"),
    "seed-coder": (_SHORT + "|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|" + _ENDS,),
    "exaone-moe": (
        _SHORT + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "jais-2": (
        REGEXES["llama3"].removesuffix(r"|\s+(?!\S)|\s+")
        + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"|\s{1}",
    ),
    "bloom": (" ?[^(\\s|[.,!?…。，、।۔،])]+",),
}
TEXT = (
    "Once upon a time there was a little girl who lived in a house near the forest. She didn't like the rain, but "
    "she'd play with 12 dogs and 345 cats all day. They're happy! def main(x): return x + 1\n\n  Naïve café, Übung, "
    "日本語 русский 🙂. We'll see what HappensNext in camelCase and SNAKE_CASE, won't we? 3.14 99 bottles\r\n\tend."
)


def around(single: str, ids: dict[str, int]) -> Any:
    """Return the step that puts special tokens around a text, as in `<s> $A`."""
    return processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))


def add_special(tokenizer: Any, texts: Iterable[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])


def bpe_tokenizer(style: str, vocabulary: int = VOCABULARY, texts: list[str] | None = None) -> Any:
    """Return a byte-level BPE tokenizer with the style's split rules, trained on the texts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=style in ("llama3", "tekken")))
    digits = pre_tokenizers.Digits(individual_digits=True)
    rules = STEPS.get(style, ("digits",) if style == "starcoder" else ())
    steps = [digits if rule == "digits" else pre_tokenizers.Split(Regex(rule), "isolated") for rule in rules]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style not in STEPS))
    if style == "falcon":
        threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        steps = [pre_tokenizers.Punctuation("contiguous"), *steps, pre_tokenizers.Digits(), threes]
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts or [TEXT], trainer)
    if style == "llama3":  # adds <s> as BOS
        tokenizer.post_processor = around("<s> $A", {"<s>": 1})
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def spm_tokenizer(vocabulary: int = VOCABULARY, texts: list[str] | None = None) -> Any:
    """Return the fast tokenizer that transformers derives from a SentencePiece BPE model, with byte fallback and all
    merges.
    """
    pieces = spm_pieces(vocabulary, texts or [TEXT])
    ids = {text: i for i, (text, _, _) in enumerate(pieces)}
    rank = {text: i for i, (text, _, kind) in enumerate(pieces) if kind == 1}
    merges = [
        (text[:cut], text[cut:])
        for text in sorted(rank, key=rank.__getitem__)
        for cut in range(1, len(text))
        if text[:cut] in rank and text[cut:] in rank
    ]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = around("<s> $A", {"<s>": 1})
    add_special(tokenizer, ("<unk>", "<s>", "</s>"))
    return tokenizer


def gemma4_tokenizer(vocabulary: int = 600, texts: list[str] | None = None) -> Any:
    """Return a BPE tokenizer like Gemma 4's: explicit merge ranks over UTF-8, byte fallback, and no pre-tokenizer."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|channel>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|▁*[^▁\n]+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 256, special_tokens=special, limit_alphabet=(vocabulary - 256) // 2,
        show_progress=False,
    )  # fmt: skip
    trained.train_from_iterator(texts or [TEXT], trainer)
    model = json.loads(trained.to_str())["model"]
    ids = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    add_special(tokenizer, special)
    return tokenizer


def wordpiece_tokenizer(vocabulary: int = VOCABULARY, texts: list[str] | None = None, lowercase: bool = True) -> Any:
    """Return a WordPiece tokenizer like BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts or [TEXT], trainer)
    tokenizer.post_processor = around("[CLS] $A [SEP]", {"[CLS]": 2, "[SEP]": 3})
    return tokenizer


def unigram_tokenizer(
    vocabulary: int = VOCABULARY, texts: list[str] | None = None, charsmap: bytes = b"", words: bool = True
) -> Any:
    """Return a unigram tokenizer like XLM-RoBERTa's."""
    tokenizer = Tokenizer(models.Unigram())
    metaspace = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap)] if charsmap else [])
    splits = [pre_tokenizers.WhitespaceSplit(), metaspace] if words else [metaspace]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.Metaspace("▁")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocabulary, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts or [TEXT], trainer)
    tokenizer.post_processor = around("<s> $A </s>", {"<s>": 0, "</s>": 2})
    return tokenizer


def t5_tokenizer(vocabulary: int = VOCABULARY, texts: list[str] | None = None) -> Any:
    """Return a unigram tokenizer like T5's, which appends </s> and has sentinel tokens after the pieces."""
    trained = unigram_tokenizer(vocabulary - 3, texts, SPACES)
    pieces = json.loads(trained.to_str())["model"]["vocab"][4:]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = Tokenizer(models.Unigram([*special, *((text, score) for text, score in pieces)], 2, False))
    tokenizer.normalizer, tokenizer.pre_tokenizer = trained.normalizer, trained.pre_tokenizer
    tokenizer.decoder = trained.decoder
    tokenizer.post_processor = around("$A </s>", {"</s>": 1})
    sentinels = [f"<extra_id_{i}>" for i in range(vocabulary - tokenizer.get_vocab_size() - 1, -1, -1)]
    names = [*(text for text, _ in special), *sentinels]
    add_special(tokenizer, names)
    return tokenizer


def spm_pieces(vocabulary: int, texts: list[str]) -> list[tuple[str, float, int]]:
    """Return (text, score, type) of <unk>, <s>, </s>, 256 byte tokens, merged pieces by score, and characters."""
    words = [text.replace(" ", "▁") for text in texts]
    frequency = Counter(c for word in words for c in word if c.isascii() or c == "▁")
    characters = sorted(c for c, _ in frequency.most_common(vocabulary - 275))
    known = set(characters)
    counts: dict[str, int] = {}
    for word in words:
        for size in range(2, 6):
            for start in range(len(word) - size + 1):
                piece = word[start : start + size]
                if set(piece) <= known and "▁" not in piece[1:]:
                    counts[piece] = counts.get(piece, 0) + size - 1
    room = vocabulary - 259 - len(characters)
    chosen: list[str] = []
    parts = set(characters)
    for piece in sorted(counts, key=lambda p: (-counts[p], p)):
        if len(chosen) < room and any(piece[:cut] in parts and piece[cut:] in parts for cut in range(1, len(piece))):
            chosen.append(piece)
            parts.add(piece)
    assert len(chosen) == room
    normal = chosen + characters
    return [
        *(("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        *((text, -float(i), 1) for i, text in enumerate(normal)),
    ]


def spm_file(
    pieces: list[tuple[str, float, int]], space_prefix: bool = True, model: int = 2, charsmap: bytes = b""
) -> bytes:
    """Return a serialized SentencePiece model (sentencepiece_model.proto) with these pieces; `model` 2 is BPE."""

    def varint(n: int) -> bytes:
        out = b""
        while n > 127:
            out, n = out + bytes([n & 127 | 128]), n >> 7
        return out + bytes([n])

    def message(number: int, data: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(data)) + data

    out = b""
    for text, score, kind in pieces:
        body = message(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
        out += message(1, body + (varint(3 << 3) + varint(kind) if kind != 1 else b""))
    # model_type, vocab_size, and byte_fallback for BPE
    out += message(2, varint(3 << 3) + varint(model) + varint(35 << 3) + varint(model == 2))
    rules = message(1, b"identity") + (message(2, charsmap) if charsmap else b"")
    return out + message(3, rules + varint(3 << 3) + varint(space_prefix) + varint(4 << 3) + varint(model == 1))


def world_lines(vocabulary: int = VOCABULARY) -> str:
    """Return a vocabulary in RWKV's format: all bytes, then longer tokens.

    Token 261 is a double newline, as in RWKV World.
    """
    longer = ["\r\n", "é", "日本", "\t\t", "\n\n", *sorted({word for word in TEXT.split() if len(word) > 2})]
    tokens = [*(bytes([i]) for i in range(256)), *longer]
    lines = [
        f"{i} {token!r} {len(token if isinstance(token, bytes) else token.encode())}"
        for i, token in enumerate(tokens[: vocabulary - 4], 1)
    ]
    return "\n".join(lines) + "\n"


def plamo_entries(vocabulary: int = VOCABULARY) -> list[list[Any]]:
    """Return the entries of PLaMo's tokenizer file: special tokens, bytes, and pieces with scores."""
    special = [[f"<|plamo:{x}|>", 0.0, "UNKNOWN" if x == "unk" else "CONTROL"] for x in ("unk", "bos", "eos", "pad")]
    special.append(["<|plamo:op|>", 0.0, "NORMAL"])
    single = [[f"<0x{byte:02X}>", 0.0, "BYTE"] for byte in range(256)]
    pieces = list(dict.fromkeys([*TEXT[:40].replace("\n", " "), *(word + " " for word in TEXT.split())]))
    scored = [[piece, -float(i) / 8, "NORMAL", None, None] for i, piece in enumerate(pieces)]
    return [*special, *single, *scored][:vocabulary]


def roberta_tokenizer() -> Any:
    """Return a tokenizer like RoBERTa's: GPT-2's byte-level BPE, with <s> and </s> around the text."""
    tokenizer = bpe_tokenizer("gpt-2")
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=False)
    return tokenizer


_MADE = {
    "spm": spm_tokenizer, "gemma4": partial(gemma4_tokenizer, VOCABULARY), "wordpiece": wordpiece_tokenizer,
    "unigram": partial(unigram_tokenizer, charsmap=SPACES), "roberta": roberta_tokenizer, "t5": t5_tokenizer,
}  # fmt: skip
_ROLES = {  # special tokens in tokenizer_config.json
    "wordpiece": {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"},
    "t5": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "gemma4": {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>"},
    "spm": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    "plamo": {role: f"<|plamo:{role}|>" for role in ("unk", "bos", "eos", "pad")},
}


@cache
def _files(style: str) -> dict[str, bytes]:
    if style == "world":
        return {"rwkv_vocab_v20230424.txt": world_lines().encode()}
    if style == "pieces":  # fewer pieces than the embedding matrix has rows, and no byte tokens
        pieces = [piece for piece in spm_pieces(VOCABULARY + 100, [TEXT]) if piece[2] != 6]
        return {"tokenizer.model": spm_file(pieces, model=1, charsmap=SPACES)}
    roles = _ROLES.get(style, {"bos": "<s>", "eos": "</s>"})
    found = {"tokenizer_config.json": json.dumps({f"{role}_token": x for role, x in roles.items()}).encode()}
    if style == "plamo":
        return {**found, "tokenizer.jsonl": "".join(json.dumps(entry) + "\n" for entry in plamo_entries()).encode()}
    if style == "spm":
        found["tokenizer.model"] = spm_file(spm_pieces(VOCABULARY, [TEXT]))
    return {**found, "tokenizer.json": _MADE.get(style, partial(bpe_tokenizer, style))().to_str().encode()}


def save_tokenizer(style: str, folder: Path) -> None:
    """Write the tokenizer files of a checkpoint: tokenizer.json and tokenizer_config.json.

    "spm" adds tokenizer.model, and "pieces" writes only tokenizer.model. "world" writes only RWKV's vocabulary file,
    and "plamo" writes PLaMo's instead of tokenizer.json.
    """
    for name, data in _files(style).items():
        (folder / name).write_bytes(data)
