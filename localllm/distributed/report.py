"""Describes the placement of the layers, for the user."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.base.units import size
from localllm.cluster.sizing import Placement
from localllm.distributed.machines import Machine
from localllm.plan import Plan


def report(
    plan: Plan, found: Placement, used: Sequence[Machine], all_: Sequence[Machine], fixed: bool, problems: Sequence[str]
) -> list[str]:
    """Return parts of a line: the place of the layers, the machines of `all_` without layers, and `problems`.

    `fixed`: the user gave the number of stages.
    """
    said = [_where(plan, found, used)]
    for machine in all_:
        if machine not in used:
            why = "the stages asked for are on faster ones" if fixed else "it would not make a token faster"
            said.append(left_out(machine, why))
    if len(all_) == 1 and not fixed:
        said.append("no other machine is in the cluster")
    return [*said, *problems]


def left_out(machine: Machine, why: str) -> str:
    """Return the line for a machine without layers."""
    rate = f"reads {machine.facts.bandwidth / 1e9:.1f} GB/s, {size(machine.facts.free)} free"
    return f"{machine.name} is left out: {why} ({rate})"


def _where(plan: Plan, found: Placement, used: Sequence[Machine]) -> str:
    """Return where the layers are: "layers 0-11 here (cpu), 12-23 and the output on 192.168.1.7 (cpu)"."""
    layers = len(plan.starts) - 1
    if len(used) == 1:
        return f"all layers here ({used[0].facts.backend}), {1000 * found.seconds:.2g} ms a token"
    said = []
    stops = [*found.firsts[1:], layers + 1]
    for number, (first, stop, machine) in enumerate(zip(found.firsts, stops, used, strict=True)):
        last = min(stop, layers) - 1
        numbers = f"{first}-{last}" if last > first else f"{first}" if last == first else ""
        parts = [numbers] if numbers else []
        parts += ["the output"] if stop > layers else []
        where = "here" if not number else "in another process here" if machine == used[0] else f"on {machine.name}"
        said.append(f"{' and '.join(parts)} {where} ({machine.facts.backend})")
    return f"layers {', '.join(said)}; {1000 * found.seconds:.2g} ms a token expected"
