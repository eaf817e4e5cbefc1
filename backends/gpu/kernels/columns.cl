// Operations on columns. A work-item computes one value of the result. Constants: WIDTH (of the result).

#ifdef COLUMNS  // takes TAKEN values from START on out of every GROUP values of x. Constants: X_STRIDE
KERNEL(128, columns)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL float *y, GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int i = GROUP_X * 128 + ITEM, own = smaller(i, WIDTH - 1);
  float v = x[(size_t)GROUP_Y * X_STRIDE + own / TAKEN * GROUP + START + own % TAKEN];
  deliver(v, i, WIDTH, y + (size_t)GROUP_Y * WIDTH, blocks + (size_t)GROUP_Y * BLOCKS_STRIDE, local_memory);
}
#endif

#ifdef JOIN  // OF_A values of a, then OF_B values of b, repeatedly. Constants: A_STRIDE, B_STRIDE
KERNEL(128, join_columns)(SHAPE_PARAMETER GLOBAL const float *a, GLOBAL const float *b, GLOBAL float *y,
                          GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int i = GROUP_X * 128 + ITEM, own = smaller(i, WIDTH - 1), group = own / (OF_A + OF_B), d = own % (OF_A + OF_B);
  float v = d < OF_A ? a[(size_t)GROUP_Y * A_STRIDE + group * OF_A + d]
                     : b[(size_t)GROUP_Y * B_STRIDE + group * OF_B + d - OF_A];
  deliver(v, i, WIDTH, y + (size_t)GROUP_Y * WIDTH, blocks + (size_t)GROUP_Y * BLOCKS_STRIDE, local_memory);
}
#endif
