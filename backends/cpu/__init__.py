"""The CPU backend: SIMD kernels compiled by LLVM for this processor, replayed by persistent threads."""
