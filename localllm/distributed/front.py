"""The front of a served model: prompts, templates and texts here, weights in the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from secrets import token_hex
from typing import Any

from localllm import __version__
from localllm.base.errors import LocalLLMError
from localllm.distributed.deployment import Deployment
from localllm.distributed.fleet import Fleet
from localllm.distributed.remote import RemoteScheduler
from localllm.distributed.replica import ReplicaSettings
from localllm.generation.interfaces import Observer, SchedulerLimits
from localllm.gguf import open_gguf
from localllm.gguf.identity import identity
from localllm.loading.loaded_model import refuse_serving
from localllm.model import Model
from localllm.options import LoadOptions
from localllm.server.served import Served

SHARE = 0.6  # of a machine's memory that the weights of a stage may take; the cache takes some too


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
) -> Served:
    """Start the replicas of a model and return it for the server. `stages` is the number of stages of each; 0: as few
    as the machines' memory allows. `told` prints a note, and `prepare` is called with
    the model before its first request.
    """
    file = open_gguf(path)
    try:
        if not file.tensors:
            raise LocalLLMError(f"{path}: has no weights to serve")
        refuse_serving(file)
        model = Model(file, options.force)
        settings = ReplicaSettings(
            str(path.resolve()), identity(file), __version__, options, limits, stages or _needed(path)
        )
        front = f"localllm-{token_hex(4)}"
        fleet = Fleet(front, limits.parallel)
        deployment, opened = Deployment.start(front, fleet, settings, replicas, told)
    except BaseException:
        file.close()
        raise
    try:
        assert opened.facts is not None
        model.attach(opened.facts)
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


def _needed(path: Path) -> int:
    """Return the number of stages whose part of the file fits into the memory of every machine."""
    import ray

    free = [node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"]]
    least = SHARE * min((each for each in free if each), default=float("inf"))
    return min(max(1, ceil(path.stat().st_size / least)), max(len(free), 1))
