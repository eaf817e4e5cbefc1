"""Offer a model to a user without a default model: one on this computer, or one to fetch.

`localllm` and `localllm chat` without MODEL make the offer once, `localllm pull` without a name again.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from localllm.backends.base import F16_CACHE, BackendError
from localllm.base.errors import LocalLLMError
from localllm.base.machine.memory import memory
from localllm.base.printable import printable
from localllm.cli.app import UsageError
from localllm.cli.chat.state import state_folder
from localllm.cli.commands.config_set import set_option
from localllm.cli.commands.doctor_speed import load_remark
from localllm.cli.commands.pull import fetched
from localllm.cli.forecast import DecodeSpeed, TokenCost, cost_of, cost_of_known, planned
from localllm.cli.terminal.asking import accepts
from localllm.cli.terminal.console import RED, YELLOW, say
from localllm.cli.terminal.formatting import rate_text, size
from localllm.gguf import open_gguf
from localllm.hub import StoredModel, StoreError, StoreFolders, everything
from localllm.hub.choose import SHARE, needed
from localllm.hub.short_names import KnownModel, known_model
from localllm.loading.loader import free_memory
from localllm.models import ModelError
from localllm.tokenizer import has_tokenizer

COMFORTABLE = 7.0  # tokens per second, about the speed of reading
# Models for conversation, the best first (November 2026): larger is better, then younger.
WORTH = (
    "qwen3.5:35b",
    "qwen3:30b",
    "gpt-oss:20b",
    "qwen3:14b",
    "gemma3:12b",
    "qwen3.5:9b",
    "qwen3:8b",
    "qwen3.5:4b",
    "qwen3:4b",
    "llama3.2:3b",
    "qwen3.5:2b",
    "qwen3:1.7b",
    "llama3.2:1b",
    "qwen3:0.6b",
)
_DECLINED = "first-model-declined"  # an empty file in the state folder
_OPENED = 8  # models on this computer whose speed is forecast, the largest first
_TEMPLATE = "tokenizer.chat_template"


class Offer(NamedTuple):
    """A model that fits, with its forecast speed."""

    name: str
    facts: str  # quantization, size and licence
    tokens_per_second: float


def first_model(config: str = "") -> str:
    """Return the model that the user accepts, now the default model, or "" for the bundled one. `config` names the
    configuration file that the choice is written to, if it is not the usual one.

    A user who has declined is not asked again. Raise KeyboardInterrupt for Ctrl-C, and SystemExit for Ctrl-D.
    """
    folder = state_folder()
    declined = folder / _DECLINED if folder is not None else None
    if declined is not None and declined.exists():
        return ""
    return _offer(config, declined)


def offer_again(config: str = "") -> str:
    """Make the offer, also to a user who has declined it. Return the accepted model or ""."""
    return _offer(config, None)


def _offer(config: str, declined: Path | None) -> str:
    free, places = free_memory(), StoreFolders.here()
    say("measuring which model suits this computer ...")
    try:
        with DecodeSpeed() as speed:
            here = best_here(everything(places), free, speed.tokens_per_second)
            known = [each for name in WORTH if (each := known_model(name)) is not None]
            new = best_known(known, free, _room(places.hub), lambda each: speed.tokens_per_second(cost_of_known(each)))
    except (BackendError, MemoryError) as error:
        say(f"no model can be suggested, because the speed cannot be measured: {error}", RED)
        return ""
    if busy := load_remark((os.cpu_count() or 1) / 2):
        say(f"{busy}, so these speeds are low; `localllm pull` measures again", YELLOW)
    try:
        if here is not None and accepts(f"{_here(here)}: you already have {_named(here)}; use it?"):
            return _chosen(here.name, config)
        if new is not None and accepts(f"{_here(new)}: fetch {_named(new)}?"):
            return _chosen(_fetched(new.name), config)
    except EOFError:
        raise SystemExit(0) from None
    if here is None and new is None:
        say(f"no model in the table fits in {size(free)} of free memory, so the bundled model is used")
    elif declined is not None:
        with suppress(OSError):  # asked again
            declined.touch()
        say("`localllm pull` makes this offer again")
    return ""


def _fetched(name: str) -> str:
    """Return the name of a model after fetching it, or "" with the reason on stderr."""
    known = known_model(name)
    assert known is not None
    try:
        fetched(known.reference)
    except StoreError as error:
        say(f"error: {error}", RED)
        say("using the bundled model for now")
        return ""
    return known.reference


def _chosen(name: str, config: str) -> str:
    """Make a model the default model, if the configuration can be written. Return its name."""
    if name:
        try:
            set_option(config, "model", name)
            where = f" --config {shlex.quote(config)}" if config else ""
            say(f"it is now the default model; `localllm config unset model{where}` undoes this")
        except (UsageError, LocalLLMError) as error:
            say(f"it does not become the default model: {error}", RED)
    return name


def best_here(models: Iterable[StoredModel], free: int, speed: Callable[[TokenCost], float]) -> Offer | None:
    """Return the largest model on this computer that fits `free` bytes, chats, and is comfortable to read,
    otherwise the fastest that fits. Models that cannot run are skipped."""
    whole = [each for each in models if not each.problem and _fits(each.bytes, free)]
    found = []
    for each in sorted(whole, key=lambda each: -each.bytes)[:_OPENED]:
        cost = _chat_cost(each.path)
        if cost is None:
            continue
        label = f"{each.label}, " if each.label and each.label not in each.name else ""
        facts = f"{label}{size(each.bytes)}"
        found.append(Offer(each.name, facts, speed(cost)))
        if found[-1].tokens_per_second >= COMFORTABLE:
            return found[-1]
    return max(found, key=lambda each: each.tokens_per_second, default=None)


def best_known(
    models: Sequence[KnownModel], free: int, disk: int, speed: Callable[[KnownModel], float]
) -> Offer | None:
    """Return the first model that fits `free` bytes of memory and `disk` bytes, and is comfortable to read,
    otherwise the fastest that fits. `models` are ordered, the best first."""
    found = []
    for each in models:
        if not _fits(each.bytes, free) or each.bytes > disk:
            continue
        facts = f"{each.quant}, {each.bytes / 1e9:.1f} GB, {each.licence}"
        found.append(Offer(each.name, facts, speed(each)))
        if found[-1].tokens_per_second >= COMFORTABLE:
            return found[-1]
    return max(found, key=lambda each: each.tokens_per_second, default=None)


def _fits(held: int, free: int) -> bool:
    return needed(held) <= SHARE * free


def _chat_cost(path: Path) -> TokenCost | None:
    """Return the cost of a token, or None if the file cannot chat on this computer."""
    try:
        with open_gguf(path) as file:
            if _TEMPLATE not in file.metadata or not has_tokenizer(file.metadata):
                return None
            plan = planned(file, 0)
            if plan.plan.encodes or not plan.plan.causal:
                return None
            return cost_of(plan.plan, plan.limits, F16_CACHE, 0)
    except (LocalLLMError, ModelError, BackendError, OSError):
        return None


def _named(offer: Offer) -> str:
    return f"{printable(offer.name)}, {offer.facts}"


def _here(offer: Offer) -> str:
    """Return the memory of this computer, and the speed of a model on it."""
    found = memory()
    total = min(found.total, found.limit or found.total)
    return f"{f'{size(total)}, ' if total else ''}about {rate_text(offer.tokens_per_second)} tokens/s"


def _room(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is or will be on."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
