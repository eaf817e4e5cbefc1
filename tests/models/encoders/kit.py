"""The reference kit of projectors: files with weights by rule, preprocessed inputs, and the expected embeddings."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tests.models.support import MemoryWeight

# Cases for which the kit stores only llama.cpp's results, which differ from the model's.
ORIGINAL = (
    "voxtral", "internvl-qknorm", "llava-swapped", "llava-yi", "llava-features", "cogvlm", "llama4", "ldp", "ldpv2",
    "mimo_audio",
)  # fmt: skip
BOTH = {"qwen2.5o": ("qwen2.5vl", "qwen2a"), "gemma4va": ("gemma4v", "gemma4a")}  # files with both encoders
FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "multimodal"


@cache
def module(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


@dataclass(frozen=True)
class Chunk:
    """An input of the encoder."""

    name: str
    number: int  # in the layout
    kind: str  # "vision" or "audio"
    tensors: tuple[np.ndarray, ...]
    flags: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    name: str

    def stored(self) -> Any:
        return np.load(FOLDER / f"{self.name}.npz")

    def loaded(self) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
        make = module("make_mmproj")
        with self.stored() as z:
            metadata, listed, _, _ = make.parse_header(z["header"].tobytes())
            seed = int(z["seed"])
        tensors = {}
        for name, shape, kind, _ in listed:
            values = make.clip_values(name, shape, seed).reshape(shape[::-1])
            tensors[name] = MemoryWeight.of(name, values, "F16" if kind else "F32")
        return metadata, tensors

    def chunks(self, wanted: str = "") -> Iterator[Chunk]:
        """Yield the media chunks of the inputs, as the kit's reference programs preprocess them."""
        make, reference = module("make_mmproj"), module("reference_rest")
        metadata, tensors = self.loaded()
        metadata["tensors"] = {name: tensor.values().astype(np.float64) for name, tensor in tensors.items()}
        both = BOTH.get(self.name, (self.name, self.name))
        with self.stored() as z:
            for name, kind, data in make.inputs(z):
                prepare, _ = reference.MODELS[both[kind == "audio"]]
                if wanted and name != wanted:
                    continue
                if kind == "pair":
                    groups = [[prepare(each, metadata)[0] for each in data]]
                elif kind == "two":
                    groups = [[each] for picture in data for each in prepare(picture, metadata)]
                else:
                    own = data if kind == "image" else data.astype(np.float64)
                    groups = [[each] for each in prepare(own, metadata)]
                if self.name == "llava16":
                    groups = groups[1:] + groups[:1]
                for number, group in zip(make.media_chunks(z, name), groups, strict=True):
                    flags = f"{name}.{number}.pre0.flags"
                    own_flags = tuple(int(n) for n in z[flags]) if flags in z else (0,) * 8
                    arrays = tuple(np.asarray(each, np.float32) for each in group)
                    yield Chunk(name, number, "audio" if kind == "audio" else "vision", arrays, own_flags)

    def original(self, chunk: Chunk) -> np.ndarray | None:
        """Return the embeddings of the original model, where llama.cpp's differ and the kit has no others."""
        reference, make = module("reference_rest"), module("make_mmproj")
        program = module("reference_numpy")
        assert reference is not None
        assert make is not None
        tiles = self.name == "deepseekocr" and chunk.tensors[0].shape[1] == 640
        if not tiles and self.name not in ORIGINAL:
            return None
        with self.stored() as z:
            seed = int(z["seed"])
        net = program.Net(*program.load(str(FOLDER / f"{self.name}.npz"), seed), chunk.kind)
        x, w = chunk.tensors[0].astype(np.float64), net.w
        if tiles:
            return _tiles(net, x)
        if self.name == "voxtral":
            y = net.norm(program.whisper(net, x), "a.post_ln")
            y = y[: len(y) // 4 * 4].reshape(-1, 4 * net.e)
            return np.asarray(net.mlp(y, "mm.a.mlp.1", "mm.a.mlp.2", program.gelu_erf))
        if self.name == "internvl-qknorm":
            blocks = net.blocks

            def normed(q: Any, k: Any, v: Any, b: str) -> tuple[Any, Any, Any]:
                own = (
                    program.layer_norm(y, w[f"{b}attn_{n}_norm.weight"], None, net.eps) for n, y in (("q", q), ("k", k))
                )
                return *own, v  # type: ignore[return-value]

            net.blocks = lambda y: blocks(y, qk=normed)
            return np.asarray(program.internvl(net, x, hf=True))
        if self.name == "cogvlm":
            y = np.concatenate([w["v.class_embd"][None], (net.patches(x) + w["v.patch_embd.bias"]).reshape(-1, net.e)])
            y = y + w["v.position_embd.weight"]
            for i in range(net.n):
                b = f"v.blk.{i}."
                parts = np.split(net.lin(y, b + "attn_qkv"), 3, -1)
                y = y + net.norm(net.lin(net.attention(*parts), b + "attn_out"), b + "ln1")
                y = y + net.norm(net.mlp(y, b + "ffn_up", b + "ffn_down", net.act), b + "ln2")
            y = program.gelu(net.norm(net.lin(y[1:], "mm.model.fc"), "mm.post_fc_norm", eps=1e-5))
            y = net.lin(program.silu(net.lin(y, "mm.gate")) * net.lin(y, "mm.up"), "mm.down")
            return np.concatenate([w["v.boi"][None], y, w["v.eoi"][None]])
        if self.name == "llama4":
            y = program.llama4(net, x)
            side = round(len(y) ** 0.5)
            return np.asarray(y.reshape(side, side, -1).transpose(1, 0, 2).reshape(len(y), -1))
        if self.name == "mimo_audio":
            return self._mimo_audio(net, x)
        if self.name in ("ldp", "ldpv2"):
            return self._mobile_vlm(net, x)
        if self.name == "llava-swapped":
            return np.asarray(program.llava(net, x, hf=True))
        y = np.concatenate([w["v.class_embd"][None], net.patches(x).reshape(-1, net.e)]) + w["v.position_embd.weight"]
        y = net.norm(y, "v.pre_ln")
        if self.name == "llava-yi":
            y = net.blocks(y, last=net.n - 1)[1:]
            y = program.gelu(net.norm(net.lin(y, "mm.0"), "mm.1"))
            return np.asarray(net.norm(net.lin(y, "mm.3"), "mm.4"))
        listed, found = net.m["clip.vision.feature_layer"], {}
        net.blocks(y, last=max(listed), after=lambda i, z: found.__setitem__(i + 1, z))
        found[max(listed)] = net.norm(found[max(listed)], "v.post_ln")
        return np.asarray(net.mlp(np.concatenate([found[i] for i in listed], -1)[1:], "mm.0", "mm.2"))

    def _mimo_audio(self, net: Any, mel: np.ndarray) -> np.ndarray:
        """Return the embeddings with the skip connection behind layer 2, not behind its attention."""
        rest = module("reference_rest")
        layers = rest._blocks_mid

        def own(net: Any, x: np.ndarray, pos: Any, mask: Any, keep: dict[int, np.ndarray]) -> Any:
            return net.blocks(x, pos=pos, mask=mask, after=keep.__setitem__)

        rest._blocks_mid = own
        try:
            return np.asarray(rest.mimo_audio(net, mel))
        finally:
            rest._blocks_mid = layers

    def _mobile_vlm(self, net: Any, picture: np.ndarray) -> np.ndarray:
        """Return the embeddings with the class row first, as for llava."""
        more = module("reference_more")
        patches = more._mobilevlm

        def own(net: Any, picture: np.ndarray) -> np.ndarray:
            rows = [net.w["v.class_embd"][None], net.patches(picture).reshape(-1, net.e)]
            x = np.concatenate(rows) + net.w["v.position_embd.weight"]
            return np.asarray(net.blocks(net.norm(x, "v.pre_ln"), last=net.n - 1)[1:])

        more._mobilevlm = own
        try:
            return np.asarray(getattr(more, self.name)(net, picture))
        finally:
            more._mobilevlm = patches

    def errors(self, chunk: Chunk, embeddings: np.ndarray) -> dict[str, float]:
        """Return `rows` and `centered`; the original model's results, if the kit has them, count."""
        make = module("make_mmproj")
        truth = self.original(chunk)
        if truth is not None:
            assert embeddings.shape == truth.shape, f"{embeddings.shape}, not {truth.shape}"
            square = float(((embeddings - truth) ** 2).sum())
            spread = float(((truth - truth.mean(0)) ** 2).sum())
            return {"rows": square / float((truth**2).sum()), "centered": square / spread}
        with self.stored() as z:
            base = f"{chunk.name}.{chunk.number}"
            if f"{base}.hf.rows" in z:
                rows = z[f"{base}.hf.rows"].astype(np.float64)
                own = np.asarray(embeddings, np.float64)[make.sample_index(len(embeddings), len(rows))]
                spread = ((rows - rows.mean(0)) ** 2).sum()
                return {"rows": make.nmse(own, rows), "centered": float(((own - rows) ** 2).sum() / spread)}
            found = make.check_media(z, chunk.name, chunk.number, embeddings)
            return {key: found[key] for key in ("rows", "centered")}


def _tiles(net: Any, picture: np.ndarray) -> np.ndarray:
    """Return the embeddings of a row of DeepSeek-OCR's tiles, with positions resized channel by channel."""
    program, rest, w, found = module("reference_numpy"), module("reference_rest"), net.w, []
    act, eps = net.act, net.eps
    for start in range(0, len(picture), 640):
        net.act, net.eps = act, eps
        x = rest.sam(net, picture[start : start + 640])
        own = program.resize_bicubic(w["v.position_embd.weight"][1:], 10, 10)
        net.act, net.eps = program.gelu_quick, 1e-5
        y = np.concatenate([w["v.class_embd"][None], x]) + np.concatenate([w["v.position_embd.weight"][:1], own])
        y = net.blocks(net.norm(y, "v.pre_ln"))[1:]
        found.append(net.lin(np.concatenate([y, x], -1), "mm.model.fc").reshape(10, 10, -1))
    lines = np.concatenate(found, 1)
    newline = np.broadcast_to(w["v.image_newline"], (len(lines), 1, lines.shape[2]))
    return np.concatenate([lines, newline], 1).reshape(-1, lines.shape[2])
