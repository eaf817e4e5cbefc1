"""The replay loop. A plan is an array of kernel calls (`Entry`); the threads run it in compiled code.

Threads wait for each other at the barrier of an entry. A waiting thread spins for a short time, then sleeps in the
operating system. This frees a core for a thread that lost its core to another program. Between batches a worker spins
for a while, then returns to Python to sleep. A batch may use only the first few threads of the pool.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from localllm.backends.cpu.arguments import SLOT, Apart, Int64, Struct
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.simd import Function, Value


class Entry(Struct):
    """One kernel call of a plan."""

    kernel: Int64  # address of the compiled kernel
    arguments: Int64  # address of the kernel's argument struct
    barrier: Int64  # 1: all threads wait for each other after this call
    piece: Int64  # which of `pieces` this call computes; other entries compute the rest
    pieces: Int64  # 1: all. Only kernels that divide rows between the threads have pieces: each is their share
    ticks: Int64  # time-stamp cycles that thread 0 spent here, including the barrier, summed over steps
    waited: Int64  # part of `ticks` spent waiting for other threads

    @classmethod
    def whole(cls, kernel: int, arguments: int, barrier: bool = True) -> NDArray[np.int64]:
        """Return the slots of a call that computes everything."""
        own = cls(kernel=kernel, arguments=arguments, barrier=int(barrier), piece=0, pieces=1, ticks=0, waited=0)
        return own.pack()


class Own(Struct):
    """State of one thread."""

    seen: Apart  # the newest command that the thread has seen


class Sync(Struct):
    """Memory that the threads share.

    A word that one thread writes while others spin on it has a separate cache line.
    """

    command: Apart  # the newest batch: its number times COMMAND, plus its number of threads
    asked: Int64  # `command`, or the next one while a batch is about to start, which keeps its threads awake
    quit: Apart
    arrivals: Apart
    sleepers: Apart  # threads that sleep, or are about to sleep, until `arrivals` changes
    slept: Int64  # how often threads have slept at a barrier
    overdue: Int64  # time-stamp cycles that threads waited at barriers beyond `spins`, summed over threads and batches
    plan: Apart  # address of the entries
    count: Int64  # number of entries
    base: Int64  # `arrivals` at the start of the batch
    took: Int64  # time-stamp cycles of the last batch
    spins: Int64  # iterations that a thread spins at a barrier before it sleeps
    sched_yield: Int64  # address of the system function sched_yield
    syscall: Int64  # address of the system function syscall; 0 without futexes, where threads only yield
    futex: Int64  # number of the futex system call
    threads: Apart  # `Own` of the first thread; one cache line per thread


def own_slot(thread: int) -> int:
    """Return the first slot of a thread's `Own`."""
    return Sync.threads + Apart.aligned * thread


COMMAND = 1 << 16  # more than the largest number of threads
SPINS = 1024  # 20 to 600 microseconds: longer than the waits of a balanced operation, far below a time slice
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # private futexes, within one process
EVERYBODY = 1 << 30


def _wait(f: Function, sync: Sync, where: Value, target: Value) -> None:
    """Wait until `arrivals` reaches `target`. `where` is the address of `sync`."""
    arrivals, sleepers = sync.where(Sync.arrivals), sync.where(Sync.sleepers)
    spins, most, since = f.var(f.i64(0)), sync.spins, f.var(f.i64(0))
    with f.while_(lambda: f.atomic_load(arrivals) < target):
        f.pause()
        spins.set(spins.get() + 1)
        with f.when(spins.get() >= most):
            spins.set(f.i64(0))
            with f.when(since.get().equals(0)):
                since.set(f.clock())
            with f.when(sync.syscall.equals(0)):
                f.call(sync.sched_yield)
            with f.when(sync.syscall.differs(0)):
                # Count this thread before it reads `arrivals`, so that a thread that changes `arrivals` later sees a
                # sleeper.
                f.atomic_add(sleepers, 1)
                seen = f.atomic_load(arrivals)
                with f.when(seen < target):
                    f.atomic_add(sync.where(Sync.slept), 1)
                    _futex(f, sync, where, FUTEX_WAIT, seen)
                f.atomic_add(sleepers, -1)
    with f.when(since.get().differs(0)):
        f.atomic_add(sync.where(Sync.overdue), f.clock() - since.get())


def _futex(f: Function, sync: Sync, where: Value, operation: int, value: Value) -> None:
    """Sleep while `arrivals` equals `value` in the lower half, or wake at most `value` sleeping threads."""
    none = f.i64(0)
    f.call(sync.syscall, sync.futex, where + Sync.arrivals * SLOT, f.i64(operation), value, none, none, none)


def _own(sync: Sync, thread: Value, slot: int) -> Value:
    """Return a pointer to a slot of a thread's `Own`."""
    return sync.pointer + (thread * Apart.aligned + (Sync.threads + slot)) * SLOT


def _replay(f: Function, sync: Sync, where: Value, thread: Value, threads: Value) -> None:
    """Run every kernel call of the plan on this thread, one of `threads`."""
    plan, count = f.pointer(sync.plan), sync.count
    arrivals, target = sync.where(Sync.arrivals), f.var(sync.base)
    before = f.var(f.clock())
    with f.loop(0, count) as i:
        entry = Entry.at(plan + i * (SLOT * Entry.size))
        f.call(entry.kernel, entry.arguments, entry.piece * threads + thread, entry.pieces * threads)
        done = f.clock()
        with f.when(entry.barrier.differs(0)):
            target.set(target.get() + threads)
            arrived = f.atomic_add(arrivals, 1) + 1
            with f.when(arrived < target.get()):
                _wait(f, sync, where, target.get())
            last = arrived.equals(target.get())
            with f.when(last), f.when(f.atomic_add(sync.where(Sync.sleepers), 0).differs(0)):
                _futex(f, sync, where, FUTEX_WAKE, f.i64(EVERYBODY))
        with f.when(thread.equals(0)):
            now = f.clock()
            f.store(entry.where(Entry.ticks), entry.ticks + (now - before.get()), 8)
            f.store(entry.where(Entry.waited), entry.waited + (now - done), 8)
            before.set(now)


def step() -> Kernel:
    """Build `step(sync)`, which starts the requested batch and runs thread 0's share."""

    def emit(isa: Isa) -> ir.Module:
        f = Function("step", 1, isa)
        sync = Sync.at(f.pointer(f.arguments[0]))
        began, asked = f.clock(), sync.asked
        f.store(sync.where(Sync.base), f.atomic_load(sync.where(Sync.arrivals)), 8)
        f.atomic_store(sync.where(Sync.command), asked)
        _replay(f, sync, f.arguments[0], f.i64(0), asked % COMMAND)
        f.store(sync.where(Sync.took), f.clock() - began, 8)
        return f.finish()

    return Kernel("step", emit)


def worker() -> Kernel:
    """Build `worker(sync, thread, spins)`, which runs the plan once per command that includes this thread.

    The function returns 1 if the thread must end, and 0 after `spins` idle iterations or a command without this thread.
    A thread may miss commands only if they do not include it: the others wait for it at the batch's last barrier.
    """

    def emit(isa: Isa) -> ir.Module:
        f = Function("worker", 3, isa)
        sync, (thread, limit) = Sync.at(f.pointer(f.arguments[0])), f.arguments[1:]
        seen = _own(sync, thread, Own.seen)
        idle = f.var(f.i64(0))
        quit_ = sync.where(Sync.quit)
        with f.while_(lambda: idle.get() < limit):
            command = f.atomic_load(sync.where(Sync.command))
            with f.when(command.differs(f.load_int(seen))):
                f.store(seen, command, 8)
                threads, included = command % COMMAND, thread < command % COMMAND
                with f.when(included):
                    _replay(f, sync, f.arguments[0], thread, threads)
                idle.set(f.select(included, f.i64(0), limit))
            with f.when(f.atomic_load(quit_).differs(0)):
                idle.set(limit)
            f.pause()
            asked = f.atomic_load(sync.where(Sync.asked))
            wanted = f.select(asked.equals(f.load_int(seen)), f.i64(0), asked % COMMAND)
            with f.when(wanted <= thread):
                idle.set(idle.get() + 1)
        return f.finish(f.atomic_load(quit_))

    return Kernel("worker", emit)
