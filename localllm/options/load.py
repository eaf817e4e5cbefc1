"""Options for loading a model: context, device, KV cache and speculation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from localllm.options.declare import Options, group, option
from localllm.options.kinds import LAYERS, PATH, OptionError, integer, one_of, optional
from localllm.options.speculation import SpeculationOptions

BACKENDS = ("auto", "cpu", "cuda", "opencl", "reference")  # copied from `localllm.backends`, whose import needs NumPy
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "fp8", "auto")  # from `backends.cache`
CACHE_OPTIONS = ("cache_type_k", "cache_type_v")
MEDIA_OPTIONS = ("mmproj", "image_min_tokens", "image_max_tokens")
CACHE_TYPE = one_of(*CACHE_TYPES)._replace(metavar="TYPE")
FORCED = "override a refusal:"  # the meaning of --force, before the list of a command
NEAREST_RULE = "using the most similar known tokenizer rule"


@dataclass(frozen=True, slots=True)
class LoadOptions(Options):
    """How to load a model."""

    TITLE: ClassVar[str] = "Loading"
    ctx_size: int = option(
        0, "-c", "--ctx-size", "--ctx", kind=integer(0), unit="tokens", shown="",
        help="context size in tokens (0: the model's own, up to 4096)",
    )  # fmt: skip
    threads: int | None = option(
        None,
        "-t",
        "--threads",
        kind=optional(integer(1)),
        shown="all processors",
        help="maximum number of CPU threads; a busy machine uses fewer",
    )
    backend: str = option(
        "auto", "--backend", kind=one_of(*BACKENDS),
        help="auto, cpu, cuda, opencl, or reference (slow)",
    )  # fmt: skip
    gpu_layers: int | str = option(
        "auto", "-ngl", "--gpu-layers", "--n-gpu-layers", kind=LAYERS, unit="layers",
        help="layers on the GPU: the last N, including the output; all; or auto (however many fit)",
    )  # fmt: skip
    n_cpu_moe: int = option(
        0, "-ncmoe", "--n-cpu-moe", kind=integer(0), unit="layers", shown="",
        help="keep the experts of the first N layers on the CPU",
    )  # fmt: skip
    device: str = option(
        "", "-dev", "--device", metavar="DEVICE", flag="--device",
        help="device: its number or part of its name (see localllm devices)",
    )  # fmt: skip
    cache_type_k: str = option(
        "f16", "-ctk", "--cache-type-k", kind=CACHE_TYPE,
        help=f"format of cached keys: {', '.join(CACHE_TYPES[:-1])}, or auto",
    )  # fmt: skip
    cache_type_v: str = option(
        "f16", "-ctv", "--cache-type-v", kind=CACHE_TYPE,
        help="format of cached values",
    )  # fmt: skip
    check_tensors: bool = option(
        False, "--check-tensors", help="check every weight first, and refuse a file with infinite or NaN values"
    )
    mmproj: str | os.PathLike[str] = option(
        "", "-mm", "--mmproj", kind=PATH, metavar="FILE", offers="files", flag="--mmproj", shown="in its folder",
        help="the encoders of pictures and sound, an mmproj file; off: none",
    )  # fmt: skip
    image_min_tokens: int = option(
        0, "--image-min-tokens", kind=integer(0), unit="tokens", shown="",
        help="minimum number of tokens of a picture, if the model reads any size (0: as the file says)",
    )  # fmt: skip
    image_max_tokens: int = option(
        0, "--image-max-tokens", kind=integer(0), unit="tokens", shown="",
        help="maximum number of tokens of a picture, if the model reads any size (0: as the file says)",
    )  # fmt: skip
    speculation: SpeculationOptions = group(SpeculationOptions)
    force: bool = option(
        False, "--force",
        help=f"{FORCED} using a cache type that harms the model, {NEAREST_RULE}, using a card that failed its check",
    )  # fmt: skip
    any_cache: bool = option(False, help="allow a cache type that harms the model")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if 0 < self.image_max_tokens < self.image_min_tokens:
            limits = f"{self.image_min_tokens} to {self.image_max_tokens}"
            raise OptionError(f"a picture cannot have {limits} tokens; exchange the two limits")

    @property
    def cache_types(self) -> tuple[str, str]:
        """The types of the keys and of the values in the KV cache."""
        return self.cache_type_k, self.cache_type_v
