"""Mutated checkpoints with encoders: a key or a tensor of a tiny checkpoint is missing, or is something else."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from localllm.convert import ConvertError, EncoderCheckpoint
from tests.localllm.convert.mmproj_cases import stored, write
from tests.localllm.convert.support import edit_tensors

VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 7, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 40, 0.5, -2.5, 1e300, "", "\x1b[2Jx", "gelu",
    [], [1], [1, 2], [0.5] * 3, [[1]], {}, {"a": 1}, "8" * 5000,
)  # fmt: skip


def _places(table: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in table.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += _places(value, (*path, key))
    return found


def mutate(name: str, folder: Path, seed: int) -> str:
    """Write a mutated checkpoint, and return what was changed."""
    chance = random.Random(f"{name} {seed}")
    spec = copy.deepcopy(stored()[name])
    if chance.random() < 0.6:
        table = spec[chance.choice(["config", "config", "config", "preparing"])]
        path = chance.choice(_places(table))
        for key in path[:-1]:
            table = table[key]
        value = chance.choice(VALUES)
        if chance.random() < 0.2:
            del table[path[-1]]
        else:
            table[path[-1]] = value
        write(spec, folder)
        return f"{'.'.join(path)} = {value!r}"
    write(spec, folder)
    tensor = chance.choice(spec["tensors"])[0]
    what = chance.choice(["missing", "shape", "flat", "dtype", "another"])

    def change(header: dict[str, Any]) -> None:
        entry = header[tensor]
        if what == "missing":
            del header[tensor]
        elif what == "shape":
            entry["shape"] = entry["shape"][::-1]
        elif what == "flat":
            size = 1
            for n in entry["shape"]:
                size *= n
            entry["shape"] = [size]
        elif what == "dtype":
            entry |= {"dtype": "I32"}
        else:
            header[f"{tensor}.x"] = entry

    edit_tensors(folder / "model.safetensors", change)
    return f"{tensor} {what}"


def check(name: str, folder: Path, seed: int) -> str:
    """Open a mutated checkpoint; return the error, or "". Any other error than one line is raised."""
    changed = mutate(name, folder, seed)
    try:
        with EncoderCheckpoint(folder) as source:
            source.fixed("Q8_0")
            for tensor in source.tensors.values():
                tensor.read(0, tensor.rows)
        return ""
    except ConvertError as error:
        text = str(error)
        assert "\n" not in text, changed
        assert "\x1b" not in text, changed
        assert len(text) < 1500, changed
        assert text.startswith(str(folder)), changed
        return text
    except BaseException as error:
        error.add_note(f"{name}, seed {seed}: {changed}; {json.dumps(changed)[:200]}")
        raise
