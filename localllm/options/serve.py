"""Options of the server. Names and short flags follow llama-server (common/arg.cpp) for the options that both have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from localllm.base.notices import Notice, Setting
from localllm.options.answer import AnswerOptions
from localllm.options.declare import Options, option, same
from localllm.options.kinds import PATH, SIZE, Kind, OptionError, checked, integer, one_of, several

MAX_PARALLEL = 256
MAX_SECONDS = 86_400
KEY_BYTES = 1024


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable() and 0 < len(value) <= KEY_BYTES


def _key(text: str) -> str:
    if not _is_key(text):
        raise OptionError(f"an API key has 1 to {KEY_BYTES} printable ASCII characters")
    return text


def _keys_problem(values: Any) -> str:
    """Return the error in the API keys, or "". The error does not quote any key."""
    good = isinstance(values, tuple) and all(_is_key(value) for value in values)
    return "" if good else f"must be a tuple of texts of 1 to {KEY_BYTES} printable ASCII characters"


def _replicas(text: str) -> str:
    if (problem := _replicas_problem(text)) or not text:
        raise OptionError(f"{text!r} is not {problem or REPLICAS_FORM}")
    return text


def _replicas_problem(value: Any) -> str:
    found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", value) if isinstance(value, str) else None
    if value == "" or (found is not None and 0 < int(found[1]) <= int(found[2] or found[1]) <= MOST_REPLICAS):
        return ""
    return REPLICAS_FORM


MOST_REPLICAS = 64
REPLICAS_FORM = f"a number of replicas from 1 to {MOST_REPLICAS}, or a range such as 1-4"
REPLICAS = Kind(_replicas, _replicas_problem, "N")
PORT = integer(0, 65535, "a port")
KEYS = Kind(_key, _keys_problem, "KEY")
SECONDS = integer(1, MAX_SECONDS)
NAMES = several(Kind(str, checked(lambda value: isinstance(value, str) and bool(value), "a text")))
_repeated = partial(option, (), kind=NAMES, repeat=True)


@dataclass(frozen=True, slots=True)
class ServeOptions(Options):
    """The address of the server, the clients that may use it, and its limits."""

    TITLE: ClassVar[str] = "Server"
    host: str = option(
        "127.0.0.1", "--host", metavar="ADDRESS",
        help="address to listen on, or several separated by commas (0.0.0.0: all networks of this machine)",
    )  # fmt: skip
    port: int = option(8080, "--port", kind=PORT, help="port to listen on (0: any free one)")
    parallel: int = option(
        4, "-np", "--parallel", kind=integer(1, MAX_PARALLEL), help="number of answers to generate at the same time"
    )
    max_tokens: int | None = same(AnswerOptions, "max_tokens", help="maximum answer length, for requests that set none")
    alias: str = option(
        "", "-a", "--alias", metavar="NAME,...", help="names of the model for clients (default: its file name)"
    )
    tags: str = option("", "--tags", metavar="TAG,...", help="tags to list in /v1/models; they have no other effect")
    models: str = option(
        "", "--models", "--models-dir", kind=PATH, metavar="FOLDER", offers="files",
        help="offer every GGUF file in this folder and load it on demand",
    )  # fmt: skip
    memory_limit: int = option(
        0, "--memory-limit", kind=SIZE, shown="",
        help="memory for models and caches, such as 12GB; unloads the least recently used models (0: no limit)",
    )  # fmt: skip
    manage_models: str = option(
        "auto", "--manage-models", kind=one_of("auto", "on", "off"),
        help="let clients download, delete and unload models: on, off, or auto (on if an API key is required or only "
             "this computer can connect)",
    )  # fmt: skip
    cache_dir: str = option(
        "", "--cache-dir", kind=PATH, metavar="FOLDER",
        help="store prompt caches in this folder, so that they survive a restart",
    )  # fmt: skip
    slot_save_path: str = option(
        "", "--slot-save-path", kind=PATH, metavar="FOLDER",
        help="let requests save and restore slots as files in this folder (POST /slots/N?action=save)",
    )  # fmt: skip
    embeddings: bool = option(
        False, "--embeddings", "--embedding", "--rerank", "--reranking",
        help="serve embeddings or ranks instead of text (always on for encoders)",
    )  # fmt: skip
    pooling: str = option(
        "auto", "--pooling", kind=one_of("auto", "none", "mean", "cls", "last", "rank"),
        help="how to pool token vectors: auto (as the file specifies), none, mean, cls, last or rank",
    )  # fmt: skip
    chat_template: str = option(
        "", "--chat-template", "--chat-template-file", metavar="FILE", offers="files",
        help="replace the model's chat template: a file, a Jinja text, or a format such as chatml",
    )  # fmt: skip
    chat_template_kwargs: Mapping[str, Any] = same(AnswerOptions, "chat_template_kwargs")
    think: bool | int | str | None = same(AnswerOptions, "think", flags=("--think", "-rea", "--reasoning"))
    reasoning_format: str = option(
        "auto", "--reasoning-format", kind=one_of("auto", "deepseek", "none"),
        help="where to put reasoning: auto or deepseek (a separate field), or none (in the content)",
    )  # fmt: skip
    api_key: tuple[str, ...] = option(
        (), "--api-key", kind=KEYS, metavar="KEY", repeat=True,
        help=Notice("require this key (repeatable; other users of this machine can see it: prefer ",
                    Setting("api_key_file"), ")"),
    )  # fmt: skip
    api_key_file: str = option(
        "", "--api-key-file", kind=PATH, offers="files", help="require a key from this file, which has one per line"
    )
    allowed_host: tuple[str, ...] = _repeated(
        "--allowed-host", metavar="NAME",
        help="host name under which clients may reach this server, in addition to localhost and IP addresses "
        "(repeatable; *: any)",
    )  # fmt: skip
    cors: tuple[str, ...] = _repeated(
        "--cors", "--cors-origins", metavar="ORIGIN",
        help="web site whose pages may use the server, such as https://chat.example.org (repeatable; *: any)",
    )  # fmt: skip
    timeout: int = option(
        60, "-to", "--timeout", kind=SECONDS, unit="seconds",
        help="disconnect a client that does not send or receive anything for this long",
    )  # fmt: skip
    drain_timeout: int = option(
        0, "--drain-timeout", kind=integer(0, MAX_SECONDS), unit="seconds",
        help="when stopping, wait this long for running answers (0: until they finish)",
    )  # fmt: skip
    sse_ping_interval: int = option(
        15, "--sse-ping-interval", kind=integer(0, MAX_SECONDS), unit="seconds",
        help="send a comment in a stream after this long without data (0: never)",
    )  # fmt: skip
    max_requests: int = option(
        256,
        "--max-requests",
        kind=integer(1, 100_000),
        help="maximum number of open requests, including waiting ones",
    )
    max_client_requests: int = option(
        64,
        "--max-client-requests",
        kind=integer(1, 100_000),
        help="the same per client (an API key or an address)",
    )
    max_client_parallel: int = option(
        0, "--max-client-parallel", kind=integer(0, MAX_PARALLEL), shown="",
        help="maximum number of running answers per client; its other requests wait (0: no limit)",
    )  # fmt: skip
    itl_target: int = option(
        0, "--itl-target", kind=integer(0, 60_000), unit="milliseconds", metavar="MS", shown="",
        help="longest time between two tokens of an answer while prompts are evaluated (0: automatic)",
    )  # fmt: skip
    max_client_tokens: int = option(
        0, "--max-client-tokens", kind=integer(0, 1_000_000_000), unit="tokens", shown="",
        help="maximum number of tokens evaluated and generated per client and minute (0: no limit)",
    )  # fmt: skip
    allow_priority: bool = option(
        False, "--allow-priority", help="let requests set their priority (service_tier: flex, priority or fast)"
    )
    max_body: int = option(
        32 << 20, "--max-body", kind=SIZE, shown="32MiB", help="maximum size of a request, such as 32MiB"
    )
    allow_media_urls: bool = option(
        False, "--allow-media-urls", help="fetch pictures and sound from http(s) URLs in requests, at public addresses"
    )
    media_path: str = option(
        "", "--media-path", kind=PATH, metavar="FOLDER",
        help="let requests read pictures and sound from this folder, as file:NAME",
    )  # fmt: skip
    no_slots: bool = option(False, "--no-slots", help="disable GET /slots")
    no_metrics: bool = option(False, "--no-metrics", help="disable GET /metrics")
    no_web: bool = option(False, "--no-web", "--no-ui", "--no-webui", help="disable the web page at /")
    verbose: bool = option(
        False, "-v", "--verbose", help="include the model's prompt in chat completions (field __verbose)"
    )
    log_prompts: bool = option(
        False, "--log-prompts", help="write prompts and answers to the log (default: only their sizes)"
    )

    replicas: str = option(
        "", "--replicas", kind=REPLICAS, metavar="N|MIN-MAX", shown="1",
        help=Notice("with ", Setting("ray"), ": processes that answer, each with the whole model or all its stages; a "
                    "range starts and ends them as requests need"),
    )  # fmt: skip
    prefill_replicas: int = option(
        0, "--prefill-replicas", kind=integer(0, MOST_REPLICAS), shown="",
        help=Notice("with ", Setting("ray"), ": more processes, which evaluate prompts for the replicas (0: none)"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not all(part.strip() for part in self.host.split(",")):
            raise OptionError(f"host is {self.host!r}: give an address such as 127.0.0.1, or several with commas")
        if self.max_body < 1024:
            raise OptionError(f"max_body is {self.max_body}: give at least 1024 bytes")

    @property
    def replica_range(self) -> tuple[int, int]:
        """The smallest and the largest number of replicas."""
        least, _, most = (self.replicas or "1").partition("-")
        return int(least), int(most or least)
