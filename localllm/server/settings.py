"""The server's settings. They are derived once from the options, and API keys become digests."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import read_given
from localllm.base.notices import Notice, Setting
from localllm.options import ServeOptions
from localllm.options.serve import KEY_BYTES, KEYS
from localllm.server.limits import ServerLimits

KEY_FILE_BYTES = 1 << 20


class SettingsError(LocalLLMError):
    """Options that cannot be used on this machine."""


Offer = Literal["model", "folder", "stores"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of the server, except the settings of models."""

    limits: ServerLimits = field(default_factory=ServerLimits)
    addresses: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    keys: frozenset[bytes] = frozenset()  # SHA-256 of each API key; empty: no key required
    hosts: tuple[str, ...] = ()  # names of this server besides localhost, in lower case; "*": any
    origins: tuple[str, ...] = ()  # pages that may use the server; "*": any, "localhost": pages on this machine
    aliases: tuple[str, ...] = ()  # names of the only model; the first name is its id
    tags: tuple[str, ...] = ()
    parallel: int = 4
    pooling: str = "auto"
    max_tokens: int | None = None  # maximum tokens of the output, if the request sets no limit
    drain_seconds: int = 0  # 0: until running requests end
    priorities: bool = False  # whether a request's `service_tier` has an effect
    slots: bool = True
    slot_files: bool = False  # whether slots can be saved
    metrics: bool = True
    web: bool = True  # whether `/` serves the web page
    verbose: bool = False
    log_prompts: bool = False
    offer: Offer = "model"  # one model, a folder of models, or all models on this computer
    names: Mapping[str, str] = field(default_factory=dict)  # the user's short names of models
    locked: str = ""  # why clients may not load, download or delete models; "": they may

    @classmethod
    def of(
        cls,
        options: ServeOptions,
        max_tokens: int | None = None,
        offer: Offer = "model",
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> ServerSettings:
        """Return the settings for `options`. This reads the key file."""
        addresses = tuple(part.strip() for part in options.host.split(","))
        keys = (*options.api_key, *keys_in(options.api_key_file))
        return cls(
            limits=ServerLimits(
                body_bytes=options.max_body,
                requests=options.max_requests,
                client_requests=options.max_client_requests,
                client_tokens=options.max_client_tokens,
                body_seconds=options.timeout,
                send_seconds=options.timeout,
                ping_seconds=options.sse_ping_interval,
            ),
            addresses=addresses,
            port=options.port,
            keys=frozenset(digest(key) for key in keys),
            hosts=tuple(name.lower().rstrip(".") for name in (*addresses, *options.allowed_host)),
            origins=tuple(origin.rstrip("/") for origin in options.cors),
            aliases=() if options.models or offer != "model" else _listed(options.alias),
            tags=_listed(options.tags),
            parallel=options.parallel,
            pooling=options.pooling,
            max_tokens=max_tokens,
            drain_seconds=options.drain_timeout,
            priorities=options.allow_priority,
            slots=not options.no_slots,
            slot_files=bool(options.slot_save_path),
            metrics=not options.no_metrics,
            web=not options.no_web,
            verbose=options.verbose,
            log_prompts=options.log_prompts,
            offer=offer,
            names=names,
            locked=_locked(options.manage_models, addresses, bool(keys)),
        )


def _locked(manage: str, addresses: Sequence[str], keys: bool) -> str:
    """Return why clients may not change models, or "". Without a key, only clients on this computer may."""
    if manage == "off":
        return Notice("this server was started with ", Setting("manage_models", "off"))
    if manage == "on" or keys or all(_is_loopback(address) for address in addresses):
        return ""
    return Notice(
        "this server has no API key and can be reached from other computers, so clients may not change its models; "
        "start it with ",
        Setting("api_key_file"), " or ", Setting("manage_models", "on"),
    )  # fmt: skip


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _listed(text: str) -> tuple[str, ...]:
    """Return the distinct items of a comma-separated string."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def digest(key: str) -> bytes:
    """Return the SHA-256 of an API key; the key itself is not kept."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def keys_in(path: str) -> Sequence[str]:
    """Return the API keys in a file, one per line. Without a path there are none. Raise SettingsError if the file is
    empty."""
    if not path:
        return ()
    try:
        data = read_given(path, 2 * KEY_FILE_BYTES)
    except OSError as error:
        raise SettingsError(f"cannot read the API keys in {path}: {error.strerror}") from None
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    keys = [line for line in lines if line]
    if len(data) > KEY_FILE_BYTES or not keys:
        raise SettingsError(f"{path} has no API keys, or more than {KEY_FILE_BYTES} bytes; give one key per line")
    if KEYS.problem(tuple(keys)):
        raise SettingsError(f"{path} has a line that is not an API key: 1 to {KEY_BYTES} printable ASCII characters")
    return keys
