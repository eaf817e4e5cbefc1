"""The keys of mmproj files: the keys of every encoder, and readers for further keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.convert.encoders.row import LAYERS, Encoder, Read, Settings
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig

_WIDTH = ("hidden_size", "width", "d_model")
_HEADS = ("num_attention_heads", "num_heads", "heads", "encoder_attention_heads")
_INNER = ("intermediate_size", "encoder_ffn_dim")


def keys_of(encoder: Encoder, settings: Settings) -> dict[str, Any]:
    """Return the keys of an encoder, with full names."""
    own, kind = settings.own, encoder.kind
    found: dict[str, Any | Read] = {
        f"has_{kind}_encoder": True,
        f"{kind}.projector_type" if encoder.own_key else "projector_type": encoder.projector,
        f"{kind}.projection_dim": settings.text_width,
        f"{kind}.embedding_length": lambda s: own.needed(*_WIDTH),
        f"{kind}.feed_forward_length": lambda s: own.needed(*_INNER),
        f"{kind}.block_count": lambda s: own.needed(*LAYERS),
        f"{kind}.attention.head_count": lambda s: own.needed(*_HEADS),
    }
    if kind == "vision":
        found |= {
            "vision.image_size": lambda s: side(own, "image_size"),
            "vision.patch_size": lambda s: side(own, "patch_size"),
            "vision.image_mean": lambda s: _channels(s.preparing, "image_mean"),
            "vision.image_std": lambda s: _channels(s.preparing, "image_std"),
        }
    found |= dict(encoder.keys)
    read = {key: value(settings) if callable(value) else value for key, value in found.items()}
    if large := next((key for key, value in read.items() if type(value) is int and value >= 1 << 32), ""):
        raise ConvertError(f"{own.path}: clip.{large} would be {read[large]}, more than 32 bits; download it again")
    return {f"clip.{key}": _stored(value) for key, value in read.items() if value is not None}


def _stored(value: Any) -> Any:
    """Return a value in the type that GGUF files have for it."""
    match value:
        case bool() | str():
            return value
        case int():
            return np.uint32(value)
        case float():
            return np.float32(value)
    first = value[0] if value else 0
    return np.array(
        value, np.bool_ if isinstance(first, bool) else np.float32 if isinstance(first, float) else np.int32
    )


def side(config: HfConfig, name: str) -> int:
    """Return the pixels per side. Some checkpoints give both sides."""
    value = config.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return HfConfig(config.path, {name: value}, {}).needed(name)


def _channels(config: HfConfig, name: str) -> list[float]:
    value = config.get(name)
    if not isinstance(value, list) or len(value) != 3 or not all(_is_finite(x) for x in value):
        raise config.error(name, value, "three numbers")
    return [float(x) for x in value]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6


def own(*names: str, otherwise: float | None = None) -> Read:
    """Return a reader of a number in the encoder's table; without `otherwise` the number is required."""
    return lambda s: _real(s.own, names, otherwise)


def outer(*names: str, otherwise: float | None = None) -> Read:
    """Return a reader of a number at the top of config.json."""
    return lambda s: _real(s.config, names, otherwise)


def count(*names: str, otherwise: int | None = None) -> Read:
    """Return a reader of an integer from 1 up at the top of config.json."""
    return lambda s: otherwise if otherwise and s.config.get(*names) is None else s.config.needed(*names)


def own_count(*names: str) -> Read:
    return lambda s: s.own.needed(*names)


def preparing_count(name: str) -> Read:
    return lambda s: s.preparing.needed(name)


def _real(config: HfConfig, names: tuple[str, ...], otherwise: float | None) -> float:
    value = config.real(*names)
    if value is None and otherwise is None:
        raise config.error(names[0], None, "a number")
    return value if value is not None else otherwise  # type: ignore[return-value]


def activation(settings: Settings, wanted: str) -> bool | None:
    """Return True if the encoder has this activation, which a key then says; None for the other one."""
    found = settings.own.choice("hidden_act", of={"silu": 0, "gelu": 1}, default="")
    return True if found == ("silu", "gelu").index(wanted) else None


ACTIVATION: Mapping[str, Read] = {
    "use_silu": lambda s: activation(s, "silu"), "use_gelu": lambda s: activation(s, "gelu"),
}  # fmt: skip


def indexes(config: HfConfig, name: str, most: int) -> list[int]:
    """Return a list of different numbers of layers, each below `most`."""
    value = config.get(name) or []
    known = isinstance(value, list) and all(type(n) is int and 0 <= n < most for n in value)
    if not known or len(set(value)) < len(value):
        raise config.error(name, value, f"a list of different numbers from 0 to {most - 1}")
    return [int(n) for n in value]


def width_of_text(config: HfConfig) -> int:
    """Return the width of the text model."""
    try:
        return config.needed("hidden_size")
    except ConvertError:
        raise ConvertError(f"{config.path}: the text model's hidden_size is missing; download it again") from None
