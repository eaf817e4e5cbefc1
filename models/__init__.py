"""Architectures as data, and one forward pass that is recorded as a plan.

architecture = architecture_of(metadata)
config = read_config(metadata, architecture.name)
plan = record(config, architecture, tensors)

May import: base (printable, notices, files), quant, plan.
Begin with: architectures.py (one row each), then forward.py and layers.py; families/ has what one family needs, and
encoders/ the encoders of pictures and sound.
"""

from __future__ import annotations

from localllm.models.architecture import Architecture
from localllm.models.architectures import ARCHITECTURES
from localllm.models.config import Config, ExpertConfig, MediaInput, RopeConfig
from localllm.models.draft_architecture import Drafter
from localllm.models.drafter import check_fit, is_drafter, is_heads, record_with_drafter
from localllm.models.errors import ModelError
from localllm.models.forward import record
from localllm.models.head import Pooler, PoolingHead, unit
from localllm.models.lookup import architecture_of, is_mmproj, read_config
from localllm.models.next_token import has_head, record_mtp_head, record_mtp_heads, record_with_heads

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Config",
    "Drafter",
    "ExpertConfig",
    "MediaInput",
    "ModelError",
    "Pooler",
    "PoolingHead",
    "RopeConfig",
    "architecture_of",
    "check_fit",
    "has_head",
    "is_drafter",
    "is_heads",
    "is_mmproj",
    "read_config",
    "record",
    "record_mtp_head",
    "record_mtp_heads",
    "record_with_drafter",
    "record_with_heads",
    "unit",
]
