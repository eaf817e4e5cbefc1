"""The entry point of the command line: `localllm`, or `python -m localllm`.

From here on, Ctrl-C ends the program with exit code 130 and without a traceback, even during imports and at interpreter
shutdown. This file, and `localllm/__init__.py` before it, therefore import next to nothing.
"""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130

try:
    import signal
    from types import FrameType
except KeyboardInterrupt:  # Ctrl-C during the import of `signal`, which takes 1 ms
    os._exit(_INTERRUPTED)


def main() -> int:
    """Run the command line in this process, and return the exit code."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False under `nohup`
    if handled:
        signal.signal(signal.SIGINT, _leave)
    try:
        from localllm.cli.main import main as run

        return run(begin=_raise if handled else None)
    except KeyboardInterrupt:  # raised after the command, while errors were printed
        return _INTERRUPTED
    finally:
        if handled:
            signal.signal(signal.SIGINT, _leave)


def _raise() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, which the command line now handles."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process immediately. At this point no file is open."""
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
