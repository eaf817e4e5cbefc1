"""The CPU backend: SIMD kernels compiled by LLVM for this processor, and persistent threads that run them."""
