"""Finds the encoder of an mmproj file by its projector type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from localllm.models.encoders.arranged import DeepSeek4Encoder, HunyuanEncoder, StepEncoder
from localllm.models.encoders.audio import AudioEncoder
from localllm.models.encoders.conformer import ConformerEncoder, UnifiedEncoder
from localllm.models.encoders.deepseek_ocr import DeepSeekOcr2Encoder, DeepSeekOcrEncoder
from localllm.models.encoders.granite_speech import GraniteSpeechEncoder
from localllm.models.encoders.granite_vision import GraniteVisionEncoder
from localllm.models.encoders.mimo_audio import MimoAudioEncoder
from localllm.models.encoders.mimo_vision import MimoVisionEncoder
from localllm.models.encoders.minicpm import MergingEncoder, ResamplerEncoder
from localllm.models.encoders.mobile_vlm import LdpEncoder, LdpV2Encoder
from localllm.models.encoders.mobilenet import MobileNetEncoder
from localllm.models.encoders.nemo import LFM2A, PARAKEET, NemoEncoder
from localllm.models.encoders.projectors import AUDIO, VISION
from localllm.models.encoders.vision import VisionEncoder
from localllm.models.encoders.yasa import YasaEncoder
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import Tensor
from localllm.plan.runs import EncoderModel

Kind = Literal["vision", "audio"]


_BOTH = {"qwen2.5o": {"vision": "qwen2.5vl_merger", "audio": "qwen2a"}}  # one name for two encoders
_OTHERS: dict[Kind, dict[str, Callable[[Keys, Tensors], EncoderModel]]] = {
    "vision": {
        "resampler": ResamplerEncoder,
        "minicpmv4_6": MergingEncoder,
        "step3vl": StepEncoder,
        "hunyuanvl": HunyuanEncoder,
        "deepseek4v": DeepSeek4Encoder,
        "deepseekocr": DeepSeekOcrEncoder,
        "deepseekocr2": DeepSeekOcr2Encoder,
        "mimovl": MimoVisionEncoder,
        "ldp": LdpEncoder,
        "ldpv2": LdpV2Encoder,
        "yasa2": YasaEncoder,
        "granite4_vision": GraniteVisionEncoder,
        "gemma3nv": MobileNetEncoder,
    },
    "audio": {
        "gemma4a": ConformerEncoder,
        "gemma4ua": UnifiedEncoder,
        "lfm2a": partial(NemoEncoder, LFM2A),
        "granite_speech": GraniteSpeechEncoder,
        "mimo_audio": MimoAudioEncoder,
        "parakeet": partial(NemoEncoder, PARAKEET),
    },
}


def supported(kind: Kind) -> tuple[str, ...]:
    """Return the names of the projector types."""
    return (*(VISION if kind == "vision" else AUDIO), *_OTHERS[kind], *_BOTH)


def encoder_of(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: Kind = "vision") -> EncoderModel:
    """Return the encoder of pictures or of sound. Raises ModelError if the projector is unsupported."""
    key = f"clip.{kind}.projector_type"
    key = key if key in metadata else "clip.projector_type"
    name, known = metadata.get(key), supported(kind)
    name = _BOTH[name][kind] if isinstance(name, str) and name in _BOTH else name
    if not isinstance(name, str) or name not in known:
        found = f"found {name[:40]!r}" if isinstance(name, str) else "this key is missing"
        raise ModelError(f"{key}: {found}; supported {kind} projectors: {', '.join(known)}")
    keys = Keys(metadata, "clip.")
    own = Tensors(tensors)
    if name in _OTHERS[kind]:
        return _OTHERS[kind][name](keys, own)
    if kind == "vision":
        return VisionEncoder(VISION[name], keys, own)
    return AudioEncoder(AUDIO[name], keys, own)
