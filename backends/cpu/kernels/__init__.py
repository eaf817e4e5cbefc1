"""CPU kernels. Each module builds `jit.Kernel`s, and declares the arguments of each kernel as a `Struct`."""
