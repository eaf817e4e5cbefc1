"""The options as keyword arguments, for type checkers. A test compares names and types with the declarations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions`."""

    ctx_size: int
    threads: int | None
    backend: str
    gpu_layers: int | str
    n_cpu_moe: int
    device: str
    cache_type_k: str
    cache_type_v: str
    check_tensors: bool
    mmproj: str | os.PathLike[str]
    image_min_tokens: int
    image_max_tokens: int
    model_draft: str | os.PathLike[str]
    spec: str | None
    draft_max: int
    draft_earlier: int
    force: bool
    any_cache: bool


class GenerateKeywords(TypedDict, total=False):
    """The fields of `SamplingOptions` and `AnswerOptions`, except the fields that only apply to chats."""

    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    json_schema: Mapping[str, Any] | str | os.PathLike[str] | None
    grammar: str
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breaker: Sequence[str]
    dynatemp_range: float
    dynatemp_exp: float
    adaptive_target: float
    adaptive_decay: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    logit_bias: Mapping[int, float]
    samplers: Sequence[str]
    min_keep: int


class ChatKeywords(GenerateKeywords, total=False):
    """The fields of `SamplingOptions` and `AnswerOptions`."""

    system_prompt: str
    parse_special_in_content: bool
    chat_template_kwargs: Mapping[str, Any]
    think: bool | int | str | None


CHAT_ONLY = ("system_prompt", "parse_special_in_content", "chat_template_kwargs", "think")
