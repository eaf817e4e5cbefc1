"""NVIDIA cards through PyCUDA, with kernels compiled by NVRTC: a driver is needed, a toolkit is not."""
