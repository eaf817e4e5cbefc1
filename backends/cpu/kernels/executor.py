"""The replay loop: a plan is an array of (kernel, arguments, barrier, two clocks); threads run it inside compiled code.

Threads meet at a spin barrier where an entry says so. Between batches a worker spins for a while, then returns to
Python to sleep.
"""

from __future__ import annotations

from enum import IntEnum

from llvmlite import ir

from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.simd import I64, Function, Value


class Entry(IntEnum):
    """int64 slots of one plan entry."""

    KERNEL = 0
    ARGUMENTS = 1
    BARRIER = 2  # 1: all threads meet after this operation
    TICKS = 3  # cycles of the time-stamp counter that thread 0 spent here, barrier included, summed over steps
    WAITED = 4  # and how many of them it waited for the other threads
    SIZE = 5


class Sync(IntEnum):
    """int64 slots of the memory the threads share; a cache line for each word that is written while others spin."""

    COMMAND = 0  # number of batches begun so far
    ASKED = 1  # COMMAND, or one more while a batch is about to begin: then nobody goes to sleep
    QUIT = 8
    ARRIVALS = 16
    PLAN = 24
    COUNT = 25
    YIELD = 28  # address of sched_yield
    THREAD = 32  # + 8 * thread: barrier round, batches seen
    SEEN = 1  # after THREAD + 8 * thread


SPINS_BEFORE_YIELD = 256  # about 15 microseconds: longer than any balanced operation's wait, short beside a time slice


def _spin(f: Function, sync: Value, blocked: object) -> None:
    """Wait while blocked(); yield the processor now and then, for machines with fewer cores than threads."""
    assert callable(blocked)
    spins = f.var(f.i64(0))
    with f.while_(blocked):
        f.pause()
        spins.set(spins.get() + 1)
        with f.when((spins.get() % SPINS_BEFORE_YIELD).equals(0)):
            f.call(f.load_int(sync, Sync.YIELD))


def _replay(f: Function, sync: Value, thread: Value, threads: Value) -> None:
    """Run every operation of the plan on this thread."""
    plan, count = f.pointer(f.load_int(sync, Sync.PLAN)), f.load_int(sync, Sync.COUNT)
    own = sync + (thread * 8 + int(Sync.THREAD)) * 8
    arrivals = sync + 8 * Sync.ARRIVALS
    ticks = f.module.declare_intrinsic("llvm.readcyclecounter", (), ir.FunctionType(I64, []))

    def clock() -> Value:
        return Value(f, f.builder.call(ticks, []))

    before = f.var(clock())
    with f.loop(0, count) as i:
        entry = plan + i * (8 * Entry.SIZE)
        f.call(f.load_int(entry, Entry.KERNEL), f.load_int(entry, Entry.ARGUMENTS), thread, threads)
        done = clock()
        with f.when(f.load_int(entry, Entry.BARRIER).differs(0)):
            rounds = f.load_int(own) + 1
            f.store(own, rounds, 8)
            target = rounds * threads
            with f.when((f.atomic_add(arrivals, 1) + 1) < target):
                _spin(f, sync, lambda: f.atomic_load(arrivals) < target)
        with f.when(thread.equals(0)):
            now = clock()
            f.store(entry + 8 * Entry.TICKS, f.load_int(entry, Entry.TICKS) + (now - before.get()), 8)
            f.store(entry + 8 * Entry.WAITED, f.load_int(entry, Entry.WAITED) + (now - done), 8)
            before.set(now)


def step() -> Kernel:
    """`step(sync, threads)`: start the requested batch, and run thread 0's part of it."""

    def emit(isa: Isa) -> ir.Module:
        f = Function("step", 2, isa)
        sync, threads = f.pointer(f.arguments[0]), f.arguments[1]
        f.atomic_store(sync + 8 * Sync.COMMAND, f.load_int(sync, Sync.ASKED))
        _replay(f, sync, f.i64(0), threads)
        return f.finish()

    return Kernel("step", emit)


def worker() -> Kernel:
    """`worker(sync, thread, threads, spins)`: replay once per command; 1 if told to quit, 0 after `spins` turns."""

    def emit(isa: Isa) -> ir.Module:
        f = Function("worker", 4, isa)
        sync, (thread, threads, limit) = f.pointer(f.arguments[0]), f.arguments[1:]
        seen = sync + (thread * 8 + int(Sync.THREAD) + int(Sync.SEEN)) * 8
        idle = f.var(f.i64(0))
        quit_ = sync + 8 * Sync.QUIT
        with f.while_(lambda: idle.get() < limit):
            with f.when(f.atomic_load(sync + 8 * Sync.COMMAND) > f.load_int(seen)):
                f.store(seen, f.load_int(seen) + 1, 8)
                _replay(f, sync, thread, threads)
                idle.set(f.i64(0))
            with f.when(f.atomic_load(quit_).differs(0)):
                idle.set(limit)
            f.pause()
            with f.when(f.atomic_load(sync + 8 * Sync.ASKED) <= f.load_int(seen)):
                idle.set(idle.get() + 1)
        return f.finish(f.atomic_load(quit_))

    return Kernel("worker", emit)
