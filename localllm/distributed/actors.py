"""Starts Ray's actors on a machine, or in a bundle of a placement group."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from localllm.distributed.node import Helper, StageProcess


def helper(ray: Any, node: str) -> Any:
    """Return a new helper on a node."""
    return ray.remote(Helper).options(num_cpus=0, scheduling_strategy=_on(node)).remote()


def stage_on(ray: Any, node: str) -> Any:
    """Return a new process for a stage on a node."""
    return _stage(ray, _on(node), 0.0)


def stage_in(ray: Any, group: Any, bundle: int, cpus: float = 0.0) -> Any:
    """Return a new process for a stage in a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return _stage(ray, PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle), cpus)


def end(ray: Any, actors: Iterable[Any]) -> None:
    for actor in actors:
        if actor is not None:
            with suppress(Exception):  # it has ended, or the cluster is gone
                ray.kill(actor, no_restart=True)


def _on(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _stage(ray: Any, where: Any, cpus: float) -> Any:
    made = ray.remote(StageProcess).options(num_cpus=cpus, max_restarts=0, max_concurrency=4, scheduling_strategy=where)
    return made.remote()
