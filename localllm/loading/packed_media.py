"""The input of an encoder as bytes, for another process: a header in JSON, and arrays that are read without pickle."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.media import EncoderInput
from localllm.media.encoder_input import Flags

MOST_TENSORS = 2  # of one input: the frames of a video
MOST_TOKENS, MOST_START = 1 << 24, 1 << 31  # of an input, and before it
HEADERS = 1 << 20  # bytes of everything but the tensors
DAMAGED = "a picture or sound arrived damaged; use the same version of localllm on all machines"
_NUMBERS = ("tokens", "columns", "rows", "positions")


def pack(piece: EncoderInput, start: int) -> bytes:
    """Return an input of an encoder, and the position of its first token, as bytes."""
    numbers = {name: int(getattr(piece, name)) for name in _NUMBERS}
    header = numbers | {"kind": piece.kind, "causal": piece.causal, "start": start, "flags": asdict(piece.flags)}
    arrays: dict[str, Any] = {f"tensor{n}": each for n, each in enumerate(piece.tensors)}
    arrays |= {name: each for name in ("axes", "absolute") if (each := getattr(piece, name)) is not None}
    data = io.BytesIO()
    np.savez(data, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
    return data.getvalue()


def unpack(data: bytes, kinds: Sequence[str], most: int) -> tuple[EncoderInput, int]:
    """Return what `pack` was given. Raises LocalLLMError for damaged bytes, another kind of encoder, and more than
    `most` bytes of tensors.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(each.file_size for each in archive.infolist()) > most + HEADERS:
                raise LocalLLMError(DAMAGED)
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays: dict[str, NDArray[Any]] = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
        given: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in header["flags"].items()
        }
        count = sum(name.startswith("tensor") for name in arrays)
        tensors = tuple([arrays.pop(f"tensor{n}") for n in range(count)])
        tokens, columns, rows, positions = numbers = [int(header[name]) for name in _NUMBERS]
        axes, absolute, start = arrays.pop("axes", None), arrays.pop("absolute", None), int(header["start"])
        flags, causal = Flags(**given), bool(header["causal"])
        piece = EncoderInput(header["kind"], tensors, flags, tokens, columns, rows, positions, causal, axes, absolute)
    except Exception as error:  # damaged bytes make these readers raise many kinds
        raise LocalLLMError(DAMAGED) from error
    table = (piece.tokens, 4)
    fits = (
        piece.kind in kinds and not arrays and 1 <= len(tensors) <= MOST_TENSORS and 0 <= start < MOST_START
        and all(each.dtype == np.float32 and each.ndim in (2, 3) and each.size for each in tensors)
        and min(numbers) > 0 and max(numbers) < MOST_TOKENS
        and (axes is None or (axes.dtype == np.int32 and axes.shape == table))
        and (absolute is None or (axes is not None and absolute.dtype == np.bool_ and absolute.shape == table))
    )  # fmt: skip
    if not fits:
        raise LocalLLMError(DAMAGED)
    return piece, start
