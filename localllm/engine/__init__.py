"""The engine: batched forward passes of many sequences over one paged KV cache, with prefix sharing.

May import: base, plan, backends.
Begin with: engine.py and rows.py, then paging.py (blocks), media.py (pictures and sound), prefix.py (finished
sequences) and cache_types.py.
"""

from __future__ import annotations

from localllm.engine.alignment import align_tokens
from localllm.engine.cache_types import CacheChoice, choose_types
from localllm.engine.engine import CacheLost, ContextFull, Engine, MediaFacts, StepTooLarge, Watches
from localllm.engine.media import Encoding, Media, MediaSpan, Placed
from localllm.engine.paging import SLACK, BlockPool, CacheFull, CacheSequence, how_many_fit
from localllm.engine.rows import DraftRows, Pending, Result, SequenceRows, Wanted, top_k_of

__all__ = [
    "SLACK",
    "BlockPool",
    "CacheChoice",
    "CacheFull",
    "CacheLost",
    "CacheSequence",
    "ContextFull",
    "DraftRows",
    "Encoding",
    "Engine",
    "Media",
    "MediaFacts",
    "MediaSpan",
    "Pending",
    "Placed",
    "Result",
    "SequenceRows",
    "StepTooLarge",
    "Wanted",
    "Watches",
    "align_tokens",
    "choose_types",
    "how_many_fit",
    "top_k_of",
]
