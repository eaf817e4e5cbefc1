"""The OpenCL backend: GPUs and other OpenCL devices, through PyOpenCL."""
