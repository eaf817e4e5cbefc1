"""Damaged Hugging Face checkpoints are opened, and converted to a GGUF that then tokenizes text."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from localllm.convert import open_checkpoint, tokenizer_keys
from localllm.gguf import open_gguf, write_gguf
from localllm.quantize.conversion import ConversionSettings, conversion
from localllm.quantize.jobs import copy_jobs, metadata
from localllm.sandbox import ResourceLimits, folder_tokenizer
from localllm.tokenizer import Tokenizer, has_tokenizer
from tests.fuzz import values
from tests.fuzz.case import Case, Wrong
from tests.fuzz.children import PerProcess
from tests.localllm.convert.checkpoints import write
from tests.localllm.convert.support import HF

_MADE = ("llama", "mistral", "gemma", "mixtral", "phi3", "qwen2moe")  # in addition to the stored checkpoints HF
_SENTENCE = "Hello <|im_start|> the naïve café\n\n 1234 </s> 日本語 🙂"
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "C64", "x")

_SPLIT: dict[str, Any] = {"type": "Split", "behavior": "Isolated", "invert": False}
_HOSTILE: dict[str, list[Any]] = {  # values for tokenizer.json
    "normalizer": [
        {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 999}] * 4,
        },
        {"type": "Replace", "pattern": {"Regex": "^((\\w|\\s|.|\\n)+)+\\x00$"}, "content": "x"},
        {"type": "Prepend", "prepend": "x" * 100_000},
        {"type": "Sequence", "normalizers": ["x"]},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    ],
    "pre_tokenizer": [
        {**_SPLIT, "pattern": {"Regex": "(a+)+$"}},
        {**_SPLIT, "pattern": {"Regex": "("}},
        {"type": "Sequence", "pretokenizers": []},
        {"type": "Metaspace", "replacement": "xx", "prepend_scheme": "always", "split": True},
    ],
    "post_processor": [{"type": "TemplateProcessing", "single": "<s> $A", "pair": "", "special_tokens": {}}],
    "decoder": [{"type": "Strip", "content": " ", "start": 2**40, "stop": 0}],
    "added_tokens": [
        [{"id": 2**31, "content": "<x>"}],
        [{"id": 0, "content": ""}],
        [{"id": -1, "content": "a"}] * 1000,
    ],
}


class Kind:
    together: ClassVar[int] = 50
    seconds: ClassVar[float] = 30.0

    def __init__(self, home: Path) -> None:
        child = PerProcess(folder_tokenizer.__name__, ResourceLimits(seconds=1.0, wall=10.0))
        tokenizer_keys.Confined = lambda *_: child  # type: ignore[assignment,misc]
        for name in _MADE:
            (home / name).mkdir()
            write(name, home / name)
        folders = [home / name for name in _MADE] + [path for path in sorted(HF.iterdir()) if path.is_dir()]
        self._folders = {f.name: {p.name: p.read_bytes() for p in sorted(f.iterdir())} for f in folders}
        for folder in folders:
            (home / f"used-{folder.name}").mkdir()
            use(folder, home / f"used-{folder.name}")

    def make(self, random: Random, folder: Path) -> Case:
        name = random.choice(list(self._folders))
        files, changes = dict(self._folders[name]), [name]
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            file = random.choice(list(files))
            changes.append(f"{file}: {_change(random, file, files)}")
        source, target = folder / "in", folder / "out"
        source.mkdir()
        target.mkdir()
        for file, data in files.items():
            (source / file).write_bytes(data)
        return Case(tuple(changes), lambda: use(source, target))


def _change(random: Random, file: str, files: dict[str, bytes]) -> str:
    """Change a file of a checkpoint. Return a description."""
    how, data = random.random(), files[file]
    if how < 0.04:
        del files[file]
        return "removed"
    if how > 0.1:
        with suppress(ValueError, RecursionError, struct.error):  # an earlier change made the file unreadable
            return _change_content(random, file, files)
    files[file] = values.damage(random, data, random.choice((100, 2000, None)))
    return "bytes"


def _change_content(random: Random, file: str, files: dict[str, bytes]) -> str:
    data = files[file]
    if file.endswith(".safetensors"):
        length = struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8 : 8 + length])
        said = _change_header(random, header)
        text = values.json_text(random, header)
        claimed = len(text) if random.random() < 0.95 else values.integer(random, len(text))
        files[file] = struct.pack("<Q", claimed % 2**64) + text + data[8 + length :]
        return said
    if file.endswith(".json"):
        tree = json.loads(data)
        if file == "tokenizer.json" and random.random() < 0.3:
            key = random.choice(list(_HOSTILE))
            tree[key] = new = random.choice(_HOSTILE[key])
            said = f"{key} = {str(new)[:60]}"
        else:
            said = values.change_json(random, tree)
        files[file] = values.json_text(random, tree)
        return said
    files[file] = values.damage(random, data)
    return "bytes"


def _change_header(random: Random, header: dict[str, Any]) -> str:
    names = [name for name, entry in header.items() if isinstance(entry, dict) and {"shape"} < entry.keys()]
    if not names or random.random() < 0.3:
        return values.change_json(random, header)
    name, how = random.choice(names), random.random()
    entry, other = header[name], header[random.choice(names)]
    if how < 0.25:
        entry["dtype"] = random.choice(_DTYPES)
    elif how < 0.5:
        entry["shape"] = random.choice((other["shape"], [8, 4], [], [0], [2**62, 2], [-1, 2], [1.5]))
    elif how < 0.75:
        start, stop = 0, 64
        with suppress(KeyError, TypeError, ValueError):
            start, stop = (int(n) for n in entry["data_offsets"])
        near = (
            [stop, start],
            [start + 1, stop + 1],
            [start, 2**63],
            [-4, stop - start],
            other.get("data_offsets"),
            [0],
        )
        entry["data_offsets"] = random.choice(near)
    else:
        header[random.choice(("x", name + "x", "model.layers.99.mlp.up_proj.weight", "\x1b[31m"))] = header.pop(name)
        return f"{name} renamed"
    return f"{name} = {str(header[name])[:80]}"


def use(source: Path, target: Path) -> str:
    """Convert a checkpoint as `quantize IN COPY` does, and open the GGUF."""
    path = target / "model.gguf"
    with (
        open_checkpoint(source) as model,
        conversion(copy_jobs(model), model.tensors, ConversionSettings(1)) as tensors,
    ):
        write_gguf(path, metadata(model.stored, None, None, ""), tensors)
    with open_gguf(path) as file:
        for tensor in file.tensors.values():
            tensor.read(0, tensor.rows)
        if not has_tokenizer(file.metadata):
            return "converted"
        tokenizer = Tokenizer.from_metadata(file.metadata)
        ids = tokenizer.encode(_SENTENCE, parse_special=True)
        if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise Wrong(f"ids {min(ids)} to {max(ids)} in a vocabulary of {tokenizer.vocab_size}")
        tokenizer.decode(ids)
        return "converted"
