"""The key-value cache: paging.py says which block holds which token, types.py what a block holds, alignment.py which
tokens of a text are there already, prompt_cache.py keeps it in a file.

prompt_cache.py saves sessions, so it imports the model and is imported by its own name.
"""

from __future__ import annotations

from localllm.cache.alignment import keep_held
from localllm.cache.paging import SLACK, BlockPool, CacheFull, Sequence, how_many_fit
from localllm.cache.types import CacheChoice, choose_types

__all__ = ["SLACK", "BlockPool", "CacheChoice", "CacheFull", "Sequence", "choose_types", "how_many_fit", "keep_held"]
