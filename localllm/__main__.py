"""Start the command line: `localllm`, or `python -m localllm`.

From here on, Ctrl-C ends the program with exit code 130 and without a traceback, even during imports and while Python
shuts down. So this file, and `localllm/__init__.py` before it, import next to nothing.
"""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130

try:
    import signal
    from types import FrameType
except KeyboardInterrupt:  # importing `signal` takes a millisecond
    os._exit(_INTERRUPTED)


def main() -> int:
    """Run the command line in this process, and return the exit code."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise ignored, as after `nohup`
    if handled:
        signal.signal(signal.SIGINT, _leave)
    try:
        from localllm.cli.main import main as run

        return run(begin=_raise if handled else None)
    except KeyboardInterrupt:  # raised after the command, while its errors were printed
        return _INTERRUPTED
    finally:
        if handled:
            signal.signal(signal.SIGINT, _leave)


def _raise() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, now that the command line handles it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process at once. No file is open yet, or all are closed."""
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
