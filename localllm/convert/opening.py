"""What all open checkpoints share: how opening fails, and the keys of their files in Python's types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from localllm.base.errors import LocalLLMError
from localllm.convert.errors import ConvertError


@contextmanager
def opening(folder: Path, close: Callable[[], None]) -> Iterator[None]:
    """Call `close` if the block fails. Errors of localllm become ConvertErrors that name the folder."""
    try:
        yield
    except LocalLLMError as error:
        close()
        text = str(error)
        raise ConvertError(text if text.startswith(str(folder)) else f"{folder}: {text}") from None
    except BaseException:
        close()
        raise


def plain(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with Python's numbers instead of NumPy's."""
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in stored.items()}
