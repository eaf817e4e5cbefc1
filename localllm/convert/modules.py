"""Read the modules that sentence-transformers adds to a checkpoint (modules.json): pooling, and dense layers after
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.files import check_inside, read_file
from localllm.convert.jsonfile import objects, parse_json, read_json
from localllm.convert.safetensors import Shard
from localllm.convert.tensor import LazyTensor

_MAX_BYTES = 1 << 20  # maximum bytes of modules.json
_POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}  # GGUF pooling types
_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}


@dataclass(frozen=True, slots=True)
class Module:
    """A step after the transformer: its kind, and the folder that contains its files."""

    kind: str  # last component of the module's type: Transformer, Pooling, Dense, Normalize
    folder: Path


def read_modules(folder: Path) -> tuple[Module, ...]:
    """Return the modules of a checkpoint; the list is empty without modules.json."""
    path = folder / "modules.json"
    if not path.is_file():
        return ()
    found = []
    for entry in objects(parse_json(read_file(path, _MAX_BYTES), str(path))):
        place = PurePosixPath(str(entry.get("path", "")))
        if place.is_absolute() or ".." in place.parts:
            raise ConvertError(f"{path}: '{printable(str(place))}' is not a folder inside this one; download it again")
        check_inside(folder / place, folder)
        found.append(Module(str(entry.get("type")).rpartition(".")[2], folder / place))
    return tuple(found)


def pooling_of(modules: tuple[Module, ...]) -> int | None:
    """Return the GGUF pooling type; None if no module sets it."""
    for module in modules:
        if module.kind == "Pooling":
            path = module.folder / "config.json"
            values = read_json(path)
            modes = [mode for flag, mode in _FLAGS.items() if values.get(flag) is True]
            modes = modes or [str(values.get("pooling_mode"))]
            if len(modes) != 1 or modes[0] not in _POOLINGS:
                found = ", ".join(printable(mode) for mode in modes)
                raise ConvertError(f"{path}: the pooling is {found}; supported: one of {', '.join(_POOLINGS)}")
            return _POOLINGS[modes[0]]
    return None


def dense_shards(modules: tuple[Module, ...]) -> list[Shard]:
    """Open the weight files of the dense layers, in order."""
    shards: list[Shard] = []
    try:
        shards.extend(Shard(module.folder / "model.safetensors") for module in modules if module.kind == "Dense")
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return shards


def dense_tensors(shards: list[Shard]) -> Iterator[LazyTensor]:
    """Yield the weight matrices of the dense layers, `dense_2` and `dense_3`; raise ConvertError for a bias or
    activation."""
    for number, shard in enumerate(shards, 2):
        config = read_json(shard.path.with_name("config.json"))
        activation = str(config.get("activation_function"))
        if list(shard.tensors) != ["linear.weight"] or number > 3 or not activation.endswith("Identity"):
            raise ConvertError(
                f"{shard.path.parent}: holds {printable(', '.join(shard.tensors))} with activation "
                f"{printable(activation)}; supported: two layers with linear.weight alone and without activation"
            )
        yield t.renamed(shard.tensors["linear.weight"], f"dense_{number}.weight")


def width_keys(tensors: list[LazyTensor]) -> dict[str, Any]:
    """Return the output width of the single dense layer, under a key without the architecture prefix."""
    if len(tensors) > 1:
        raise ConvertError(f"holds {len(tensors)} dense layers after the model; files of this architecture have one")
    return {"embedding_length_out": tensors[0].shape[0]}


def dense_keys(tensors: list[LazyTensor]) -> dict[str, Any]:
    """Return the widths of the dense layers, under keys without the architecture prefix."""
    widths = {x.name.removesuffix(".weight"): x.shape for x in tensors if len(x.shape) == 2}
    return {f"{name}_feat_{way}": n for name, (out, into) in widths.items() for way, n in (("in", into), ("out", out))}


def dropped(modules: tuple[Module, ...], architecture: str) -> list[str]:
    """Return notes about dense layers, if GGUF files of the architecture cannot store them."""
    return [
        f"{module.folder.name} is skipped: files of {architecture} have no dense layer after the pooling"
        for module in modules
        if module.kind == "Dense"
    ]
