// Elementwise operations. Constants: WIDTH, STRIDE (of rows of this width), and the expression OPERATION(a, b).

#ifdef PAIRED  // y = OPERATION(a, b); b may be a; with SLICE one value of a is used for SLICE values of b
KERNEL(128, elements)(SHAPE_PARAMETER GLOBAL const float *a, GLOBAL const float *b, GLOBAL float *y,
                      GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int i = GROUP_X * 128 + ITEM;
  size_t row = (size_t)GROUP_Y * STRIDE, at = row + smaller(i, WIDTH - 1);
#ifdef SLICE
  float u = a[at / SLICE], v = b[at];
#else
  float u = a[at], v = b[at];
#endif
  deliver(OPERATION(u, v), i, WIDTH, y + row, blocks + (size_t)GROUP_Y * BLOCKS_STRIDE, local_memory);
}
#endif

#ifdef SELECT
KERNEL(128, select_rows)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const int *step, GLOBAL float *y,
                         GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int i = GROUP_X * 128 + ITEM;
  size_t from = (size_t)LOGIT_INDEX_OF(step)[GROUP_Y] * STRIDE;
  float v = x[from + smaller(i, WIDTH - 1)];
  deliver(v, i, WIDTH, y + (size_t)GROUP_Y * STRIDE, blocks + (size_t)GROUP_Y * BLOCKS_STRIDE, local_memory);
}
#endif
