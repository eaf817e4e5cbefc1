"""`Projector`: an mmproj file's rules for pictures and sounds, from decoded arrays to marker texts and pieces.

    projector = Projector.of(file, TextModel(width, mrope, tokens))
    parts = projector.picture([picture]) + ["describe it"]     # pass two frames for a pair of a video

Each marker text is tokenized alone, with special tokens parsed; the ids of adjacent texts are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.base.printable import printable
from localllm.gguf import GGUFFile
from localllm.media.encoder_input import EncoderInput, Flags
from localllm.media.errors import MediaError
from localllm.media.layout import TextModel, laid_out, picture_piece
from localllm.media.opened import Weights, picture_settings, sound_settings
from localllm.media.pictures import PICTURES
from localllm.media.settings import Keys
from localllm.media.sounds import SOUNDS, check_length
from localllm.media.views import BLOCK, View
from localllm.quant import dequantize

Part = str | EncoderInput

_SMALL = 16 << 20  # bytes
_BOTH = {"qwen2.5o": ("qwen2.5vl_merger", "qwen2a")}  # one type for both encoders


class Projector:
    """The rules of one mmproj file, called `name` in messages. Raises MediaError for a file that they cannot serve.

    `minimum_tokens` and `maximum_tokens` replace the limits of a picture.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        text: TextModel,
        weights: Weights,
        minimum_tokens: int | None = None,
        maximum_tokens: int | None = None,
        name: str = "mmproj",
    ) -> None:
        keys, self._text = Keys(metadata, name), text
        if minimum_tokens and maximum_tokens and minimum_tokens > maximum_tokens:
            raise MediaError(f"a picture needs {minimum_tokens} to {maximum_tokens} tokens; exchange the two limits")
        self.picture_type, self.sound_type = projector_types(keys)
        self._row = PICTURES.get(self.picture_type)
        self._sound_row = SOUNDS.get(self.sound_type)
        if self._row:
            if self.picture_type == "kimik25" and "<|begin_of_image|>" in text.tokens:  # GLM-5.2-V
                self._row = replace(self._row, begin="<|begin_of_image|>", end="<|end_of_image|>")
            self._settings = picture_settings(
                keys, self.picture_type, self._row, weights, minimum_tokens, maximum_tokens
            )
            self._row = self._settings.row
        if self._sound_row:
            self._sound_settings = sound_settings(keys, self._sound_row, weights)

    @classmethod
    def of(
        cls, file: GGUFFile, text: TextModel, minimum_tokens: int | None = None, maximum_tokens: int | None = None
    ) -> Projector:
        """Return the rules of an open mmproj file. Reads only the small tensors that belong to preprocessing."""
        name = printable(file.path.name, None)
        return cls(file.metadata, text, lambda tensor: _small(file, tensor), minimum_tokens, maximum_tokens, name)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the file reads: "image", "audio"."""
        return ("image",) * bool(self._row) + ("audio",) * bool(self._sound_row)

    @property
    def rate(self) -> int:
        """Samples per second that `sound` expects; 0 without an encoder of sound."""
        return self._sound_row.rate if self._sound_row else 0

    @property
    def frames(self) -> int:
        """The number of frames of a video that `picture` takes together."""
        return self._row.frames if self._row else 1

    def check_frames(self, count: int) -> None:
        """Raise MediaError if a picture does not have this number of frames."""
        if not 1 <= count <= self.frames:
            raise MediaError(f"expected 1 to {self.frames} frames of equal size, got {count}: send single pictures")

    @property
    def placed(self) -> bool:
        """Whether a picture depends on its number in the prompt, or on the tokens before it."""
        return self._row is not None and (self._row.numbered or self._row.lead_pad)

    @property
    def together(self) -> int:
        """The largest number of tokens of a picture that see each other; 0 if pictures are causal."""
        if not (row := self._row) or not row.non_causal or self._text.width in row.causal_widths:
            return 0
        values = self._settings.values
        return (values.max_pixels or values.image**2) // values.align**2

    def picture(self, frames: Sequence[NDArray[np.uint8]], index: int = 0, before: int = 0) -> list[Part]:
        """Return the parts of a picture: (height, width, 3) uint8, or of two frames of equal size.

        `index` counts the pictures before it in the prompt, `before` the tokens before it, without BOS.
        """
        if not (row := self._row):
            raise MediaError(f"this model reads {self._reads}, no pictures; remove the picture")
        self.check_frames(len(frames))
        if len(shapes := {frame.shape for frame in frames}) > 1:
            raise MediaError(f"expected frames of equal size, got {len(shapes)} sizes: send single pictures")
        for frame in frames:
            if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
                raise MediaError(f"a picture is uint8 (height, width, 3), got {frame.dtype} {frame.shape}")
        settings = self._settings.values
        views = [row.rule(frame, settings) for frame in frames]
        if row.lead_pad:
            (view,) = views[0].tiles
            views[0].tiles[0] = View(view.values, Flags(lead_pad=BLOCK - 1 - before % BLOCK))
        if views[0].overview or views[0].columns:
            return laid_out(views[0], row, settings, self._text)
        tensors = [view for each in views for view in each.tiles]
        piece = picture_piece(tensors, row, settings, self._text, index)
        return [part for part in (row.begin, piece, row.end) if part]

    def sound(self, samples: NDArray[np.float32]) -> list[Part]:
        """Return the parts of a sound: mono float32 samples at `rate`."""
        if not (row := self._sound_row):
            raise MediaError(f"this model reads {self._reads}, no sound; remove the sound")
        if samples.ndim != 1:
            raise MediaError(f"a sound is float32 (samples,), got {samples.dtype} {samples.shape}")
        check_length(samples, row)
        parts: list[Part] = [row.begin] if row.begin else []
        for tensor in row.rule(samples.astype(np.float32, copy=False), self._sound_settings):
            tokens = row.count(tensor.shape[1], self._sound_settings)
            parts.append(
                EncoderInput("audio", (np.ascontiguousarray(tensor),), Flags(), tokens, tokens, 1, tokens, True)
            )
        return parts + [row.end] * bool(row.end)

    @property
    def _reads(self) -> str:
        return {"image": "pictures", "audio": "sound"}[self.kinds[0]]


def _small(file: GGUFFile, name: str) -> NDArray[np.float32] | None:
    """Return the values of a tensor, or None if the file lacks it."""
    if (tensor := file.tensors.get(name)) is None:
        return None
    if tensor.nbytes > _SMALL:
        raise MediaError(f"{printable(file.path.name, None)}: tensor '{name}' is too large; get another file")
    return dequantize(tensor.read(0, tensor.rows), tensor.format)


def projector_types(keys: Keys) -> tuple[str, str]:
    """Return the projector types for pictures and for sound; "" for an encoder that the file lacks.

    Raises MediaError for an unsupported type, and for a file without encoders.
    """
    common = keys.text("projector_type")
    kinds = {"vision": keys.flag("has_vision_encoder"), "audio": keys.flag("has_audio_encoder")}
    if not any(kinds.values()):
        raise MediaError(f"{keys.name}: has no encoder of pictures or sound; choose an mmproj file")
    types = {kind: common or keys.text(f"{kind}.projector_type") if has else "" for kind, has in kinds.items()}
    if common in _BOTH:
        types = {kind: type if kinds[kind] else "" for kind, type in zip(types, _BOTH[common], strict=True)}
    for kind, table in (("vision", PICTURES), ("audio", SOUNDS)):
        if kinds[kind] and types[kind] not in table:
            what = printable(repr(types[kind])[:60], None)
            raise MediaError(
                f"{keys.name}: projector type {what} is not supported for {kind}; supported: {', '.join(table)}"
            )
    return types["vision"], types["audio"]


__all__ = ["Part", "Projector", "TextModel", "Weights", "projector_types"]
