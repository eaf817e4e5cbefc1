"""Models by name: find them in this computer's stores, fetch them from the Hugging Face hub, remove fetched ones.

`locate` returns the file for a name. Only `pull` uses the network, and only it imports huggingface_hub.
"""

from __future__ import annotations

from localllm.store.errors import NotHere, StoreError
from localllm.store.found import StoredModel
from localllm.store.places import StoreFolders
from localllm.store.search import everything, find, locate

__all__ = ["NotHere", "StoreError", "StoreFolders", "StoredModel", "everything", "find", "locate"]
