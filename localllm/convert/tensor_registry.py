"""The tensors of a checkpoint. Recipes take them one by one by name; a tensor that no recipe took is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.quantized import Packing, fp4, part_of, unpack_quantized
from localllm.convert.recipe import Raw
from localllm.convert.safetensors import Shard
from localllm.convert.tensor import LazyTensor

# Name prefixes of the text model in multimodal models.
_PREFIXES = (
    ("model.language_model.", "model."), ("model.text_model.", "model."), ("language_model.model.", "model."),
    ("language_model.", ""), ("talker.", ""), ("model.backbone.", "model."), ("backbone.", "model."),
    ("transformer.h.", "model.layers."), ("transformer.decoder_layer.", "model.layers."), ("transformer.", "model."),
    ("h.", "model.layers."), ("ernie.", "model."),
)  # fmt: skip
_OTHER_SENSES = re.compile(
    r"(model\.)?(vit|vision(_(tower|model|encoder|adapter|projection|embedder))?|visual|vit_large_projector|multi_modal_projector|"
    r"mm_projector|patch_merge_mlp|audio_(tower|encoder)|embed_vision|embed_audio|mlp_AR|aligner|image_\w+|"
    r"speaker_encoder|code_predictor|mimi|flow_lm\.(flow_net|out_eos|speaker_proj_weight|emb_mean|emb_std))(\.|$)"
)
_DRAFTS = re.compile(r"(model\.)?mtp(_layers)?\.")
# Part of the names of Hunyuan 4's hyper-connections, which transformers saves under another module.
_HYPER = ".hc_pre."
_BARE = (
    "embed_tokens.",
    "layers.",
    "norm.",
    "embedding_norm.",
    "wte.",
    "wpe.",
    "ln_f.",
)  # a model saved without its head
COMPUTED = (
    "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "rotary_pos_emb.inv_freq",
    ".relative_pe.slopes", "attention.masked_bias", ".attn.masked_bias", ".attn.bias", ".slope_rate", ".query_decay",
    ".key_decay", ".diagonal_decay", "position_ids", "token_type_ids", ".attention.bias",
)  # fmt: skip
_FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_FP8_OTHERS = ("activation_scale", "input_scale")
_BYTES = ("I8", "U8")  # formats that hold two 4-bit codes per byte
_PACKED = ".weight_packed"
_NOT_PACKED = Packing()
_LAYER = re.compile(r"model\.layers\.([0-9]{1,5})\.")
_NUMBER = re.compile(r"\.(?:shard_)?([0-9]{1,5})(?=\.)")


class TensorRegistry:
    """`take` returns tensors by name, and `rest` lists the tensors that were not taken."""

    def __init__(
        self,
        shards: Iterable[Shard],
        layers: int,
        packing: Packing = _NOT_PACKED,
        inside: str = "",
        others: tuple[str, ...] = (),
        raw: Callable[[Raw], Raw] = lambda raw: raw,
        called: Callable[[str], str | None] | None = None,
    ) -> None:
        """Create a registry of the tensors in these shards. `raw` changes them before they are dequantized.

        `called` gives the names of tensors, or None for those to skip; without it, they are a text model's.
        """
        self.notes: list[str] = []
        self.senses = 0  # number of tensors of encoders
        shards = list(shards)
        found: Raw = {}
        if called is not None:
            stored = ((called(name), tensor) for shard in shards for name, tensor in shard.tensors.items())
            named: Iterable[tuple[str, LazyTensor]] = ((name, tensor) for name, tensor in stored if name is not None)
        else:
            within = any(name.startswith(inside) for shard in shards for name in shard.tensors)
            named = self._named(shards, layers, inside if within else "", others)
        for name, tensor in named:
            found.setdefault(name, []).append(tensor)
        self._tensors = {name: _whole(name, tensors) for name, tensors in raw(found).items()}
        self._apply_fp8_scales(packing.fp8_blocks)
        self._apply_fp4_scales()
        self._unpack(packing)
        # (layer prefix, name with {}) -> highest index + 1.
        self._counts: dict[tuple[str, str], int] = {}
        for name in self._tensors:
            if number := _numbered(name)[1]:
                key = self.group(name)
                self._counts[key] = max(self._counts.get(key, 0), 1 + int(number[1]))
        self._taken: set[str] = set()

    def _named(
        self, shards: Iterable[Shard], layers: int, inside: str, others: tuple[str, ...]
    ) -> Iterable[tuple[str, LazyTensor]]:
        senses = beyond = 0
        for shard in shards:
            for stored, tensor in shard.tensors.items():
                if not stored.startswith(inside) or stored.startswith(others):
                    senses += 1
                    continue
                name = stored.removeprefix(inside)
                for prefix, instead in _PREFIXES:
                    if name.startswith(prefix):
                        name = instead + name.removeprefix(prefix)
                        break
                name = ("model." + name if name.startswith(_BARE) else name).replace(_HYPER, ".")
                layer = _LAYER.match(name)
                if _OTHER_SENSES.match(name):
                    senses += 1
                elif _DRAFTS.match(name) or (layer and int(layer[1]) >= layers):
                    beyond += 1
                elif not name.endswith(COMPUTED):
                    yield name, tensor
        if senses:
            self.senses = senses
            self.notes.append(f"skipped {_tensors(senses)} for images or audio: the file holds the text model")
        if beyond:
            self.notes.append(f"skipped {_tensors(beyond)} of layers for multi-token prediction")

    def _apply_fp8_scales(self, blocks: tuple[int, int] | None) -> None:
        for name in [name for name, tensor in self._tensors.items() if tensor.format == "F8_E4M3"]:
            base = name.removesuffix("weight")
            scale = next((base + s for s in _FP8_SCALES if base + s in self._tensors), None)
            if scale is None:
                raise ConvertError(f"{printable(name)}: is in FP8, but its scale {base}{_FP8_SCALES[0]} is missing")
            stored = self._tensors.pop(scale)
            scales = t.powers(stored) if stored.format == "F8_E8M0" else t.as_float32(stored)
            codes = self._tensors[name]
            self._tensors[name] = t.scaled_fp8(codes, scales, blocks)
            for other in _FP8_OTHERS:
                self._tensors.pop(base + other, None)

    def _apply_fp4_scales(self) -> None:
        """Combine 4-bit codes and their scales, named as in DeepSeek 4, into matrices."""
        for name in [name for name, tensor in self._tensors.items() if tensor.format in _BYTES]:
            if name.endswith(".weight") and (scales := self._tensors.pop(name.removesuffix("weight") + "scale", None)):
                self._tensors[name] = fp4(self._tensors[name], scales, name)

    def _unpack(self, packing: Packing) -> None:
        for name in [name for name in self._tensors if name.endswith(_PACKED)]:
            base = name.removesuffix(_PACKED)
            weight = self._unpacked(base, packing)
            if weight.name in self._tensors:
                raise ConvertError(f"tensor '{printable(weight.name)}' is present both packed and unpacked")
            self._tensors[weight.name] = weight

    def _unpacked(self, base: str, packing: Packing) -> LazyTensor:
        def take(name: str) -> LazyTensor | None:
            return self._tensors.pop(name, None)

        if not packing.fp4:
            return unpack_quantized(take, base, packing.schemes)
        return fp4(part_of(take, base, "packed"), part_of(take, base, "scale"), f"{base}.weight")

    def take(self, prefix: str, names: tuple[str, ...]) -> list[LazyTensor] | None:
        """Take the tensors with these names (`{}` counts up from 0); return None if the first tensor is missing."""
        found: list[LazyTensor] = []
        for name in names:
            count = self._counts.get((prefix, name), 0)
            numbered = [name.format(i) for i in range(count)] if "{}" in name else [name]
            for one in numbered:
                tensor = self._tensors.get(prefix + one)
                if tensor is None and not found and "{}" not in name:
                    return None
                if tensor is None:
                    raise ConvertError(f"tensor '{prefix}{one}' is missing; download the model again")
                self._taken.add(prefix + one)
                found.append(tensor)
        return found or None

    def group(self, name: str) -> tuple[str, str]:
        """Return the prefix of a tensor's layer and the rest of its name, with `{}` for a number as of an expert."""
        prefix, number = _numbered(name)
        if number is None:
            return prefix, name[len(prefix) :]
        return prefix, name[len(prefix) : number.start(1)] + "{}" + name[number.end() :]

    def is_taken(self, name: str) -> bool:
        return name in self._taken

    def rest(self) -> list[str]:
        return [name for name in self._tensors if name not in self._taken]

    def stored(self, name: str) -> str:
        """Return the name of a tensor in its file, where prefixes may differ."""
        return self._tensors[name].name


def _numbered(name: str) -> tuple[str, re.Match[str] | None]:
    """Return the prefix of a tensor's layer, and the first number after it."""
    layer = _LAYER.match(name)
    prefix = layer[0] if layer else ""
    return prefix, _NUMBER.search(name, max(len(prefix) - 1, 0))


def _whole(name: str, parts: list[LazyTensor]) -> LazyTensor:
    if len(parts) > 1:
        raise ConvertError(f"tensor '{printable(name)}' is in {len(parts)} pieces; only Grok's experts may be split")
    return parts[0]


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"
