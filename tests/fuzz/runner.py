"""Run cases in forked child processes, and report every case with a wrong outcome.

A child runs `together` cases in sequence and logs them. If it dies, the last case in the log runs again alone. If a
case dies only after other cases, the report names the first case that must precede it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from tests.fuzz.case import Case, Kind, outcome, random_of

MEMORY = 1 << 30  # bytes that a case may allocate beyond the process's memory at its start
_ADDRESSES = 6 << 30  # bytes of address space beyond the child's at its start; larger reservations fail
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Finding:
    """A failed case, and the facts needed to reproduce it."""

    number: int
    changes: tuple[str, ...]
    what: str


@dataclass(slots=True)
class Report:
    """The result of a run. `tally` counts outcomes by their words and messages, without numbers."""

    cases: int = 0
    seconds: float = 0.0
    processor: float = 0.0  # seconds of CPU time of all children
    tally: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    peak: int = 0  # bytes of the case that used the most memory
    longest: float = 0.0  # seconds of the slowest case


@dataclass(frozen=True, slots=True)
class _Run:
    """The log of a child: the finished cases, the case in which it died, if any, and the cause."""

    finished: list[dict[str, object]]
    begun: dict[str, object] | None
    death: str


class Runner:
    """Runs cases of one kind and seed in the folder `scratch`."""

    def __init__(self, name: str, kind: Kind, seed: int, scratch: Path, memory: int = MEMORY) -> None:
        self._name, self._kind, self._seed, self._memory = name, kind, seed, memory
        self._folder, self._log = scratch / "case", scratch / "log"
        self._folder.mkdir(exist_ok=True)

    def run(self, first: int, count: int, seconds: float, tell: Callable[[Finding], None]) -> Report:
        """Run cases from `first` on: `count` cases, or until `seconds` have passed."""
        report, began, number = Report(), monotonic(), first
        before = _processor()
        while number < first + count and monotonic() - began < seconds:
            stop = min(number + self._kind.together, first + count)
            number = self._group(range(number, stop), report, tell)
        report.seconds, report.processor = monotonic() - began, _processor() - before
        return report

    def keep(self, number: int, target: Path) -> None:
        """Write the files of a case to `target`."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        self._child(lambda: self._make(number, target))

    def _group(self, numbers: range, report: Report, tell: Callable[[Finding], None]) -> int:
        """Run the cases `numbers` in a child. Return the number of the case to continue with."""
        ran = self._attempt(numbers)
        for line in ran.finished:
            self._count(line, report, tell)
        if not ran.death:
            return numbers.stop
        number = int(str(ran.begun["number"])) if ran.begun else numbers.start + len(ran.finished)
        alone = self._attempt(range(number, number + 1))
        if not alone.death and ran.death == "hang":  # it passes alone, so the machine was only busy
            self._count(alone.finished[0], report, tell)
            return number + 1
        report.cases += 1
        if alone.death:
            found = Finding(number, _changes(alone.begun), alone.death)
        else:
            needed = self._first_needed(numbers.start, number)
            found = Finding(number, _changes(ran.begun), f"{ran.death}, only after the cases from {needed} on")
        report.findings.append(found)
        tell(found)
        return number + 1

    def _first_needed(self, start: int, number: int) -> int:
        """Return the latest case from which a child must start to die in `number`."""
        low, high = start, number
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._attempt(range(middle, number + 1)).death else (low, middle)
        return low

    def _count(self, line: dict[str, object], report: Report, tell: Callable[[Finding], None]) -> None:
        report.cases += 1
        report.peak = max(report.peak, int(str(line["bytes"])))
        report.longest = max(report.longest, float(str(line["seconds"])))
        right, what = line["right"], str(line["what"])
        if int(str(line["bytes"])) > self._memory:
            right, what = False, f"{int(str(line['bytes'])) >> 20} MiB of memory; it ended with: {what}"
        report.tally[pattern(what)] += 1
        if not right:
            found = Finding(int(str(line["number"])), _changes(line), what)
            report.findings.append(found)
            tell(found)

    def _attempt(self, numbers: Sequence[int]) -> _Run:
        self._log.write_bytes(b"")
        status = self._child(lambda: self._cases(numbers))
        lines = [json.loads(line) for line in self._log.read_bytes().splitlines()]
        finished = [line for line in lines if "what" in line]
        begun = lines[-1] if lines and "what" not in lines[-1] else None
        return _Run(finished, begun, _death(status))

    def _child(self, work: Callable[[], None]) -> int:
        """Run `work` in a child and return its wait status. Processes that the child started are killed."""
        child = os.fork()
        if not child:
            code = 70
            try:
                os.setpgid(0, 0)
                _quiet()
                for number in (signal.SIGALRM, signal.SIGSEGV):  # PoCL handles SIGSEGV, which would hide crashes
                    signal.signal(number, signal.SIG_DFL)
                limit = _status("VmSize") + _ADDRESSES
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                work()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        return status

    def _cases(self, numbers: Sequence[int]) -> None:
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        for number in numbers:
            for path in self._folder.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            signal.setitimer(signal.ITIMER_REAL, self._kind.seconds)
            _forget_peak()
            before, children, began = _status("VmRSS"), _children(), monotonic()
            _write(log, {"number": number, "changes": []})
            case = self._made(number)
            _write(log, {"number": number, "changes": case.changes})
            right, what = outcome(case)
            used = max(_status("VmHWM") - before, _children() if _children() > children else 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            line = {"number": number, "changes": case.changes, "right": right, "what": what[:600]}
            _write(log, line | {"bytes": used, "seconds": monotonic() - began})

    def _made(self, number: int) -> Case:
        """Return a case. If creating it fails, which is a bug of the fuzzer, the case raises the error."""
        try:
            return self._make(number, self._folder)
        except Exception as error:
            broken = error

            def fail() -> str:
                raise broken

            return Case(("in the making",), fail)

    def _make(self, number: int, folder: Path) -> Case:
        return self._kind.make(random_of(self._name, self._seed, number), folder)


def _write(log: int, line: dict[str, object]) -> None:
    os.write(log, json.dumps(line).encode() + b"\n")


def _changes(line: dict[str, object] | None) -> tuple[str, ...]:
    changes = line["changes"] if line else ()
    return tuple(changes) if isinstance(changes, list | tuple) else ()


def _death(status: int) -> str:
    """Return how a child died, or ""."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "hang" if number == signal.SIGALRM else f"signal {signal.Signals(number).name}"
    code = os.WEXITSTATUS(status)
    return f"exit code {code}" if code else ""


def _quiet() -> None:
    """Silence the standard streams, because LLVM and Python write to them on a crash and the log has the cause."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _status(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _processor() -> float:
    """Return the CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _children() -> int:
    """Return the peak memory, in bytes, of the children that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def _forget_peak() -> None:
    """Reset VmHWM to the resident memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def pattern(text: str) -> str:
    """Return a message without the parts that differ between cases."""
    return re.sub(r"'[^']*'|\d+", "#", re.sub(r"/\S+/", "", text))[:100]


def show(report: Report) -> Iterator[str]:
    """Print the tally, with the most frequent outcome first."""
    for what, count in report.tally.most_common(40):
        yield f"{count:7}  {what}"
