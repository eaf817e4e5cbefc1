"""NVIDIA GPUs through PyCUDA, with kernels compiled by NVRTC. The backend needs a driver, but no CUDA toolkit."""
