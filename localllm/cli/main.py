"""`localllm`: the table of commands, and the only place where an error becomes a line and an exit code.

Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 129 and 143 after SIGHUP and SIGTERM, 141 if the
reader of stdout is gone.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from localllm.cli import options
from localllm.cli.app import Command, Filled, UsageError, read
from localllm.cli.flags import typed
from localllm.cli.naming import model_and_words, one_model, several_models, with_command
from localllm.cli.terminal.console import YELLOW, fail, guarded, room, say
from localllm.cli.terminal.signals import unwinding
from localllm.cli.version import version
from localllm.notice import BeyondTraining, NotUsed
from localllm.options import AnswerOptions, SamplingOptions, ServeOptions

ERROR, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def _chat(model: options.ModelName, own: options.Chat, *rest: Any) -> None:
    from localllm.cli.commands.chat import chat, last_talked

    opening, answering, display, keeping, sampling, format_ = _formatted(*rest)
    going_on = last_talked(own, keeping)
    name = one_model(model, going_on.model if going_on is not None else "demo")
    chat(own, name, going_on, opening, answering, display, keeping, sampling, format_)


def _run(own: options.Run, *rest: Any) -> None:
    from localllm.cli.commands.run import read_prompt, run

    name, words = model_and_words(own)
    run(own, name, read_prompt([" ".join(words), own.prompt], own.file), *_formatted(*rest))


def _formatted(
    opening: options.Opening, answering: AnswerOptions, format_: options.Format, *rest: Any
) -> tuple[Any, ...]:
    """Return the options of an answer with what its format adds: instructions of a file, and a chat template."""
    return opening, format_.answering(answering), *rest, format_.template


def _embed(own: options.Embed, opening: options.Opening) -> None:
    from localllm.cli.commands.embed import embed

    embed(own, *model_and_words(own), opening)


def _serve(model: options.ModelName, own: ServeOptions, *rest: Any) -> None:
    from localllm.cli.commands.serve import serve

    if not _named(model) and not own.models:
        raise UsageError("MODEL is required: give a GGUF file, or a folder of models with --models FOLDER")
    serve(own, one_model(model) if _named(model) else "", *rest)


def _named(model: options.ModelName) -> bool:
    return bool(model.words or model.model or model.hf_repo)


def _web(model: options.ModelName, own: ServeOptions, opening: options.Opening, sampling: Mapping[str, Any]) -> None:
    from localllm.cli.commands.serve import serve

    if own.no_web:
        raise UsageError("localllm web opens the page that --no-web leaves out; give one of them")
    serve(own, one_model(model, "demo") if _named(model) or not own.models else "", opening, sampling, browser=True)


def _show(model: options.ModelName, own: options.Show) -> None:
    if own.formats or own.archs:
        from localllm.cli.commands import tables

        wanted = ((own.formats, tables.formats), (own.archs, tables.architectures))
        print("\n\n".join(table(room()) for asked, table in wanted if asked))
        return
    from localllm.cli.commands.show import show

    show(own, one_model(model))


def _bench(models: options.ModelNames, own: options.Bench) -> None:
    from localllm.cli.commands.bench import bench

    bench(own, several_models(models))


def _perplexity(model: options.ModelName, own: options.Perplexity, opening: options.Measuring) -> None:
    from localllm.cli.commands.perplexity import perplexity

    perplexity(own, one_model(model), opening)


def _imatrix(model: options.ModelName, own: options.Imatrix, opening: options.Measuring) -> None:
    from localllm.cli.commands.imatrix import imatrix

    imatrix(own, one_model(model), opening)


def _quantize(own: options.Quantize) -> None:
    from localllm.cli.commands.quantize import quantize

    quantize(own)


def _devices(own: options.Devices) -> None:
    from localllm.cli.commands.devices import devices

    devices(own)


def _doctor(own: options.Doctor) -> None:
    from localllm.cli.commands.doctor import doctor

    doctor(own)


def _pull(own: options.Pull) -> None:
    from localllm.cli.commands.pull import pull

    pull(own)


def _list(own: options.ListModels) -> None:
    from localllm.cli.commands.list import list_models

    list_models(own)


def _remove(own: options.Remove) -> None:
    from localllm.cli.commands.rm import remove

    remove(own)


def _config(own: options.Config) -> None:
    from localllm.cli.commands.config import config

    config(own, COMMANDS)


_SERVING = (options.ModelName, ServeOptions, options.Opening, SamplingOptions)
_ANSWERING = (options.Opening, AnswerOptions, options.Format, options.Display, options.Keeping, SamplingOptions)

_COMMANDS: dict[str, Command] = {
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
        _SERVING,
        _serve,
    ),
    "web": Command(
        "[MODEL]",
        "chat with a model on a web page (default: the built-in demo)",
        "Runs the same server as localllm serve, and opens its page in the browser.",
        _SERVING,
        _web,
    ),
    "pull": Command(
        "USER/REPO[:QUANT]",
        "fetch a model from the Hugging Face hub",
        "QUANT is a quantization (Q4_K_M), the beginning of one, or a file's name. Without QUANT, the largest usual\n"
        "type that fits the free memory. An interrupted pull continues. HF_TOKEN, HF_ENDPOINT and HF_HOME are heeded.",
        (options.Pull,),
        _pull,
    ),
    "list": Command(
        "",
        "list the models on this computer",
        "Those that were pulled, and those of llama.cpp, Ollama and LM Studio. Each name can be given as MODEL.",
        (options.ListModels,),
        _list,
    ),
    "rm": Command(
        "NAME",
        "delete a model that pull has fetched",
        "Files of other programs are never deleted.",
        (options.Remove,),
        _remove,
    ),
    "show": Command(
        "MODEL", "show what is in a model file and what memory it needs", "", (options.ModelName, options.Show), _show
    ),
    "bench": Command(
        "MODEL...",
        "measure speed, as llama-bench does",
        "GB/s: bytes that decoding reads. % of roof: share of the read bandwidth. GOP/s: operations of a prompt.\n"
        "p50, p90, p99 ms: time from one decoded token to the next. load s: opening the model. peak: most memory used.",
        (options.ModelNames, options.Bench),
        _bench,
    ),
    "devices": Command(
        "",
        "list the devices that can run models",
        "Shows the memory and the copy speed of each device. If a kind of device is missing, stderr says why.",
        (options.Devices,),
        _devices,
    ),
    "doctor": Command(
        "",
        "show what a bug report needs to know about this computer",
        "Versions, processor, kernels, memory, speed, devices and caches, to paste into a report. Takes some seconds.",
        (options.Doctor,),
        _doctor,
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
_CONFIG = Command(
    "[COMMAND|path|check]",
    "show the value of every option and where it comes from",
    "Flags come first, then variables LOCALLLM_NAME, a preset, the configuration file, a model file's recommendation,\n"
    "defaults.",
    (options.Config,),
    _config,
)
COMMANDS = {
    name: command._replace(groups=(*command.groups, options.Configuration)) for name, command in _COMMANDS.items()
} | {"config": _CONFIG}


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
    """Print warnings of localllm as notes: no cache of compiled code, or something that is not used. Each once."""
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
    if words == ["--version"]:
        print(f"localllm {version()}")
        return
    if not words or words[0] == "help":
        words = [*words[1:], "--help"]
    asked = read(COMMANDS, with_command(words, COMMANDS), _configured)
    if asked is not None:
        asked.run()


def _configured(name: str, given: Mapping[str, Any]) -> Filled:
    from localllm.cli.configuration import filled

    found = filled(COMMANDS, name, given)
    if name != "run" or not _lacks_prompt(found.values):
        return found
    for flag, option in (("--raw", "raw"), ("--prompt-cache-all", "prompt_cache_all")):
        if found.values.get(option):
            raise UsageError(f"{flag} needs a prompt; without one, run opens a chat")
    model = {key: found.values[key] for key in ("words", "model", "hf_repo") if key in found.values}
    return filled(COMMANDS, "chat", {**given, **model})  # with the options that the configuration gives a chat


def _lacks_prompt(values: Mapping[str, Any]) -> bool:
    """Return whether `run` was asked for a model alone, on a terminal."""
    named = bool(values.get("model") or values.get("hf_repo"))
    words = values.get("words", ())
    return len(words) == (not named) and not values.get("prompt") and not values.get("file") and sys.stdin.isatty()


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
