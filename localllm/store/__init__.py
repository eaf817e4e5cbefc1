"""Models by name: find them in this computer's stores, fetch them from the Hugging Face hub, remove what was fetched.

`locate` leads from a name to a file. `pull` fetches; it alone uses the network, and huggingface_hub is imported there.
"""

from __future__ import annotations

from localllm.store.errors import NotHere, StoreError
from localllm.store.found import Found
from localllm.store.places import Places
from localllm.store.search import everything, find, locate

__all__ = ["Found", "NotHere", "Places", "StoreError", "everything", "find", "locate"]
