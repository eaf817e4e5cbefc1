"""Sets of files that claim to be one split model, with missing, duplicated, renamed, truncated and
contradictory parts.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from localllm.gguf import open_gguf, write_gguf
from localllm.gguf.identity import identity
from tests.fuzz import values
from tests.fuzz.case import Case, Wrong
from tests.fuzz.gguf import change_counts, change_key, change_tensor
from tests.fuzz.image import STRING, Array, Image, decode

PARTS = 3
_TYPES = (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)


class Kind:
    together: ClassVar[int] = 200
    seconds: ClassVar[float] = 20.0

    def __init__(self, home: Path) -> None:
        self._parts = [decode(_part(home / "part.gguf", index)) for index in range(PARTS)]

    def make(self, random: Random, folder: Path) -> Case:
        parts = {_name(index): part.copy() for index, part in enumerate(self._parts)}
        changes = [_change(random, parts) for _ in range(random.choice((1, 1, 2, 3)))]
        for name, part in parts.items():
            data = part.encode()
            if random.random() < 0.15:
                data = values.damage(random, data, len(data) - len(part.data))
                changes.append(f"{name} bytes")
            (folder / name).write_bytes(data)
        if random.random() < 0.1:
            changes.append(_links(random, folder))
        opened = folder / random.choice((*(_name(0),) * 8, *parts, "m.gguf"))
        return Case((*changes, f"opened {opened.name}"), lambda: use(opened))


def _part(path: Path, index: int) -> bytes:
    """Return part `index` as llama.cpp's gguf-split writes it. Only the first part has the model's metadata."""
    keys: dict[str, Any] = {"split.no": np.uint16(index), "split.count": np.uint16(PARTS)}
    keys["split.tensors.count"] = np.int32(2 * PARTS)
    if not index:
        keys |= {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "b", "c"]}
    tensors = [(f"blk.{index}.{name}.weight", "I8", (2, 32), bytes([index] * 64)) for name in ("a", "b")]
    write_gguf(path, keys, tensors, overwrite=True)
    return path.read_bytes()


def _name(index: int, count: int = PARTS) -> str:
    return f"m-{index + 1:05d}-of-{count:05d}.gguf"


def _change(random: Random, parts: dict[str, Image]) -> str:
    """Change the set. Return a description."""
    name = random.choice(list(parts))
    part, how = parts[name], random.random()
    if how < 0.35:
        key = random.choice(("split.no", "split.count", "split.tensors.count"))
        kind = random.choice(_TYPES)
        part.set(key, kind, new := random.choice((0, 1, 2, 3, 4, values.integer(random, 3))))
        return f"{name} {key} = {new} type {kind}"
    if how < 0.4:
        part.set(random.choice(("split.no", "split.count")), STRING, b"3")
        part.set("split.tensors.count", 9, Array(4, [6]))
        return f"{name} types"
    if how < 0.5:
        if len(parts) > 1:
            del parts[name]
        return f"{name} missing"
    if how < 0.6:
        other = random.choice(list(parts))
        if random.random() < 0.5:
            parts[other] = part.copy()
            return f"{other} is a copy of {name}"
        parts[other].entries, parts[other].data = list(part.entries), part.data
        return f"{other} has the tensors of {name}"
    if how < 0.7:
        other = _name(random.randrange(5), random.choice((1, 2, 3, 4, 65535, 99999)))
        parts[other] = parts.pop(name)
        return f"{name} renamed {other}"
    if how < 0.8:
        part.keys = [key for key in part.keys if not key.name.startswith(b"split.")]
        return f"{name} without split keys"
    return f"{name}: {random.choice((change_tensor, change_tensor, change_key, change_counts))(random, part)}"


def _links(random: Random, folder: Path) -> str:
    """Replace a part by a link to itself, another part, a folder, or a missing file."""
    path = folder / _name(random.randrange(PARTS))
    path.unlink(missing_ok=True)
    path.symlink_to(target := random.choice((path.name, _name(0), ".", "nothing", "/dev/null", "/dev/zero")))
    return f"{path.name} links to {target}"


def use(path: Path) -> str:
    """Open a set and read all of it."""
    with open_gguf(path) as file:
        for tensor in file.tensors.values():
            rows = tensor.read(0, min(tensor.rows, 100))
            if rows.tobytes() != b"".join(tensor.read(i, i + 1).tobytes() for i in range(min(tensor.rows, 100))):
                raise Wrong(f"{tensor.name}: its rows differ when read one by one")
        if sum(p.stat().st_size for p in file.paths) != file.size or len(identity(file)) != 32:
            raise Wrong("its size is not that of its files")
        list(file.metadata.get("tokenizer.ggml.tokens", ()))  # type: ignore[call-overload]
        return "opened"
