"""Upper bounds of counts and factors in a file. Known models stay far below them."""

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # values in a row of activations
MIN_HEAD_DIM = 2  # default for models without attention, whose files do not set it
# Kernels are compiled for these numbers. Known models have at most 256 heads in 5 layouts, heads of 1088 values, and
# 512 experts, 32 of them used.
MAX_HEADS, MAX_HEAD_DIM, MAX_LAYOUTS = 1024, 2048, 16
MAX_EXPERTS, MAX_USED = 4096, 256
MAX_EXPERT_GROUPS = 128  # known models have 8
REASON = " (kernels are compiled for this number, and no known model comes near)"
MAX_CONTEXT = 1 << 30
MAX_BUCKETS = 128  # buckets of the relative position bias; known models have 32
MAX_FACTOR = 1e6  # bound of factors that stretch positions or scale values
