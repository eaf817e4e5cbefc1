"""The projector types that are supported, one row each."""

from __future__ import annotations

from functools import partial

from localllm.models.encoders import grids, heads
from localllm.models.encoders.audio import Audio
from localllm.models.encoders.heads import mlp
from localllm.models.encoders.layers import Style, blocks, halves, partly, sides
from localllm.models.encoders.vision_row import Vision

_EXACT = mlp("mm.0", "mm.2", "gelu_erf")
_QWEN = Vision(
    head=_EXACT, order="cells", kernels=2, norms=None, turn=halves(), side=2, swaps=True,
    after="v.post_ln",
)  # fmt: skip
_qwen = partial(Vision, order="cells", kernels=2, turn=halves(), side=2, after="v.post_ln")
_siglip = partial(Vision, resize="fixed", after="v.post_ln")
_pixtral = partial(
    Vision, head=heads.pixtral, norms="rms", turn=sides(first=0, offset=True), channels_first=True,
    before="v.pre_ln", cell_norm="?mm.input_norm", cell_norms="rms",
)  # fmt: skip
_glm = partial(
    Vision, head=heads.glm4v, norms="rms", order="cells", kernels=2, turn=halves(), side=2, channels_first=True,
    resize=grids.cubic, optional_table=True, after="v.post_ln",
)  # fmt: skip
_kimi = partial(
    Vision,
    head=mlp("mm.1", "mm.2"),
    turn=sides(),
    side=2,
    after="v.post_ln",
    cell_norm="mm.input_norm",
    cell_eps=1e-5,
    padded=True,
)

_DOTS = Vision(
    head=mlp("mm.0", "mm.2", "gelu_erf"), norms="rms", turn=halves(), side=2, before="v.pre_ln",
    after="mm.post_norm", cell_norm="mm.input_norm", cell_norms="layer", cell_eps=1e-6, padded=True,
)  # fmt: skip

# GELU is exact where the model's program in transformers 5.24 has it so, also where llama.cpp approximates it by tanh.
VISION: dict[str, Vision] = {
    "qwen2vl_merger": _QWEN,
    # llama.cpp does not read the key of the window's size; neither do the models vary it
    "qwen2.5vl_merger": _qwen(head=_EXACT, norms=None, window=112, swaps=True),
    "qwen3vl_merger": _qwen(head=_EXACT, resize=grids.corners, deep=True),
    "ling3vl": _qwen(head=mlp("mm.0", "mm.2"), resize=grids.corners, after="mm.input_norm"),
    "exaone4_5": _qwen(head=_EXACT, norms="rms", window=112, swaps=True),
    "gemma3": _siglip(head=heads.gemma3, side=4, swaps=True),
    "gemma4v": Vision(
        head=heads.gemma4, norms="rms", activation="gelu", resize="fixed", axes_table=True, turn=blocks(100.0, first=1),
        side=3, signed=True, style=Style(scale=1.0, unit_values=True),
    ),
    "gemma4uv": Vision(head=heads.unit, norms="layer", resize="fixed", axes_table=True, patch=3),
    "idefics3": _siglip(head=heads.linear("mm.model.fc"), side=2, swaps=True),
    "pixtral": _pixtral(break_row="v.token_embd.img_break"),
    "lightonocr": _pixtral(side=2),
    # Here llama.cpp puts the class row last although the position table begins with its position, so that each patch
    # has its neighbour's position. The models have it first.
    "internvl": _siglip(
        head=mlp("mm.model.mlp.1", "mm.model.mlp.3", "gelu_erf", "mm.model.mlp.0", 1e-5), norms=None, cls="first",
        side=2, activation="gelu_erf", after="",
    ),
    "lfm2": Vision(
        head=mlp("mm.1", "mm.2", "gelu_erf", "mm.input_norm", 1e-5), resize=grids.antialiased, side=2, padded=True,
        after="v.post_ln",
    ),
    "paddleocr": Vision(
        head=mlp("mm.1", "mm.2", "gelu_erf"), resize=grids.antialiased, turn=halves(), side=2, after="v.post_ln",
        cell_norm="mm.input_norm", cell_eps=1e-5, padded=True,
    ),
    "phi4": Vision(head=mlp("mm.0", "mm.2"), resize=grids.antialiased, after="v.post_ln"),
    "janus_pro": _siglip(head=mlp("mm.0", "mm.1", "gelu_erf"), activation="gelu_erf"),
    "kimivl": _kimi(resize=grids.antialiased),
    "kimik25": _kimi(head=mlp("mm.1", "mm.2", "gelu_erf"), resize=grids.cubic),
    "glm4v": _glm(),
    "glm5v": _glm(),
    "dots_ocr": _DOTS,
    "dots3note_v": _DOTS,  # some layers have experts
    "nemotron_v2_vl": _siglip(head=heads.nemotron, cls="first", cls_position=False, side=2, after=""),
    "youtuvl": Vision(
        head=mlp("mm.0", "mm.2"), order="cells", turn=halves(), side=2, pixels_last=True, window=112, window_key=True,
        after="v.post_ln", cell_norm="mm.input_norm", cell_norms="rms", cell_eps=1e-6,
    ),
    "minimax_m3": Vision(
        head=mlp("mm.merger.fc1", "mm.merger.fc2", "gelu_erf"), order="cells", kernels=2, activation="gelu_erf",
        turn=blocks(10000.0, first=0, skipped=1), side=2, before="v.pre_ln",
        per_patch=mlp("mm.1", "mm.2", "gelu_erf"),
    ),
    # llama.cpp's order of the class row is wrong as for internvl; here its row 0, the first patch, is dropped, too.
    "mlp": _siglip(head=heads.llava, cls="first", short=1, before="v.pre_ln", after="", swaps=True),
    "cogvlm": _siglip(  # with the class row first, as for internvl
        head=heads.cogvlm, cls="first", style=Style(post_norm=True), after="", ends=("v.boi", "v.eoi")
    ),
    # Here llama.cpp orders the tokens of a tile by column; the model orders them by row.
    "llama4": _siglip(
        head=heads.chain("mm.model.mlp.1", "mm.model.mlp.2", "mm.model.fc", activation="gelu_erf"), cls="last",
        before="v.pre_ln", turn=sides(), turned_from=1, side=2, activation="gelu_erf",
    ),
    "muse-glimmer": Vision(
        head=heads.chain("mm.0", "mm.1", "mm.2", activation="gelu_erf"), activation="gelu_erf", resize=grids.linear,
        turn=sides(), turned_from=1, side=2, channels_first=True, table_window=True, period=4, before="v.pre_ln",
        after="v.post_ln",
    ),
    "adapter": _siglip(
        head=heads.glm_edge, side=2, channels_first=True, ends=("adapter.boi", "adapter.eoi"), swaps=True
    ),
}  # fmt: skip

_AFTER = mlp("mm.a.mlp.1", "mm.a.mlp.2", "gelu_erf")
AUDIO: dict[str, Audio] = {
    "ultravox": Audio(head=heads.ultravox, stack=8, stack_key=True),
    # llama.cpp averages pairs of frames first, which halves the tokens; the model does not.
    "voxtral": Audio(head=_AFTER, stack=4, stack_key=True),
    "qwen2a": Audio(head=heads.paired(heads.linear("mm.a.fc")), stack=2, after=()),
    "musicflamingo": Audio(head=heads.paired(_AFTER), stack=2, after=()),
    "glma": Audio(head=_AFTER, stack=4, after=("a.post_ln", "mm.a.norm_pre"), ends=("v.boi", "v.eoi")),
    "meralion": Audio(head=heads.meralion, stack=15),
    "qwen3a": Audio(head=_AFTER, pictures=True, chunk=100),
    "dots3note_a": Audio(
        head=mlp("mm.a.mlp.1", "mm.a.mlp.3", "gelu_erf", norm="mm.a.norm_pre", eps=1e-5), pictures=True, norms="rms",
        activation="silu", turn=partly, positions=False,
    ),
}  # fmt: skip
