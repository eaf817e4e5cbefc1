"""What CUDA and OpenCL share: kernel sources, how a plan becomes launches, and the executable that replays them."""
