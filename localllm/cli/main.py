"""`localllm`: runs a command line. Only this module turns an error into a line and an exit code.

The commands are in `localllm.cli.table`.

Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 129 and 143 after SIGHUP and SIGTERM, 141 if the
reader of stdout is gone.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from localllm.base.notices import BeyondTraining, NotUsed
from localllm.cli.app import CommandLine, UsageError, read_command_line
from localllm.cli.flags import typed
from localllm.cli.naming import model_words, with_command
from localllm.cli.options import ModelName
from localllm.cli.table import COMMANDS
from localllm.cli.terminal.asking import on_terminal
from localllm.cli.terminal.console import YELLOW, fail, guarded, say
from localllm.cli.terminal.signals import unwinding
from localllm.cli.version import version

ERROR, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None, begin: Callable[[], None] | None = None) -> int:
    """Run a command line, and return the exit code. `begin` is called once Ctrl-C is handled."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in (words[: words.index("--")] if "--" in words else words)
    if debug:
        words.remove("--debug")
    _make_streams_safe()
    with guarded():
        return _guarded_main(words, debug, begin)


def _guarded_main(words: list[str], debug: bool, begin: Callable[[], None] | None) -> int:
    try:
        if begin is not None:
            begin()
        with unwinding(), _warnings_as_notes():
            _dispatch(words)
        sys.stdout.flush()
        return 0
    except SystemExit as leave:  # raised by Typer after shell completion, or by a signal handler
        return leave.code if isinstance(leave.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the data that is still buffered
        return BROKEN_PIPE
    except Exception as error:
        if not debug:
            return _explain(error)
        from traceback import print_exception

        print_exception(error)
        return ERROR


def _make_streams_safe() -> None:
    """Replace closed streams, and write "?" for characters that cannot be encoded."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print each of localllm's warnings once, as a note. Examples are a missing code cache or an option without
    effect."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def told(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            from localllm.quant.codecache import NoCodeCache

            if issubclass(category, (NoCodeCache, NotUsed, BeyondTraining)):
                text = typed(message) if isinstance(message, Warning) else message
                say(f"note: {text}", YELLOW)
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = told
        yield


def _dispatch(words: list[str]) -> None:
    if words in (["--version"], ["version"]):
        print(f"localllm {version()}")
        return
    if not words and on_terminal():
        words = ["chat"]
    elif not words or words[0] == "help":
        words = [*words[1:], "--help"]
    line = read_command_line(COMMANDS, with_command(words, COMMANDS))
    if line is not None:
        line = _named(_configured(line))
        COMMANDS[line.name].run(line)


def _named(line: CommandLine) -> CommandLine:
    """Replace the user's short names, and add the options of a derived model."""
    from localllm.cli.derived import with_derived
    from localllm.cli.expand import expanded

    return with_derived(expanded(line))


def _configured(typed_line: CommandLine) -> CommandLine:
    """Add the options from other sources. If `run` has no prompt, change the command to `chat`."""
    from localllm.cli.configuration import filled

    line = filled(COMMANDS, typed_line)
    if line.name != "run" or not _lacks_prompt(line.values):
        return line
    for flag, option in (("--raw", "raw"), ("--prompt-cache-all", "prompt_cache_all")):
        if line.values.get(option):
            raise UsageError(f"{flag} needs a prompt; without one, run opens a chat")
    model = {key: line.values[key] for key in ("words", "model", "hf_repo") if key in line.values}
    return filled(COMMANDS, CommandLine("chat", {**typed_line.values, **model}))


def _lacks_prompt(values: Mapping[str, Any]) -> bool:
    """Return whether `run` has no prompt, on a terminal."""
    if values.get("prompt") or values.get("file") or not sys.stdin.isatty():
        return False
    given = ModelName(*(values.get(key, default) for key, default in (("words", ()), ("model", ""), ("hf_repo", ""))))
    return len(given.words) == model_words(given)


def _explain(error: Exception) -> int:
    """Print the error in one line, and return the exit code."""
    if isinstance(error, UsageError):
        fail(str(error))
        return USAGE
    if isinstance(error, MemoryError):
        fail(f"not enough memory: {typed(error) or 'none is left'}; use a smaller model or context (-c)")
    elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # Python's own message
        fail("not enough memory, or the limit is too low, for this many threads; use fewer (-t)")
    else:
        fail(_text(error) if isinstance(error, _users()) else _bug(error))
    return ERROR


def _users() -> tuple[type[Exception], ...]:
    """Return the types of errors that the user can fix."""
    from localllm.backends import BackendError
    from localllm.base.errors import LocalLLMError
    from localllm.models import ModelError
    from localllm.quant import QuantError

    return LocalLLMError, ModelError, BackendError, QuantError, OSError


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return typed(error)


def _bug(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"bug in localllm: {type(error).__name__}: {error}{where}; --debug shows the traceback to report"
