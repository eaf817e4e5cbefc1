"""Decides whether a model may use a device, from stored results or by running the check now.

A result is valid as long as the device, its driver, the kernels and this program stay the same. Results are stored in
the folder of compiled kernels, which other users cannot write. A damaged file counts as missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from localllm.backends.base import BackendError, CacheTypes, Limits, Progress, WrongResults
from localllm.backends.gpu import bind
from localllm.backends.gpu.conformance.running import Verdict, answers, run_segments, told
from localllm.backends.gpu.conformance.segments import Segment, segments
from localllm.backends.gpu.device import Device
from localllm.backends.gpu.program import Program
from localllm.base.notices import Setting
from localllm.plan import Plan, Value
from localllm.quant.codecache import CodeCache

LOST = "; the device no longer responds"


@dataclass(frozen=True, slots=True)
class Conformance:
    """Runs the conformance check of devices. `folder` stores results; None disables storing."""

    folder: Path | None

    def require(
        self, device: Device, plan: Plan, limits: Limits, cache: CacheTypes, keep: Collection[Value], program: Program,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """Return normally if the device computes the plan's operations correctly, otherwise raise WrongResults."""
        kept, name = CodeCache(self.folder), key_of(device, program)
        verdicts = _read(kept.read(name))
        if verdicts is None:
            verdicts = examine(device, segments(plan, keep), limits, cache, progress)
            if not any(verdict.skipped or verdict.broken for verdict in verdicts):  # neither may recur
                kept.write(name, _written(device, verdicts))
        failed = [verdict for verdict in verdicts if verdict.failed or verdict.skipped]
        if failed:
            raise refusal(device, failed, len(verdicts))


def refusal(device: Device, failed: list[Verdict], count: int) -> WrongResults:
    """Return the one-line error for a device that failed its check."""
    first = failed[0]
    problem = (first.problem or first.skipped).splitlines()[0][:200]
    others = f", and {len(failed) - 1} other of {count} checks" if len(failed) > 1 else ""
    return WrongResults(
        f"{device.facts.name} failed its check, so it is not used ({first.operation}: {problem}{others})",
        "use ", Setting("backend", "cpu"), ", or use it anyway with ", Setting("force"), "; localllm doctor ",
        Setting("gpu"), " writes a report",
    )  # fmt: skip


def examine(
    device: Device, checked: Iterable[Segment], limits: Limits, cache: CacheTypes, progress: Progress | None = None
) -> list[Verdict]:
    """Check segments one after the other. Segments that the device cannot run are skipped with the reason.

    If the device stops working, its verdict is the last one.
    """
    verdicts, own = [], list(checked)
    for number, segment in enumerate(own):
        if progress is not None:
            progress("checking the device", number, len(own))
        verdicts.append(_verdict(device, segment, limits, cache))
        if verdicts[-1].lost:
            break
    if progress is not None:
        progress("checking the device", len(own), len(own))
    return verdicts


def _verdict(device: Device, segment: Segment, limits: Limits, cache: CacheTypes) -> Verdict:
    kernels: tuple[str, ...] = ()
    try:
        facts = device.facts
        program = bind.program(segment.plan, limits, cache, (), facts.compute, facts.local_memory)
        kernels = tuple(dict.fromkeys(kernel.name for kernel in program.kernels()))
        found = run_segments(device, segment, limits, cache)
    except BackendError as error:
        if answers(device):
            return Verdict(segment.title, kernels, skipped=str(error))
        found = Verdict(segment.title, problem=told(error), broken=True)
    lost = found.broken and not answers(device)
    return replace(found, kernels=kernels, problem=found.problem + LOST * lost, lost=lost)


def key_of(device: Device, program: Program) -> str:
    """Return the name of the stored result for a program's kernels."""
    facts = device.facts
    parts = [facts.name, facts.api, facts.compute, str(facts.local_memory), _version(), _own_source()]
    kernels = [f"{k.source(device.generic)}\0{k.numbers().tolist()}" for k in program.kernels()]
    return hashlib.sha256("\0".join([*parts, *sorted(kernels)]).encode()).hexdigest()[:40]


@cache
def _version() -> str:
    try:
        return version("localllm")
    except PackageNotFoundError:  # running from a checkout that is not installed
        return ""


@cache
def _own_source() -> str:
    """Return a hash of the source of the conformance check."""
    own = [path for path in files("localllm.backends.gpu.conformance").iterdir() if path.name.endswith(".py")]
    texts = [path.read_bytes() for path in sorted(own, key=lambda path: path.name)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _written(device: Device, verdicts: list[Verdict]) -> bytes:
    return json.dumps({"device": device.facts.name, "verdicts": [asdict(each) for each in verdicts]}).encode()


def _read(data: bytes | None) -> list[Verdict] | None:
    """Return the stored verdicts, or None if the file is missing or invalid."""
    try:
        found: Any = json.loads(data or b"null")
        own = [_checked(each) for each in found["verdicts"]]
    except (ValueError, TypeError, KeyError):
        return None
    return own or None


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "operation": str, "kernels": lambda names: tuple([str(name) for name in names]), "error": float, "limit": float,
    "problem": str, "skipped": str,
}  # fmt: skip


def _checked(each: dict[str, Any]) -> Verdict:
    return Verdict(**{name: kind(each[name]) for name, kind in _FIELDS.items()})
