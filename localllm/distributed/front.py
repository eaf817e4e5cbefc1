"""The front of a served model: prompts, templates and texts here, weights in the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from localllm import __version__
from localllm.base.errors import LocalLLMError
from localllm.cluster.sizing import Sizes
from localllm.distributed.deployment import Deployment
from localllm.distributed.files import Home
from localllm.distributed.fleet import Fleet
from localllm.distributed.machines import Machines, request_of
from localllm.distributed.placing import ReplicaLayout, check_ports, replica_layout
from localllm.distributed.prompt_replica import PromptReplicas
from localllm.distributed.remote import RemoteScheduler
from localllm.distributed.replica import ReplicaSettings
from localllm.generation.interfaces import Observer, SchedulerLimits
from localllm.gguf import GGUFFile, open_gguf
from localllm.loading.loaded_model import refuse_serving
from localllm.loading.loader import whole_of
from localllm.loading.mmproj import open_multimodal
from localllm.model import Model
from localllm.models import MediaInput
from localllm.options import LoadOptions
from localllm.server.served import Served


def open_front(
    path: Path,
    replicas: tuple[int, int],
    stages: int,
    options: LoadOptions,
    limits: SchedulerLimits,
    observer: Observer,
    sampling: Mapping[str, Any],
    told: Callable[[str], None],
    prepare: Callable[[Model], None],
    prompts: int = 0,
) -> Served:
    """Start the replicas of a model and return it for the server. `stages` is the number of stages of each; 0: the
    number that makes a token fastest. `told` prints a note, and `prepare` is called with
    the model before its first request. `prompts` more replicas evaluate prompts only.
    """
    file, model = open_gguf(path), None
    try:
        if not file.tensors:
            raise LocalLLMError(f"{path}: has no weights to serve")
        refuse_serving(file)
        model = Model(file, options.force)
        model.multimodal = open_multimodal(file, model.maybe_tokenizer, options)  # prepares; the replicas encode
        media = model.multimodal.reserving(options.threads) if model.multimodal is not None else None
        layout, home = _layout(file, options, stages, replicas, prompts, media)
        for line in layout.lines:
            told(line)
        encoders = Home.of(model.multimodal.file, home.node) if model.multimodal is not None else None
        settings = ReplicaSettings(
            home, __version__, options, limits, layout.stages, not stages, layout.memory, encoders=encoders
        )
        front = f"localllm-{token_hex(4)}"
        fleet = Fleet(front, limits.parallel)
        for_prompts = PromptReplicas.start(front, settings, prompts, layout, told) if prompts else None
        settings = replace(settings, prompts=for_prompts.names if for_prompts is not None else ())
        try:
            deployment, opened = Deployment.start(front, fleet, settings, replicas, layout, told)
        except BaseException:
            if for_prompts is not None:
                for_prompts.close()
            raise
        deployment.for_prompts = for_prompts
    except BaseException:
        model.close() if model is not None else file.close()
        raise
    try:
        assert opened.facts is not None
        model.attach(opened.facts)
        if model.multimodal is not None:
            model.multimodal.context = model.context
        for note in opened.notes:
            told(note)
        prepare(model)
        together = replace(limits, parallel=limits.parallel * replicas[1])
        scheduler = RemoteScheduler(deployment, front, fleet, together, observer, replicas[1])
        return Served(model, together, sampling=sampling, scheduler=scheduler)
    except BaseException:
        deployment.close()
        model.close()
        raise


def _layout(
    file: GGUFFile,
    options: LoadOptions,
    stages: int,
    replicas: tuple[int, int],
    prompts: int,
    media: MediaInput | None,
) -> tuple[ReplicaLayout, Home]:
    """Measure the machines, and place the replicas. Each needs the memory for one full context at least, and for the
    encoders.
    """
    import ray

    whole, _, _ = whole_of(file, options, media=media)
    with closing(Machines(ray)) as machines:
        measured = machines.measured(request_of(options))
        encoders = media.reserved if media is not None else 0
        sizes = Sizes.of(whole.plan, whole.limits, whole.cache, encoders)
        found = replica_layout(measured, sizes, machines.hop(measured), stages, replicas, prompts)
        check_ports([each for each in measured if each.node in found.allowed], replicas[1], prompts)
        home = Home.of(file, machines.own.node)
        excluded = (*machines.unusable, *found.excluded)
        return replace(found, excluded=excluded, lines=(*machines.problems, *found.lines)), home
