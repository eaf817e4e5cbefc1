"""The key-value cache: paging.py maps tokens to blocks, types.py chooses the cache types, alignment.py matches a text
with cached tokens, prompt_cache.py saves the cache to a file.

Import prompt_cache.py by its full name: it imports the model, which imports this package.
"""

from __future__ import annotations

from localllm.cache.alignment import align_tokens
from localllm.cache.paging import SLACK, BlockPool, CacheFull, CacheSequence, how_many_fit
from localllm.cache.types import CacheChoice, choose_types

__all__ = [
    "SLACK",
    "BlockPool",
    "CacheChoice",
    "CacheFull",
    "CacheSequence",
    "align_tokens",
    "choose_types",
    "how_many_fit",
]
