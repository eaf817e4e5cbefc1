"""The machines that --ray names, for the commands that load a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from localllm.cli.terminal.console import say
from localllm.options import RayOptions
from localllm.options.ray import AUTO

if TYPE_CHECKING:
    from localllm.loading.splitting import Splitter


@contextmanager
def connected(given: RayOptions) -> Iterator[None]:
    """Stay connected to the cluster within the block, in which several models are loaded."""
    if not given.ray:
        yield
        return
    from localllm.distributed.attach import attached

    with attached(given.ray, say):
        yield


@contextmanager
def splitting(given: RayOptions) -> Iterator[Splitter | None]:
    """Connect to the cluster, and yield what splits one model over it; None without --ray. The model must be closed
    within the block.
    """
    if not given.ray:
        yield None
        return
    from localllm.distributed.attach import attached, has_cluster
    from localllm.distributed.stages import RayStages

    if given.ray == AUTO and given.number < 2 and not has_cluster():
        say("this computer is in no cluster (`localllm worker` starts one), so all layers are here")
        yield None
        return
    with attached(given.ray, say) as ray, closing(RayStages(ray, given.number, say)) as stages:
        yield stages
