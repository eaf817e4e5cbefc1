"""CPU kernels: each module returns `jit.Kernel`s; the argument block of every kernel is listed beside it, all int64."""
