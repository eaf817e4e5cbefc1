"""Layouts and tensors without the kit: stored hashes of a few projector types, and hostile keys of mmproj files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.gguf import open_gguf, write_gguf
from localllm.media import EncoderInput, Flags, MediaError, Projector, TextModel
from localllm.media.pictures import PICTURES
from localllm.media.sounds import SOUNDS

pytest.importorskip("PIL", reason="needs Pillow")

HALF = np.full(3, 0.5, np.float32)


def picture(width: int, height: int) -> NDArray[np.uint8]:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 7 + y, y * 5, x * y // 3], -1).astype(np.uint8)


def metadata(kind: str, type: str, **changes: Any) -> dict[str, Any]:
    """Return the keys of a small file of any type."""
    encoder = "vision" if kind == "image" else "audio"
    keys: dict[str, Any] = {
        "has_vision_encoder": kind == "image",
        "has_audio_encoder": kind == "audio",
        "projector_type": type,
        "vision.image_mean": HALF,
        "vision.image_std": HALF,
        "vision.patch_size": 14,
        "vision.image_size": 112,
        "vision.spatial_merge_size": 2,
        "vision.image_min_pixels": 784,
        "vision.image_max_pixels": 78400,
        "vision.projector.query_side": 2,
        "vision.projector.window_side": 4,
        "audio.num_mel_bins": 16,
        "audio.projector.stack_factor": 4,
        "audio.projector.window_size": 15,
        "audio.projector.downsample_rate": 5,
        "audio.local_group_size": 4,
    }
    if type == "granite4_vision":
        keys["vision.image_grid_pinpoints"] = np.array([112, 224, 224, 112], np.int32)
    if type == "minicpmv4_6":
        keys["vision.projector.scale_factor"] = 4
    return {f"clip.{key}": value for key, value in (keys | {f"{k}": v for k, v in changes.items()}).items()} | {
        "general.architecture": f"clip {encoder}"
    }


def weights(name: str) -> NDArray[np.float32] | None:
    return {"a.mel_filters": np.ones(16 * 257, np.float32), "a.window": np.ones(400, np.float32)}.get(name)


def projector(kind: str, type: str, text: TextModel = TextModel(64), **changes: Any) -> Projector:  # noqa: B008
    return Projector(metadata(kind, type, **changes), text, weights)


def outline(parts: list[str | EncoderInput]) -> list[Any]:
    """Return the texts, and of the pieces the sizes and the number of tokens."""
    return [
        part if isinstance(part, str) else (*(each.shape[:2] for each in part.tensors), part.tokens) for part in parts
    ]


def test_tiles_stand_between_their_marks() -> None:
    parts = projector("image", "idefics3", **{"vision.preproc_image_size": 224}).picture([picture(90, 40)])
    begin, tile = "<fake_token_around_image>", ((112, 112), 64)
    assert outline(parts) == [
        f"{begin}<row_1_col_1>", tile, f"{begin}<row_1_col_2>", tile,
        f"\n\n{begin}<global-img>", tile, begin,
    ]  # fmt: skip
    parts = projector("image", "resampler", minicpmv_version=2).picture([picture(200, 300)])
    image, end = "<image>", "</image>"
    row = [image, ((112, 112), 96), end] * 2
    assert outline(parts) == [
        image, ((140, 98), 96), end, "<slice>", *row, "\n", *row, "\n", *row, "</slice>"
    ]  # fmt: skip


def test_positions_of_mrope() -> None:
    (_, piece, _) = projector("image", "qwen3vl_merger", TextModel(64, mrope=True)).picture([picture(112, 84)])
    assert isinstance(piece, EncoderInput)
    assert (piece.columns, piece.rows, piece.tokens, piece.positions, piece.causal) == (4, 3, 12, 4, True)
    assert piece.axes is not None
    assert piece.axes.tolist() == [[0, y, x, 0] for y in range(3) for x in range(4)]


def test_a_key_covers_content_and_layout() -> None:
    """Equal pictures have equal keys; another pixel, flag or layout gives another key."""

    def key(frame: NDArray[np.uint8], mrope: bool = False, type: str = "qwen3vl_merger") -> bytes:
        (piece,) = (
            p for p in projector("image", type, TextModel(64, mrope)).picture([frame]) if isinstance(p, EncoderInput)
        )
        return piece.key

    plain, other = picture(84, 60), picture(84, 60)
    other[3, 4, 1] ^= 64
    keys = [key(plain), key(other), key(plain, True), key(plain, type="qwen2vl_merger")]
    assert keys[0] == keys[3] == key(plain.copy())
    assert len(set(keys)) == 3
    tensor = np.zeros((2, 2, 3), np.float32)
    pieces = [EncoderInput("image", (tensor,), flags, 1, 1, 1, 1, True) for flags in (Flags(), Flags(lead_pad=1))]
    assert pieces[0].digest != pieces[1].digest


# The first 8 digits of the SHA-256 of all tensors; equal to the kit's rules when they were stored.
HASHES = {
    "mlp": "51beb005",
    "gemma3": "097e8e2c",
    "qwen2.5vl_merger": "96b52f60",
    "pixtral": "b0fc6ff6",
    "idefics3": "7d352b6c",
    "internvl": "edfeaa2e",
    "resampler": "b69bf45c",
    "lfm2": "f2438eec",
    "hunyuanvl": "3f2c5089",
    "step3vl": "3194ac1b",
    "deepseekocr": "b11c7d99",
    "granite4_vision": "94249212",
    "deepseek4v": "5890fa77",
    "glm5v": "65cbde1d",
}


@pytest.mark.parametrize("type", HASHES)
def test_stored_hashes(type: str) -> None:
    digest = hashlib.sha256()
    for frame in (picture(61, 43), picture(300, 200), picture(20, 400)):
        for part in projector("image", type).picture([frame]):
            digest.update(part.encode() if isinstance(part, str) else part.digest)
    assert digest.hexdigest()[:8] == HASHES[type]


SAMPLES = (0.4 * np.sin(np.arange(16000) ** 1.3 * 0.01)).astype(np.float32)


@pytest.mark.parametrize("type", SOUNDS)
def test_a_sound_of_each_type(type: str) -> None:
    parts = projector("audio", type).sound(SAMPLES)
    pieces = [part for part in parts if isinstance(part, EncoderInput)]
    assert pieces
    assert all(np.isfinite(piece.tensors[0]).all() and piece.tokens > 0 for piece in pieces)


@pytest.mark.parametrize("type", PICTURES)
@pytest.mark.parametrize("size", [(1, 1), (1, 700), (700, 1), (3, 2000), (640, 480)])
def test_a_picture_of_any_ratio(type: str, size: tuple[int, int]) -> None:
    """A result with tokens, or one line."""
    try:
        parts = projector("image", type).picture([picture(*size)])
    except MediaError as error:
        assert "crop" in str(error)  # noqa: PT017
    else:
        pieces = [part for part in parts if isinstance(part, EncoderInput)]
        assert all(piece.tokens > 0 and np.isfinite(piece.tensors[0]).all() for piece in pieces)


@pytest.mark.parametrize(
    ("type", "key", "value", "message"),
    [
        ("gemma3", "vision.patch_size", 0, "key 'clip.vision.patch_size' is 0; expected an integer from 1 to 1024"),
        ("gemma3", "vision.patch_size", 1 << 40, "expected an integer from 1 to 1024"),
        ("gemma3", "vision.patch_size", True, "expected an integer"),
        ("gemma3", "vision.patch_size", "14", "expected an integer"),
        ("gemma3", "vision.patch_size", None, "is None; expected an integer"),
        ("gemma3", "vision.image_size", 10**9, "expected an integer from 0 to 8192"),
        ("gemma3", "vision.image_size", -1, "expected an integer from 0 to 8192"),
        ("gemma3", "vision.image_size", 13, "expected 14"),
        ("gemma3", "vision.image_mean", np.array([0.5, np.nan, 0.5], np.float32), "three finite numbers"),
        ("gemma3", "vision.image_mean", HALF[:2], "three numbers"),
        ("gemma3", "vision.image_mean", 0.5, "three numbers"),
        ("gemma3", "vision.image_std", np.zeros(3, np.float32), "numbers other than 0"),
        ("qwen3vl_merger", "vision.spatial_merge_size", 0, "expected an integer from 1 to 64"),
        ("phi4", "vision.image_min_pixels", 10**9, "expected"),
        ("phi4", "vision.image_max_pixels", -5, "expected an integer"),
        ("mlp", "vision.image_grid_pinpoints", np.full(10**6, 112, np.int32), "at most 8192 integers"),
        ("mlp", "vision.image_grid_pinpoints", np.array([112, 224, 112], np.int32), "pairs of width and height"),
        ("mlp", "vision.image_grid_pinpoints", np.array([100, 224], np.int32), "multiples of the image size"),
        ("mlp", "vision.image_grid_pinpoints", np.array([11200, 11200], np.int32), "20971520 pixels or less"),
        ("mlp", "vision.image_grid_pinpoints", np.array([0, -112], np.int32), "pairs of width and height"),
        ("internvl", "vision.preproc_max_tiles", 10**6, "expected an integer from 1 to 256"),
        ("internvl", "vision.image_size", 8192, "grids of tiles exceed"),
        ("deepseekocr", "vision.preproc_min_tiles", 300, "expected an integer from 1 to 256"),
        ("resampler", "minicpmv_version", 9, "one of 2, 3, 4"),
        ("resampler", "minicpmv_query_num", 10**9, "expected an integer"),
        ("minicpmv4_6", "vision.projector.scale_factor", 3, "2 or 4"),
        ("granite4_vision", "vision.projector.window_side", 0, "expected an integer"),
        ("granite4_vision", "vision.patch_size", 31, "window_side' is 4; expected an integer from 1 to 3"),
        ("granite4_vision", "vision.image_grid_pinpoints", None, "pairs of width and height"),
        ("gemma3", "projector_type", "qwen9vl", "'qwen9vl' is not supported for vision; supported: mlp"),
        ("gemma3", "projector_type", 3, "a text"),
        ("gemma3", "projector_type", "\x1b[2J" * 99, "not supported"),
        ("gemma3", "has_vision_encoder", HALF, "expected true or false"),
        ("gemma3", "projector_type", HALF, "a text"),
        ("gemma3", "has_vision_encoder", False, "no encoder of pictures or sound"),
    ],
)  # fmt: skip
def test_a_hostile_picture_key_is_one_line(type: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(MediaError) as caught:
        projector("image", type, **{key: value})
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("type", "key", "value", "message"),
    [
        ("ultravox", "audio.num_mel_bins", 0, "expected an integer from 2 to 4096"),
        ("ultravox", "audio.num_mel_bins", 10**9, "expected an integer from 2 to 4096"),
        ("ultravox", "audio.projector.stack_factor", None, "expected an integer from 1 to 256"),
        ("granite_speech", "audio.projector.downsample_rate", 16, "expected an integer from 1 to 15"),
        ("mimo_audio", "audio.local_group_size", 0, "expected an integer"),
        ("parakeet", "audio.num_mel_bins", 17, "tensor 'a.mel_filters' has 4112 values"),
        ("gemma3na", "audio.num_mel_bins", 16, "'gemma3na' is not supported for audio"),
    ],
)
def test_a_hostile_sound_key_is_one_line(type: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(MediaError) as caught:
        projector("audio", type, **{key: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("type", "low", "high", "tokens"),
    [("hunyuanvl", None, None, 17 * 16 + 2), ("hunyuanvl", 784 * 50, None, 9 * 8 + 2),
     ("hunyuanvl", None, 784 * 300, 17 * 16 + 2),
     ("kimik25", None, None, 4), ("kimik25", 784 * 50, None, 4), ("kimik25", 784 * 50, 784 * 300, 64)],
)  # fmt: skip
def test_limits_of_pixels_of_the_file(type: str, low: int | None, high: int | None, tokens: int) -> None:
    """hunyuanvl reads each limit alone, kimik25 only both together."""
    reader = projector("image", type, **{"vision.image_min_pixels": low, "vision.image_max_pixels": high},
                       **{"vision.projector.scale_factor": 2})  # fmt: skip
    (found,) = (part.tokens for part in reader.picture([picture(9, 9)]) if isinstance(part, EncoderInput))
    assert found == tokens


def test_tensors_of_a_file(tmp_path: Path) -> None:
    """A learned row end adds tokens, filters come in any format, and a huge tensor is not read."""

    def opened(kind: str, type: str, *tensors: Any) -> Projector:
        write_gguf(tmp_path / "mmproj.gguf", metadata(kind, type), tensors, overwrite=True)
        with open_gguf(tmp_path / "mmproj.gguf") as file:
            return Projector.of(file, TextModel(64))

    ends = ("v.token_embd.img_break", "F16", (64,), bytes(128))
    counts = [
        sum(
            part.tokens
            for part in opened("image", "pixtral", *some).picture([picture(70, 56)])
            if isinstance(part, EncoderInput)
        )
        for some in ((), (ends,))
    ]
    assert counts == [12, 14]  # 4 x 3 and two row ends
    filters = np.abs(np.sin(np.arange(16 * 257, dtype=np.float16)))
    window = np.hanning(400).astype(np.float32)
    pair = [("a.mel_filters", "F16", (16, 257), filters.tobytes()), ("a.window", "F32", (400,), window.tobytes())]
    assert opened("audio", "parakeet", *pair).sound(SAMPLES)
    with pytest.raises(MediaError, match=r"mmproj.gguf: tensor 'a.window' is missing"):
        opened("audio", "parakeet", pair[0])
    with pytest.raises(MediaError, match="too large"):
        opened("image", "pixtral", ("v.token_embd.img_break", "F32", (1 << 23,), bytes(1 << 25)))


def test_wrong_media_are_one_line() -> None:
    reader = projector("image", "gemma3")
    listener = projector("audio", "lfm2a")
    for call, message in (
        (lambda: reader.sound(SAMPLES), "this model reads pictures, no sound"),
        (lambda: listener.picture([picture(9, 9)]), "this model reads sound, no pictures"),
        (lambda: reader.picture([picture(9, 9)] * 2), "expected 1 to 1 frames"),
        (lambda: reader.picture([picture(9, 9)[..., 0]]), "a picture is uint8"),
        (lambda: listener.sound(SAMPLES[:300]), "has 300 samples"),
        (lambda: listener.sound(SAMPLES * np.float32("nan")), "not numbers"),
    ):
        with pytest.raises(MediaError, match=message):
            call()
