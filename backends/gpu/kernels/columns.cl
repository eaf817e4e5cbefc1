// Columns of rows. A work-item has a number of the result. Constants: WIDTH (of the result).

#ifdef COLUMNS  // of every GROUP numbers of x, TAKEN from START on. Constants: X_STRIDE
KERNEL(128, columns)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL float *y, GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int i = GROUP_X * 128 + ITEM, own = smaller(i, WIDTH - 1);
  float v = x[(size_t)GROUP_Y * X_STRIDE + own / TAKEN * GROUP + START + own % TAKEN];
  deliver(v, i, WIDTH, y + (size_t)GROUP_Y * WIDTH, blocks + (size_t)GROUP_Y * BLOCKS_STRIDE, local_memory);
}
#endif
