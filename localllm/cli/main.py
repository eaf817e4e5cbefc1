"""`localllm`: the table of commands, and the only place where an error becomes a line and an exit code.

Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 129 and 143 after SIGHUP and SIGTERM, 141 if the
reader of stdout is gone.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from localllm.cli import options
from localllm.cli.app import Command, UsageError, read
from localllm.cli.flags import typed
from localllm.cli.terminal.console import YELLOW, fail, guarded, say
from localllm.cli.terminal.signals import unwinding
from localllm.cli.version import version
from localllm.options import AnswerOptions, SamplingOptions, ServeOptions

ERROR, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def _chat(model: options.ModelName, own: options.Chat, *rest: Any) -> None:
    from localllm.cli.commands.chat import chat

    chat(own, _one_model(model, "demo"), *rest)


def _run(own: options.Run, *rest: Any) -> None:
    from localllm.cli.commands.run import read_prompt, run

    words = list(own.words)
    name = _one_model(options.ModelName((), own.model) if own.model else options.ModelName(tuple(words[:1])))
    prompt = read_prompt([" ".join(words if own.model else words[1:]), own.prompt], own.file)
    run(own, name, prompt, *rest)


def _embed(own: options.Embed, opening: options.Opening) -> None:
    from localllm.cli.commands.embed import embed

    words = list(own.words)
    name = _one_model(options.ModelName((), own.model) if own.model else options.ModelName(tuple(words[:1])))
    embed(own, name, words if own.model else words[1:], opening)


def _serve(model: options.ModelName, own: ServeOptions, *rest: Any) -> None:
    from localllm.cli.commands.serve import serve

    given = bool(model.words or model.model)
    if not given and not own.models:
        raise UsageError("MODEL is required: give a GGUF file, or a folder of models with --models FOLDER")
    serve(own, _one_model(model) if given else "", *rest)


def _show(model: options.ModelName, own: options.Show) -> None:
    if own.formats or own.archs:
        from localllm.cli.commands import tables

        wanted = ((own.formats, tables.formats), (own.archs, tables.architectures))
        print("\n\n".join(table() for asked, table in wanted if asked))
        return
    from localllm.cli.commands.show import show

    show(own, _one_model(model))


def _bench(model: options.ModelName, own: options.Bench) -> None:
    from localllm.cli.commands.bench import bench

    bench(own, _one_model(model))


def _perplexity(model: options.ModelName, own: options.Perplexity, opening: options.Measuring) -> None:
    from localllm.cli.commands.perplexity import perplexity

    perplexity(own, _one_model(model), opening)


def _imatrix(model: options.ModelName, own: options.Imatrix, opening: options.Measuring) -> None:
    from localllm.cli.commands.imatrix import imatrix

    imatrix(own, _one_model(model), opening)


def _quantize(own: options.Quantize) -> None:
    from localllm.cli.commands.quantize import quantize

    quantize(own)


def _devices(own: options.Devices) -> None:
    from localllm.cli.commands.devices import devices

    devices(own)


def _one_model(given: options.ModelName, default: str = "") -> str:
    """Return the one MODEL that was given; UsageError for none or several."""
    names = [name for name in (*given.words, given.model) if name]
    if len(names) > 1:
        raise UsageError(f"expected one MODEL, got {len(names)}: {', '.join(names)}")
    if not names and not default:
        raise UsageError("MODEL is required: give a GGUF file, or demo for the built-in model")
    return names[0] if names else default


_ANSWERING = (options.Opening, AnswerOptions, options.Keeping, SamplingOptions)

COMMANDS: dict[str, Command] = {
    "chat": Command(
        "[MODEL]",
        "chat with a model (default: the built-in demo)",
        "Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. From a pipe, every line is one turn.",
        (options.ModelName, options.Chat, *_ANSWERING),
        _chat,
    ),
    "run": Command(
        "MODEL [PROMPT]",
        "answer one prompt on stdout",
        "The prompt is PROMPT, piped input, or both in this order. If the file has a chat template, the prompt is one\n"
        "turn of a chat. If it has none, or with --raw, the model continues the prompt as plain text.",
        (options.Run, *_ANSWERING),
        _run,
    ),
    "embed": Command(
        "MODEL [TEXT...]",
        "print embeddings of texts, or rank documents",
        "A text is a TEXT, or a line of FILE or of piped input. With --query a reranker scores each text.",
        (options.Embed, options.Opening),
        _embed,
    ),
    "serve": Command(
        "[MODEL]",
        "answer programs over HTTP",
        "Speaks the APIs of OpenAI, Anthropic, Ollama and llama.cpp. A request's tokens are the same alone and in\n"
        "company. Without MODEL, give --models FOLDER.",
        (options.ModelName, ServeOptions, options.Opening, SamplingOptions),
        _serve,
    ),
    "show": Command(
        "MODEL", "show what is in a model file and what memory it needs", "", (options.ModelName, options.Show), _show
    ),
    "bench": Command(
        "MODEL",
        "measure speed, as llama-bench does",
        "GB/s: bytes that decoding reads. % of roof: share of the read bandwidth. GOP/s: operations of a prompt.",
        (options.ModelName, options.Bench),
        _bench,
    ),
    "devices": Command(
        "",
        "list the devices that can run models",
        "Shows the memory and the copy speed of each device. If a kind of device is missing, stderr says why.",
        (options.Devices,),
        _devices,
    ),
    "perplexity": Command(
        "MODEL",
        "measure how well a model predicts a text",
        "Uses llama.cpp's definition: independent windows, each scored over its second half.",
        (options.ModelName, options.Perplexity, options.Measuring),
        _perplexity,
    ),
    "imatrix": Command(
        "MODEL",
        "measure which weights matter on a text, for quantize --imatrix",
        "Averages the squared inputs of every matrix over the text. llama.cpp can read the file.",
        (options.ModelName, options.Imatrix, options.Measuring),
        _imatrix,
    ),
    "quantize": Command(
        "IN [OUT] TYPE",
        "make a smaller model file",
        "IN is a GGUF file or a Hugging Face folder. TYPE is a llama-quantize name or number, such as Q4_K_M,\n"
        "and chooses the same formats; COPY changes none. Without OUT, it is written beside IN. --fit or --max-kld\n"
        "replace TYPE.",
        (options.Quantize,),
        _quantize,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in (words[: words.index("--")] if "--" in words else words)
    if debug:
        words.remove("--debug")
    _make_streams_safe()
    with guarded():
        return _guarded_main(words, debug)


def _guarded_main(words: list[str], debug: bool) -> int:
    try:
        with unwinding(), _warnings_as_notes():
            _dispatch(words)
        sys.stdout.flush()
        return 0
    except SystemExit as leave:  # from Typer after shell completion, or from a signal
        return leave.code if isinstance(leave.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is still buffered
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
    """Print a warning that compiled code is not cached as a note, once per command."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def told(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            from localllm.quant.codecache import NoCodeCache

            if issubclass(category, NoCodeCache):
                say(f"note: {message}", YELLOW)
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = told
        yield


def _dispatch(words: list[str]) -> None:
    if words == ["--version"]:
        print(f"localllm {version()}")
        return
    if not words or words[0] == "help":
        words = [*words[1:], "--help"]
    asked = read(COMMANDS, words)
    if asked is not None:
        asked.run()


def _explain(error: Exception) -> int:
    """Print what went wrong in one line, and return the exit code."""
    if isinstance(error, UsageError):
        fail(str(error))
        return USAGE
    if isinstance(error, MemoryError):
        fail(f"not enough memory: {typed(error) or 'none is left'}; use a smaller model or context (-c)")
    elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # Python's own message
        fail("not enough memory, or too low a limit, for this many threads; use fewer (-t)")
    else:
        fail(_text(error) if isinstance(error, _users()) else _bug(error))
    return ERROR


def _users() -> tuple[type[Exception], ...]:
    """Return the types of errors that the user can fix."""
    from localllm.backends import BackendError
    from localllm.errors import LocalLLMError
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
