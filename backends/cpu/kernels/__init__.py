"""CPU kernels. Each module returns `jit.Kernel`s, and declares the arguments of each kernel as a `Struct`."""
