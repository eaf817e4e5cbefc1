"""The OpenCL backend: GPUs and other OpenCL devices, accessed through PyOpenCL."""
