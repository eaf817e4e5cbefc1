"""NVIDIA GPUs through PyCUDA, with kernels compiled by NVRTC. It needs a driver, but no CUDA toolkit."""
