"""What CUDA and OpenCL share: the kernels, the lowering of plans to launches, and the executable that runs them."""
