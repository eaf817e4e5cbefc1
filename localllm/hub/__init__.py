"""Models by name: find them in this computer's stores, download them from the Hugging Face hub, remove them.

May import: base.
Begin with: search.py (`locate`), then pull.py, which alone uses the network.
"""

from __future__ import annotations

from localllm.hub.errors import NotHere, StoreError
from localllm.hub.search import everything, find, locate
from localllm.hub.store_folders import StoreFolders
from localllm.hub.stored_model import StoredModel

__all__ = ["NotHere", "StoreError", "StoreFolders", "StoredModel", "everything", "find", "locate"]
