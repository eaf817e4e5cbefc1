"""`localllm serve`: answer HTTP requests."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from localllm import Model, load
from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import exposed
from localllm.base.machine.heap import limit_spare
from localllm.base.notices import Notice, Setting
from localllm.base.units import size
from localllm.cli.commands.page import page_address, show_page
from localllm.cli.naming import title
from localllm.cli.options import OpeningOptions
from localllm.cli.terminal.answer import tell
from localllm.cli.terminal.console import YELLOW, LoadProgress, say
from localllm.generation.interfaces import SchedulerLimits
from localllm.hub import StoredModel, StoreFolders
from localllm.hub.short_names import wanted_reference
from localllm.loading.loader import MEMORY_SHARE, free_memory
from localllm.loading.mmproj import OFF
from localllm.loading.resolve import resolve
from localllm.options import ServeOptions
from localllm.plan import BLOCK
from localllm.saved.prefix_files import PrefixFiles
from localllm.saved.slot_files import SlotFiles, check_folder
from localllm.server.admission import Admission
from localllm.server.app import make_app
from localllm.server.catalogue import folder_of, only, stores
from localllm.server.metrics import Metrics
from localllm.server.registry import ModelRegistry
from localllm.server.run import listen
from localllm.server.run import run_server as run
from localllm.server.served import Served
from localllm.server.service import Service, Usual
from localllm.server.settings import Offer, ServerSettings
from localllm.server.store import ModelStore
from localllm.server.uploads import UploadRules
from localllm.template import given_template

CACHE_SHARE = 4  # a model's cache takes a quarter of the memory, unless the context size is given
UVICORN = "uvicorn.error"  # uvicorn's logger for start and stop messages


def serve(
    own: ServeOptions, name: str, opening: OpeningOptions, sampling: Mapping[str, Any], browser: bool = False,
    default: str = "",
    names: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Serve one model, a folder of models (`--models`) or, without either, all models on this computer, until SIGTERM
    or Ctrl-C. `browser` opens the web page once the server is ready. `default` is the model of requests that name none,
    and `names` has the user's short names.
    """
    if name and own.models:
        raise LocalLLMError("MODEL and --models FOLDER exclude each other; give one, or put the file into the folder")
    mmproj = str(opening.options.mmproj)
    if mmproj and mmproj not in OFF and not name:
        raise LocalLLMError(Notice(Setting("mmproj", mmproj), ": goes with one model; name it"))
    machines = opening.machines
    if machines.ray:
        _check_ray(own, name, machines.number)
    elif own.replicas:
        raise LocalLLMError(f"--replicas {own.replicas} needs --ray auto or --ray HOST:PORT")
    elif own.prefill_replicas:
        raise LocalLLMError(f"--prefill-replicas {own.prefill_replicas} needs --ray auto or --ray HOST:PORT")
    offer: Offer = "folder" if own.models else "model" if name else "stores"
    settings = ServerSettings.of(own, own.max_tokens, offer, names or {})
    if own.slot_save_path:
        check_folder(Path(own.slot_save_path))
    format_ = given_template(own.chat_template) if own.chat_template else None
    alias, places = settings.aliases[0] if settings.aliases else _title(name), StoreFolders.here()
    scan = (
        folder_of(Path(own.models)) if offer == "folder"
        else only(alias, Path(resolve(name))) if offer == "model"
        else stores(places)
    )  # fmt: skip
    sockets = listen(settings)
    limit_spare()
    for folder in dict.fromkeys(filter(None, (own.cache_dir, own.slot_save_path))):
        if exposed(Path(folder)):
            danger = f"other users can write to {folder} and delete the prompts stored there"
            say(f"note: {danger}; chmod go-w {folder}", YELLOW)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger(UVICORN).setLevel(logging.WARNING)  # until ready, so that a loading error prints one line
    metrics, admission = Metrics(), Admission(settings.limits)

    memory = own.memory_limit or (0 if offer == "model" else int(MEMORY_SHARE * free_memory()))

    def limits_for(aligned: int) -> SchedulerLimits:
        return SchedulerLimits(
            own.parallel, own.max_client_parallel, own.max_requests, itl_target=own.itl_target / 1000, aligned=aligned
        )

    def prepare(model: Model) -> None:
        if format_ is not None and not model.embeds:
            model.use_template(format_)

    def opened(path: Path) -> Served:
        if machines.ray:
            from localllm.distributed.front import open_front

            return open_front(
                path, own.replica_range, machines.number, opening.options, limits_for(1), metrics, sampling, say,
                prepare, own.prefill_replicas,
            )  # fmt: skip
        most = memory if offer != "model" else 0
        most_cache = 0 if opening.options.ctx_size else most // CACHE_SHARE  # leave room for other models
        with LoadProgress() as progress:
            model = load(
                path, opening.options, progress=progress, sequences=own.parallel, embeddings=own.embeddings,
                memory=most, most_cache=most_cache,
            )  # fmt: skip
        try:
            tell(model)
            prepare(model)
            limits = limits_for(model.prompt_alignment)
            store = PrefixFiles(Path(own.cache_dir), model) if own.cache_dir and not model.embeds else None
            slots = SlotFiles(Path(own.slot_save_path), model) if own.slot_save_path and not model.embeds else None
            return Served(model, limits, metrics, sampling, store, slots)
        except BaseException:
            model.close()
            raise

    extra = None
    if os.path.isfile(default):
        extra, default = StoredModel(_title(default), "", (Path(default),)), _title(default)
    registry = ModelRegistry(
        scan, opened, memory, own.embeddings, default, live=offer != "model", strict=offer == "stores",
        hidden=StoredModel("demo", "", (resolve("demo"),)) if offer == "stores" else None,
        extra=extra, names=names,
    )  # fmt: skip
    usual = Usual.of(own.think, own.reasoning_format == "none", own.chat_template_kwargs)
    media = Path(own.media_path) if own.media_path else None
    if media is not None and not media.is_dir():
        raise LocalLLMError(Notice(Setting("media_path", own.media_path), ": no such folder; give an existing one"))
    service = Service(registry, usual, UploadRules(own.allow_media_urls, media, own.max_body))
    if offer == "stores":
        service.store = ModelStore(places, registry, lambda: memory, partial(wanted_reference, own=names or {}))
    metrics.loads = service.loads

    async def ready() -> None:
        port = sockets[0].getsockname()[1]
        if offer == "model":
            await registry.load(alias)
            served = registry.loaded(alias)
            assert served is not None
            say(plan_line(served, own.parallel))
        else:
            count, where = len(registry.infos), own.models or "this computer"
            if offer == "stores" and [info.id for info in registry.infos] == ["demo"]:
                say("no models on this computer yet; the bundled demo answers until one is pulled")
            else:
                say(f"{count} model{'s' * (count != 1)} of {where}; each is loaded when a request names it")
        for address in settings.addresses:
            say(f"listening on http://{address}:{port} (stop with Ctrl-C)")
        logging.getLogger(UVICORN).setLevel(logging.INFO)
        if browser:
            show_page(page_address(settings.addresses[0], port))

    with ExitStack() as cluster:
        if machines.ray:
            from localllm.distributed.attach import attached

            cluster.enter_context(attached(machines.ray, say))
        try:
            run(make_app(service, settings, metrics, admission), settings, admission, sockets, ready)
        finally:
            loading = registry.end()
    if loading:  # the threads of an unfinished load would keep the process alive
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def _check_ray(own: ServeOptions, name: str, stages: int) -> None:
    """Raise LocalLLMError for options that a server with replicas does not support."""
    if not name:
        raise LocalLLMError("--ray serves one model: name it (localllm serve MODEL --ray auto)")
    for setting in ("cache_dir", "slot_save_path"):
        if own.values()[setting]:
            problem = "stores the cache of this process, but with --ray other processes have it; leave it out"
            raise LocalLLMError(Notice(Setting(setting), f" {problem}"))
    if own.prefill_replicas and stages > 1:
        problem = "such a replica has all layers in one process; leave out --stages"
        raise LocalLLMError(f"--prefill-replicas {own.prefill_replicas}: {problem}")
    if own.embeddings:
        raise LocalLLMError("--embeddings does not run on --ray; a chat model gives embeddings without it")


def plan_line(served: Served, parallel: int) -> str:
    """Return a line with the memory of the model and the number of tokens that fit in it."""
    model, total, facts = served.model, served.bytes, served.model.facts
    if served.embeds:
        return f"memory {size(total)}; texts of up to {model.context} tokens"
    tokens = min(facts.blocks * BLOCK, parallel * model.context)
    beside = f", draft model {size(facts.draft)}" if facts.draft else ""
    beside += f", encoders {size(facts.encoders)}" if facts.encoders else ""
    return (
        f"memory {size(total)}: weights {size(facts.weights)}, cache {size(facts.cache)} for "
        f"{tokens} tokens{beside}; {parallel} requests at a time, each with up to {model.context} tokens"
    )


def _title(name: str) -> str:
    return title(name).removesuffix(".gguf")
