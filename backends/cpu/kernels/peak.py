"""A kernel that only multiplies int8. Its throughput is the upper limit of prefill speed."""

from __future__ import annotations

from localllm.backends.cpu import dot
from localllm.backends.cpu.arguments import Address, Int64, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, i32x16, kernel
from localllm.backends.cpu.panels import u8x64
from localllm.backends.cpu.simd import Function, Value

CHAINS = 16  # independent sums, so that no product waits for another
OPERATIONS = 128 * CHAINS  # per iteration and thread: 64 int8 multiplications and 64 additions for each sum
OPERANDS = 128  # bytes: the weights, then the activations
SINK = 64  # bytes per thread


class PeakArguments(Struct):
    data: Address
    turns: Int64
    sink: Target  # SINK bytes per thread, so that the products are not optimized away


def byte_products() -> PlanKernel[PeakArguments]:
    """Run OPERATIONS int8 multiplications and additions per iteration, on every thread."""

    def body(f: Function, a: PeakArguments, thread: Value, threads: Value) -> None:
        # initial values differ, so that the compiler cannot merge the sums
        sums = [f.var(f.zeros(i32x16) ^ chain) for chain in range(CHAINS)]
        w, x = f.load(a.data, u8x64), f.load(a.data + 64, u8x64)
        with f.loop(0, a.turns):
            for total in sums:
                total.set(dot.small(f, total.get(), w, x))
        everything = sums[0].get()
        for total in sums[1:]:
            everything = everything + total.get()
        f.store(a.sink + thread * SINK, everything)

    return kernel("byte_products", PeakArguments, body)
