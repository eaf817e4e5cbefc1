"""Keeps Ray's own lines out of the terminal, as far as Ray has no setting for them (package.py): asyncio reports the
errors of tasks that Ray has started and forgotten.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2  # file descriptor
_MODULES = "ray."  # the modules of Ray's errors begin so


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block, asyncio does not report errors of Ray."""
    logger = logging.getLogger("asyncio")
    logger.addFilter(_is_ours)
    try:
        yield
    finally:
        logger.removeFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not type(error).__module__.startswith(_MODULES)


@contextmanager
def silent() -> Iterator[None]:
    """Within the block, nothing is written to the file behind stderr: Ray's core says there which log level it has."""
    try:
        before = os.dup(STDERR)
    except OSError:  # stderr is closed
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDERR)
        os.close(nowhere)
        yield
    finally:
        os.dup2(before, STDERR)
        os.close(before)
