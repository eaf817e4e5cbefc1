"""Fixtures of the conversion tests: one child process per session parses all tokenizers, because starting one takes
longer than most conversions.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localllm.convert import tokenizer_keys
from localllm.sandbox import Confined, ResourceLimits, folder_tokenizer
from tests.fuzz.children import PerProcess

SMALL = 1 << 16  # size limit of a tokenizer.json in characters; a larger file gets a separate child


@pytest.fixture(scope="package", autouse=True)
def shared_child() -> Iterator[None]:
    """Share one tokenizer child among all tests, under the strictest limits.

    The program starts one child per checkpoint.
    """
    child = PerProcess(folder_tokenizer.__name__, folder_tokenizer.limits(""))
    most = folder_tokenizer.limits("x" * SMALL).memory

    def confined(task: str, limits: ResourceLimits) -> PerProcess | Confined:
        assert task == folder_tokenizer.__name__
        return child if limits.memory <= most else Confined(task, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_keys, "Confined", confined)
        yield
    child.get().close()
