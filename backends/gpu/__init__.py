"""Code that the CUDA and OpenCL backends share: kernels, the lowering of plans to launches, and the executable."""
