"""The table of projector types for pictures: rule, constants, keys of the file, markers, and the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor, isqrt
from typing import Literal

from localllm.media import tiling, views
from localllm.media.pixels import BLACK, Color, Filter
from localllm.media.settings import Settings
from localllm.media.views import Rule, View

Count = Callable[[View, Settings], int]  # the tokens of a view
MergeKey = Literal["", "projector.scale_factor", "spatial_merge_size"]


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts around the views of a tiled picture. `tile` and `{y}`, `{x}` in it count from 1."""

    overview: tuple[str, str] = ("", "")
    tiles: tuple[str, str] = ("", "")  # around all tiles
    tile: tuple[str, str] = ("", "")
    row_end: str = ""  # after each row but the last
    overview_first: bool = False


@dataclass(frozen=True, slots=True)
class PictureRow:
    """A projector type. Sizes that depend on the file are keys: see `projector.settings`."""

    rule: Rule
    count: Count
    begin: str = ""
    end: str = ""
    marks: Marks = Marks()
    merge: int = 1  # without the key
    merge_key: MergeKey = ""
    tokens: tuple[int, int] | None = None  # minimum and maximum of a view, if the file has no limits of pixels
    pixel_keys: Literal["", "required", "each", "both"] = ""  # image_min_pixels and image_max_pixels replace `tokens`
    filter: Filter = "bicubic"
    pad: bool = True
    color: Color = BLACK
    grid: bool = False  # with M-RoPE, tokens have columns and rows
    numbered: bool = False  # positions of hunyuanvl
    frames: int = 1  # 2: two frames of a video become one piece
    non_causal: bool = False
    causal_widths: tuple[int, ...] = ()  # text widths with causal pictures in spite of `non_causal`
    pinpoints: bool = False  # a file with the key image_grid_pinpoints is tiled
    lead_pad: bool = False  # pads in front align the text behind (deepseek4v)


# ---------------------------------------------------------------- tokens of a view


def _size(view: View) -> tuple[int, int]:
    """Return width and height in pixels."""
    height, width, _ = map(int, view.values.shape)
    return width, height


def _patches(view: View, settings: Settings) -> tuple[int, int]:
    width, height = _size(view)
    return width // settings.patch, height // settings.patch


def per_patch(view: View, settings: Settings) -> int:
    columns, rows = _patches(view, settings)
    return columns * rows


def per_group(view: View, settings: Settings) -> int:
    """All patches together over merge x merge, rounded down."""
    return per_patch(view, settings) // settings.merge**2


def per_block(view: View, settings: Settings) -> int:
    """Whole blocks of merge x merge patches."""
    width, height = _size(view)
    return (width // settings.align) * (height // settings.align)


def per_pair(view: View, settings: Settings) -> int:
    """Whole blocks of 2 x 2 patches; the merge is not used."""
    width, height = _size(view)
    return (width // (2 * settings.patch)) * (height // (2 * settings.patch))


def per_started_block(view: View, settings: Settings) -> int:
    width, height = _size(view)
    return -(-width // settings.align) * -(-height // settings.align)


def per_started_group(view: View, settings: Settings) -> int:
    return -(-per_patch(view, settings) // settings.merge**2)


def with_bounds(view: View, settings: Settings) -> int:
    """2 x 2 patches, and begin and end rows if the file has them."""
    return per_patch(view, settings) // 4 + 2 * settings.bounds


def per_side(view: View, settings: Settings) -> int:
    """gemma3nv: 16 x 16, which equals image size / patch size."""
    return settings.image // settings.patch


def with_breaks(view: View, settings: Settings) -> int:
    """Blocks, and a row end after each row but the last if the file has one."""
    columns, rows = (patches // settings.merge for patches in _patches(view, settings))
    return columns * rows + (rows - 1) * settings.breaks


def with_newlines(view: View, settings: Settings) -> int:
    """hunyuanvl: blocks, a newline per row, begin and end."""
    columns, rows = (patches // settings.merge for patches in _patches(view, settings))
    return (columns + 1) * rows + 2


def ocr_rows(view: View, settings: Settings) -> int:
    """deepseekocr: 1/16 of the patches, a newline per row; the overview ends with a separator."""
    width, height = _size(view)
    if view.flags.view_separator:
        side = isqrt(per_patch(view, settings) // 16)
        return side * (side + 1) + 1
    side = width // (settings.patch * 4)
    return (side * (height // width) + 1) * side


def ocr_queries(view: View, settings: Settings) -> int:
    return per_patch(view, settings) // 16 + view.flags.view_separator


def block_count(view: View, settings: Settings) -> int:
    width, height = _size(view)
    columns, rows = -(-width // settings.align), -(-height // settings.align)
    return views.block_tokens(columns, rows, view.flags.lead_pad)


def unpadded_grid(view: View, settings: Settings) -> int:
    """granite4_vision: the overview, then the grid of tiles without its padding, with a newline per row."""
    queries, window = settings.sides
    side = queries * (_size(view)[0] // settings.patch // window)
    (columns, rows), (wide, high) = view.flags.grid, view.flags.original
    columns, rows = columns * side, rows * side
    if wide / high > columns / rows:
        rows -= 2 * ((rows - floor(high * columns / wide + 1e-7)) // 2)
    else:
        columns -= 2 * ((columns - floor(wide * rows / high + 1e-7)) // 2)
    return side * side + rows * (columns + 1)


def queries(view: View, settings: Settings) -> int:
    return settings.query


def sixty_four(view: View, settings: Settings) -> int:
    return 64  # yasa2 pools to 8 x 8


def bounded(view: View, settings: Settings) -> int:
    return per_patch(view, settings) + 2  # cogvlm: begin and end rows


# ---------------------------------------------------------------- the table

_GREY: Color = (127, 127, 127)
_CLIP: Color = (122, 116, 104)  # the mean of CLIP's pictures
_SLICED = Marks(("<image>", "</image>"), tile=("<slice>", "</slice>"), row_end="\n", overview_first=True)
# minicpmv 2.5: the marks of a picture around each slice, and slice marks around all slices.
SLICED_2_5 = Marks(("<image>", "</image>"), ("<slice>", "</slice>"), ("<image>", "</image>"), "\n", True)
_QWEN = PictureRow(
    views.dynamic, per_pair, "<|vision_start|>", "<|vision_end|>", merge=2, merge_key="spatial_merge_size",
    tokens=(8, 4096), grid=True, frames=2,
)  # fmt: skip
_LLAVA = PictureRow(views.fixed, per_patch, color=_CLIP, pinpoints=True)


def _like(row: PictureRow, **changes: object) -> PictureRow:
    return replace(row, **changes)  # type: ignore[arg-type]


PICTURES: dict[str, PictureRow] = {
    "mlp": _LLAVA,
    "ldp": _like(_LLAVA, count=with_bounds),
    "ldpv2": _like(_LLAVA, count=with_bounds),
    "cogvlm": _like(_LLAVA, count=bounded),
    "adapter": _like(_LLAVA, count=with_bounds, color=BLACK),
    "janus_pro": _like(_LLAVA, color=_GREY),
    "nemotron_v2_vl": PictureRow(views.fixed, per_group, merge_key="projector.scale_factor"),
    "yasa2": PictureRow(views.fixed, sixty_four, "<image>", "</image>", pad=False),
    "gemma3": PictureRow(
        views.fixed, per_group, "<start_of_image>", "<end_of_image>", filter="bilinear", merge=4,
        merge_key="projector.scale_factor", non_causal=True,
    ),
    "gemma3nv": PictureRow(
        views.fixed, per_side, "<start_of_image>", "<end_of_image>", filter="bilinear",
        merge_key="projector.scale_factor",
    ),
    "gemma4v": PictureRow(
        views.dynamic, per_group, "<|image>", "<image|>", merge=3, merge_key="projector.scale_factor",
        tokens=(70, 1120), non_causal=True, causal_widths=(1536, 2560),
    ),
    "gemma4uv": PictureRow(
        views.dynamic, per_group, "<|image>", "<image|>", merge=3, merge_key="projector.scale_factor",
        tokens=(70, 1120), non_causal=True,
    ),
    "qwen2vl_merger": _QWEN,
    "qwen2.5vl_merger": _QWEN,
    "qwen3vl_merger": _QWEN,
    "ling3vl": _QWEN,
    "exaone4_5": _like(_QWEN, begin="<vision>", end="</vision>", tokens=None, pixel_keys="required", frames=1),
    "mimovl": _like(_QWEN, tokens=None, pixel_keys="required", frames=1),
    "youtuvl": _like(_QWEN, rule=views.scaled, filter="bilinear", pad=False, tokens=(1, 62500), frames=1),
    "glm4v": _like(_QWEN, begin="<|begin_of_image|>", end="<|end_of_image|>", frames=1),
    "glm5v": _like(
        _QWEN, rule=views.canvas, begin="<|begin_of_image|>", end="<|end_of_image|>", tokens=None,
        pixel_keys="required", frames=1,
    ),
    "minimax_m3": _like(
        _QWEN, begin="]<]start of image[>[", end="]<]end of image[>[", pad=False, tokens=(8, 576), grid=False,
        frames=1,
    ),
    "muse-glimmer": _like(
        _QWEN, rule=views.nearest_grid, begin="<|image_start|>", end="<|image_end|>", filter="lanczos",
        tokens=(1, 4096), frames=1,
    ),
    "paddleocr": PictureRow(
        views.dynamic, per_started_group, "<|IMAGE_START|>", "<|IMAGE_END|>", merge=2, pixel_keys="required", grid=True
    ),
    "hunyuanvl": PictureRow(
        views.dynamic, with_newlines, "<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>", merge=2,
        merge_key="spatial_merge_size", tokens=(256, 16384), pixel_keys="each", filter="lanczos", pad=False,
        grid=True, numbered=True,
    ),
    "dots_ocr": PictureRow(
        views.dynamic, per_started_group, "<|img|>", "<|endofimg|>", merge_key="projector.scale_factor",
        pixel_keys="required",
    ),
    "dots3note_v": PictureRow(
        views.dynamic, per_started_group, "<|img|>", "<|endofimg|>", merge_key="spatial_merge_size",
        pixel_keys="required",
    ),
    "kimivl": PictureRow(
        views.dynamic, per_started_block, "<|media_start|>", "<|media_end|>", merge_key="projector.scale_factor",
        tokens=(8, 1024),
    ),
    "kimik25": PictureRow(  # GLM-5.2-V has other marks: see `projector`
        views.dynamic, per_started_block, "<|media_begin|>", "<|media_end|>", merge_key="projector.scale_factor",
        tokens=(2, 4096), pixel_keys="both",
    ),
    "phi4": PictureRow(views.dynamic, per_patch, filter="bilinear", pixel_keys="required"),
    "pixtral": PictureRow(
        views.dynamic, with_breaks, end="[IMG_END]", merge_key="spatial_merge_size", tokens=(8, 1024)
    ),
    "lightonocr": PictureRow(
        views.dynamic, with_breaks, "<|im_start|>", "<|im_end|>", merge_key="spatial_merge_size"
    ),
    "internvl": PictureRow(
        tiling.candidates, per_group, "<img>", "</img>", merge_key="projector.scale_factor"
    ),
    "llama4": PictureRow(
        tiling.candidates, per_group, "<|image_start|>", "<|image_end|>", merge_key="projector.scale_factor"
    ),
    "resampler": PictureRow(tiling.slices, queries, marks=_SLICED),
    "minicpmv4_6": PictureRow(
        tiling.slices, per_group, marks=_SLICED, merge=4, merge_key="projector.scale_factor"
    ),
    "idefics3": PictureRow(
        tiling.doubly_resized, per_group, filter="lanczos", merge_key="projector.scale_factor",
        marks=Marks(
            ("\n\n<fake_token_around_image><global-img>", "<fake_token_around_image>"),
            tile=("<fake_token_around_image><row_{y}_col_{x}>", ""), row_end="\n",
        ),
    ),
    "lfm2": PictureRow(
        tiling.thumbnail, per_started_block, "<|image_start|>", "<|image_end|>", filter="bilinear",
        merge_key="projector.scale_factor", tokens=(64, 256),
        marks=Marks(("<|img_thumbnail|>", ""), tile=("<|img_row_{y}_col_{x}|>", "")),
    ),
    "step3vl": PictureRow(
        tiling.windows, per_block, merge=4, merge_key="projector.scale_factor",
        marks=Marks(("<im_start>", "<im_end>"), tile=("<patch_start>", "<patch_end>"), row_end="<patch_newline>"),
    ),
    "deepseekocr": PictureRow(tiling.views_and_rows, ocr_rows, end="\n", color=_GREY),
    "deepseekocr2": PictureRow(tiling.views_and_tiles, ocr_queries, end="\n", color=_GREY),
    "granite4_vision": PictureRow(tiling.stacked, unpadded_grid, end="\n"),
    "deepseek4v": PictureRow(
        views.block, block_count, color=_GREY, merge_key="projector.scale_factor", non_causal=True, lead_pad=True,
    ),
}  # fmt: skip
