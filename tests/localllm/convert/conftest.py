"""The folders of these tests share one child process, because starting one takes longer than converting most
folders.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localllm.convert import tokenizer_keys
from localllm.sandbox import Confined, ResourceLimits, folder_tokenizer
from tests.fuzz.children import PerProcess

SMALL = 1 << 16  # characters of a tokenizer.json; a larger one gets a child with separate limits


@pytest.fixture(scope="package", autouse=True)
def shared_child() -> Iterator[None]:
    """The program starts a child per folder, because it converts one. The limits are the strictest that it sets."""
    child = PerProcess(folder_tokenizer.__name__, folder_tokenizer.limits(""))
    most = folder_tokenizer.limits("x" * SMALL).memory

    def confined(task: str, limits: ResourceLimits) -> PerProcess | Confined:
        assert task == folder_tokenizer.__name__
        return child if limits.memory <= most else Confined(task, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_keys, "Confined", confined)
        yield
    child.get().close()
