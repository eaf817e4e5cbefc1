"""Read config.json of a Hugging Face checkpoint as one flat table. Errors name the file and the key."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from localllm.base.printable import printable
from localllm.convert.errors import ConvertError
from localllm.convert.jsonfile import read_json

# Names of the nested table with the text model's settings, outermost first. Qwen Omni nests it in the table of its
# thinker. The reference implementation of InternVL calls it llm_config, and DeepSeek-OCR's language_config.
_FOR_TEXT = (("thinker_config",), ("text_config", "talker_config", "llm_config", "language_config"))
_MAX = 1 << 31  # maximum of any integer, since GGUF stores most integers in 32 bits

# Names of sizes in configurations that do not follow transformers, by its names.
_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "model_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_hidden_size", "mlp_hidden_size"),
    "max_position_embeddings": (
        *("n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length", "max_context_length"),
        "model_max_length",
    ),
}


def is_number(value: object) -> bool:
    """Return whether a value is a number from 0 up."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max  # type: ignore[operator]


def is_count(value: object) -> bool:
    """Return whether a value is a number from 1 up that fits into 16 bits."""
    return type(value) is int and 0 < value < 1 << 16


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The values of config.json, and transformers' `defaults` for this architecture. A `null` counts as missing."""

    path: Path
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, *names: str) -> Any:
        """Return the value of the first name in config.json, else a default, else None."""
        return self._find(names)[1]

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """Return the value, and the key that config.json has for it."""
        keys = [key for name in names for key in (name, *_OTHER_NAMES.get(name, ()))]
        found = ((key, table.get(key)) for table in (self.values, self.defaults) for key in keys)
        return next((pair for pair in found if pair[1] is not None), (names[0], None))

    def integer(self, *names: str) -> int | None:
        key, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX:
            raise self.error(key, value, "a whole number from 0 up")
        return value

    def real(self, *names: str) -> float | None:
        key, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, value, "a number")
        return float(value)

    def flag(self, *names: str) -> bool | None:
        key, value = self._find(names)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def needed(self, *names: str) -> int:
        """Return a required integer of at least 1."""
        value = self.integer(*names)
        if not value:
            raise self.error(self._find(names)[0], value, "a whole number from 1 up")
        return value

    @property
    def layers(self) -> int:
        return self.needed("num_hidden_layers")

    @property
    def heads(self) -> int:
        return self.needed("num_attention_heads")

    @property
    def width(self) -> int:
        return self.needed("hidden_size")

    def per_layer(self, name: str, expected: str, valid: Callable[[Any], bool]) -> list[Any]:
        """Return a list with a valid value for each layer. `{}` in the description is the number of layers."""
        found, layers = self.get(name), self.layers
        if not isinstance(found, list) or len(found) != layers or not all(map(valid, found)):
            raise self.error(name, found, expected.format(layers))
        return found

    def choice(self, *names: str, of: Mapping[str, int], default: str) -> int:
        """Return the number of a setting whose value is one of several words."""
        key, found = self._find(names)
        found = found or default
        if not isinstance(found, str) or found not in of:
            raise self.error(key, found, " or ".join(of))
        return of[found]

    def table(self, *names: str) -> dict[str, Any]:
        key, value = self._find(names)
        value = value or {}
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return value

    def error(self, name: str, value: object, expected: str) -> ConvertError:
        found = "is missing" if value is None else f"is {printable(str(value))}"
        return ConvertError(f"{self.path}: {name} {found}; expected {expected}")

    def inner(self, name: str, *others: str) -> HfConfig:
        """Return a nested table by its name, or by another of its names; it is empty if missing."""
        return self.below(name, self.table(name, *others))

    def below(self, name: str, values: Mapping[str, Any]) -> HfConfig:
        """Return a nested table."""
        return HfConfig(self.path.with_name(f"{self.path.name} {name}"), values, {})


T = TypeVar("T")
Reader = Callable[[HfConfig], T]  # reads a value from config.json


def read_config(folder: Path) -> HfConfig:
    """Read the text model's configuration. Keys of a nested table (text_config, ...) override the top level."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConvertError(f"{folder}: no config.json; give a model folder as saved by transformers")
    values = merged = read_json(path)
    for names in _FOR_TEXT:
        if name := next((name for name in names if values.get(name)), None):
            values = values[name]
            if not isinstance(values, dict):
                raise ConvertError(f"{path}: {name} is not an object; download it again")
            merged = {**merged, **{key: value for key, value in values.items() if key != "architectures"}}
    return HfConfig(path, merged, {})


def class_of(config: HfConfig) -> str:
    """Return the name of the model class in transformers."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", names, "the name of one model class")
    return names[0]
