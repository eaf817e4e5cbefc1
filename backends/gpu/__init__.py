"""Code that CUDA and OpenCL share: kernels, the lowering of plans to launches, and the executable that runs them."""
