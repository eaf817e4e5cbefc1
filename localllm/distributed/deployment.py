"""Starts the replicas of a model as a Serve application, and connects a front to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from random import uniform
from threading import Event, Lock, Thread
from time import sleep
from typing import Any

from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.cluster.errors import ClusterError
from localllm.distributed.apart import Claim
from localllm.distributed.fleet import Fleet
from localllm.distributed.killing import kill
from localllm.distributed.membership import reachable
from localllm.distributed.messages import Ask, Listen, Origin
from localllm.distributed.placing import ReplicaLayout, processors
from localllm.distributed.prompt_replica import OPEN_SECONDS, TELL_SECONDS, PromptReplicas
from localllm.distributed.replica import Opened, Replica, ReplicaSettings

ROUTER = "localllm.distributed.router:PrefixRouter"
HEALTH_SECONDS = 1.0  # between two health checks of a replica by Serve
GROW_SECONDS, SHRINK_SECONDS = 3.0, 120.0  # of too many, or too few requests, before replicas start or end
ENDING_SECONDS = 5.0  # for the requests of a replica that is no longer needed
MOST_ENDING_SECONDS = 20.0  # for all replicas, before their cluster counts as gone
CPUS = 0.1  # of Ray's processors per stage, so that other servers of the cluster find room
DEPLOYING_SECONDS = 3.0  # for Serve to take another layout, before the front ends without waiting for it
TRIES = 5  # to start Serve, while another front starts or ends it
_TAKEN = "is already taken"  # the name of Serve's controller
_ROOM = "to be scheduled"  # in Serve's message about replicas that wait


class _Raced(Exception):
    """Another front started or ended Serve at the same time."""


class Deployment(Closing):
    """The replicas of one front, from `start` to `close`."""

    def __init__(
        self, front: str, handle: Any, deploy: Callable[[ReplicaLayout], Any], layout: ReplicaLayout, claim: Claim
    ) -> None:
        """`deploy` starts the replicas in another layout, and does not wait for them."""
        self.front, self._handle, self._deploy, self._layout, self._claim = front, handle, deploy, layout, claim
        self._closed, self._deploying = False, Lock()
        self.for_prompts: PromptReplicas | None = None  # end with it

    @classmethod
    def start(
        cls,
        front: str,
        fleet: Fleet,
        settings: ReplicaSettings,
        replicas: tuple[int, int],
        layout: ReplicaLayout,
        told: Callable[[str], None] = lambda text: None,
    ) -> tuple[Deployment, Opened]:
        """Start the replicas of a front, and return once they are open. Raises ClusterError and LocalLLMError. `told`
        gets a note if Ray has no room for them yet.

        Serve belongs to the whole cluster. Other fronts may start it at the same time, and the last one ends it: then
        try again.
        """
        import ray

        try:
            claim, line = Claim.take(ray, layout)
        except Exception as error:  # Ray's own
            raise _refused(error) from None
        if line:
            told(line)
        try:
            for attempt in range(1, TRIES + 1):
                try:
                    with _waiting_told(front, told):
                        return cls._started(front, fleet, settings, replicas, layout, claim, attempt == TRIES)
                except _Raced:
                    sleep(attempt * uniform(0.5, 1.0))
        except BaseException:
            _unless_gone(claim.close)
            raise
        raise AssertionError("the last try raises another error")

    @classmethod
    def _started(
        cls,
        front: str,
        fleet: Fleet,
        settings: ReplicaSettings,
        replicas: tuple[int, int],
        layout: ReplicaLayout,
        claim: Claim,
        last: bool,
    ) -> tuple[Deployment, Opened]:
        import ray
        from ray import serve
        from ray.serve.config import ProxyLocation

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            serve.start(proxy_location=ProxyLocation.Disabled)
            deploy = partial(_deploy, front, settings, replicas, claim)
            made = cls(front, handle := deploy(layout), partial(deploy, wait=False), layout, claim)
            opened: Opened = handle.opened.remote().result(timeout_s=OPEN_SECONDS)
            for name in fleet.names if opened.facts is not None else ():
                asked: Opened = handle.opened.remote(Listen(front, name)).result(timeout_s=OPEN_SECONDS)
                opened = asked if asked.facts is None else opened
            if opened.facts is None:
                raise LocalLLMError(opened.problem)
            return made, opened
        except LocalLLMError:
            _end(front, serve, claim)
            raise
        except Exception as error:  # Ray's own
            if not last and (isinstance(error, ray.exceptions.RayActorError) or _TAKEN in str(error)):
                raise _Raced from None
            _end(front, serve, claim)
            raise _refused(error) from None

    # -- the way to the replicas (`remote.Wire`) -------------------------------------------------------------------

    def ask(self, ask: Ask) -> Any:
        return self._handle.answer.remote(ask)

    def listen(self, listen: Listen) -> Any:
        return self._handle.listen.options(stream=True).remote(listen)

    async def kill(self, origin: Origin) -> None:
        """Kill the process of a replica. `ray.kill` only asks it to end, which a stopped process never does."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if origin.node == ray.get_runtime_context().get_node_id():
            kill(origin.process)
            return
        there = NodeAffinitySchedulingStrategy(origin.node, soft=False)
        with suppress(Exception):  # its machine is gone
            await ray.remote(kill).options(num_cpus=0, scheduling_strategy=there).remote(origin.process)

    def forget(self, listen: Listen) -> Any:
        return self._handle.forget.remote(listen)

    def pulse(self, listen: Listen) -> Any:
        return self._handle.pulse.remote(listen)

    def revive(self) -> str:
        """If no machine that may have replicas is left, start them on the slower ones. Return a line that says so."""
        import ray

        with self._deploying:
            if self._closed:
                return ""
            alive = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
            if (layout := self._layout.last_resort(alive)) is None:
                return ""
            self._claim.keep_on(ray, [node for node in alive if node not in layout.excluded])
            self._deploy(layout)
            self._layout = layout
        return "the machines of the replicas are gone; a machine that was left out as slower takes them"

    def close(self) -> None:
        """End the replicas."""
        from ray import serve

        self._closed = True
        if self.for_prompts is not None:
            self.for_prompts.close()
        if self._deploying.acquire(timeout=DEPLOYING_SECONDS):  # else replicas would start after their end
            self._deploying.release()
        _end(self.front, serve, self._claim)


def _deploy(
    front: str,
    settings: ReplicaSettings,
    replicas: tuple[int, int],
    claim: Claim,
    layout: ReplicaLayout,
    wait: bool = True,
) -> Any:
    """Start the replicas, and return Serve's handle, once they run if this waits."""
    import ray
    from ray import serve

    settings = replace(settings, memory=layout.memory)
    deployed = serve.deployment(Replica).options(**_options(ray, front, settings, replicas, claim, layout))
    target = serve.RunTarget(deployed.bind(settings, front), name=front, route_prefix=None)
    [handle] = serve.run_many([target], wait_for_ingress_deployment_creation=wait, wait_for_applications_running=wait)
    return handle


@contextmanager
def _waiting_told(front: str, told: Callable[[str], None]) -> Iterator[None]:
    """Within the block, tell once if replicas wait because no machine has room for them. Serve itself only waits."""
    over = Event()

    def watch() -> None:
        from ray import serve

        while not over.wait(TELL_SECONDS):
            with suppress(Exception):  # Serve starts or ends
                for deployment in serve.status().applications[front].deployments.values():
                    if _ROOM in deployment.message and not over.is_set():
                        told("the replicas wait: no machine of the cluster has free processors (`ray status`)")
                        return

    thread = Thread(target=watch, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _options(
    ray: Any, front: str, settings: ReplicaSettings, replicas: tuple[int, int], claim: Claim, layout: ReplicaLayout
) -> Mapping[str, Any]:
    """Return the options of the deployment."""
    least, most = replicas
    limits = settings.limits
    have = [each["Resources"].get("CPU", 0.0) for each in ray.nodes() if each["NodeID"] in layout.allowed]
    cpus = min(CPUS, processors(have, most * layout.stages))
    nodes, firsts = layout.selector, layout.first_selector
    where: dict[str, Any] = {"max_replicas_per_node": layout.per_node}
    if layout.stages > 1:
        bundles = [{"CPU": cpus, **claim.share(layout.per_node)}, *[{"CPU": cpus}] * (layout.stages - 1)]
        where = {"placement_group_bundles": bundles, "placement_group_strategy": "SPREAD"}
        selectors = [firsts, *[nodes] * (layout.stages - 1)]
        where |= {"placement_group_bundle_label_selector": selectors} if firsts else {}
    scaled: dict[str, Any] = {"num_replicas": most}
    if least < most:  # the front's stream of events is one more ongoing request of each replica
        scaled = {"autoscaling_config": {
            "min_replicas": least, "max_replicas": most, "initial_replicas": least,
            "target_ongoing_requests": limits.parallel + 1,
            "metrics_interval_s": 1.0, "look_back_period_s": 3.0, "upscale_delay_s": GROW_SECONDS,
            "downscale_delay_s": SHRINK_SECONDS,
        }}  # fmt: skip
    return {
        "name": "replica",
        "ray_actor_options": {"num_cpus": cpus, **({"label_selector": nodes} if nodes and layout.stages == 1 else {})},
        "max_ongoing_requests": limits.parallel + limits.waiting + 16,
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": 2 * HEALTH_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": ENDING_SECONDS,
        "request_router_config": {
            "request_router_class": ROUTER, "request_router_kwargs": {"front": front}, "max_backoff_s": 0.1,
        },
        "logging_config": {"log_level": "ERROR", "enable_access_log": False},
        **scaled,
        **where,
    }  # fmt: skip


def _refused(error: Exception) -> ClusterError:
    """Return the error for a problem of Ray's."""
    lines = str(error).strip().splitlines()
    return ClusterError(f"the replicas did not start: {lines[-1] if lines else type(error).__name__}")


def _end(front: str, serve: Any, claim: Claim) -> None:
    """Delete the application, end Serve if it has no other, and give the claim back."""

    def end() -> None:
        with suppress(Exception):  # the cluster may be gone
            serve.delete(front)
            if not serve.status().applications:
                serve.shutdown()
        claim.close()

    _unless_gone(end)


def _unless_gone(end: Callable[[], None]) -> None:
    """Make a call that ends something in the cluster. Give up if the cluster is gone: Ray would wait."""
    import ray

    if not ray.is_initialized() or not reachable(ray.get_runtime_context().gcs_address):
        return
    thread = Thread(target=end, name="ending", daemon=True)
    thread.start()
    thread.join(MOST_ENDING_SECONDS)
