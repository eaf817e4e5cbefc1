"""Upper bounds of metadata counts and factors. The values of known models are far below these bounds."""

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # maximum width of activations
MIN_HEAD_DIM = 2  # default for models without attention, whose GGUFs do not set it
# Kernels are compiled for these values. Known models have at most 256 heads in 5 layouts, head width 1088, and 512
# experts with 32 used per token.
MAX_HEADS, MAX_HEAD_DIM, MAX_LAYOUTS = 1024, 2048, 16
MAX_EXPERTS, MAX_USED = 4096, 256
MAX_EXPERT_GROUPS = 128  # known models have 8
REASON = " (kernels are compiled for this number, and no known model comes near)"
MAX_CONTEXT = 1 << 30
MAX_FACTOR = 1e6  # bound of factors that scale positions or values
