// Products of the same rows of activations with several matrices of one format in one launch. Constants, in addition to
// those in linear.cl: N1, N2 and FACTOR1, FACTOR2 of the second and third matrix (N2 is 0 for two matrices).

#ifdef TOGETHER  // rows of all matrices in order, each matrix from a multiple of 4; a work-group handles four rows
#define GROUPS(rows) (((rows) + 3) / 4)
#define PICK(which, a, b, c) ((which) == 0 ? (a) : (which) == 1 ? (b) : (c))
KERNEL(128, matvec_together)(SHAPE_PARAMETER GLOBAL const uchar *w0, GLOBAL const uchar *w1, GLOBAL const uchar *w2,
                             GLOBAL const float *RESTRICT x, GLOBAL float *y0, GLOBAL float *y1, GLOBAL float *y2,
                             GLOBAL const int *step, GLOBAL const float *bias0, GLOBAL const float *bias1,
                             GLOBAL const float *bias2 LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int group = GROUP_X, which = 0, column = GROUP_Y * COLUMNS, columns = COLUMNS_FROM(column);
  for (int groups = GROUPS(N); which < 2 && group >= groups; groups = GROUPS(N1)) {
    group -= groups;
    which++;
  }
  int n = PICK(which, N, N1, N2), row = 4 * group + (ITEM >> 5);
  GLOBAL const uchar *w = PICK(which, w0, w1, w2);
  float sum[COLUMNS];
  row_products(SHAPE &w, n, smaller(row, n - 1), x + (size_t)column * X_STRIDE, columns, sum, local_memory);
  GLOBAL float *y = PICK(which, y0, y1, y2);
  for (int j = 0; j < COLUMNS; j++)
    if ((ITEM & 31) == 0 && row < n && j < columns) {
      float factor = PICK(which, FACTOR, FACTOR1, FACTOR2);
      y[(size_t)(column + j) * n + row] = biased(sum[j], factor, PICK(which, bias0, bias1, bias2), row);
    }
}
#endif

#ifdef GATED
// OPERATION(gate, up) of two matrices of N rows. A work-group of SIZE handles 32 rows of both, so that it can write its
// 32 results as an activation block. Each segment of 32 work-items handles the same row of both at a time.
KERNEL(SIZE, matvec_gated)(SHAPE_PARAMETER GLOBAL const uchar *gate, GLOBAL const uchar *up,
                           GLOBAL const float *RESTRICT x, GLOBAL float *y, GLOBAL float *blocks, GLOBAL const int *step,
                           GLOBAL const float *gate_bias, GLOBAL const float *up_bias LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL float *made = local_memory + SIZE;  // (COLUMNS, 32)
  int lane = ITEM & 31, segment = ITEM >> 5, column = GROUP_Y * COLUMNS;
  int columns = COLUMNS_FROM(column);
  GLOBAL const uchar *w[2] = {gate, up};
  x += (size_t)column * X_STRIDE;
  for (int base = 0; base < 32; base += SIZE / 32) {
    int r = base + segment, own = smaller(GROUP_X * 32 + r, N - 1);
    float sum[2 * COLUMNS];
    row_products(SHAPE w, N, own, x, columns, sum, local_memory);
    for (int j = 0; j < COLUMNS; j++)
      if (lane == 0) {
        float g = biased(sum[j], FACTOR, gate_bias, own), u = biased(sum[COLUMNS + j], FACTOR1, up_bias, own);
        made[32 * j + r] = OPERATION(g, u);
      }
  }
  BARRIER();
  for (int base = 0; base < COLUMNS; base += SIZE / 32) {
    int j = base + segment, inside = j < columns, row = column + (inside ? j : 0);
    float v = inside ? made[32 * j + lane] : 0.0f;
    int i = inside ? GROUP_X * 32 + lane : N;  // index N is past the end of the row
    deliver(v, i, N, y + (size_t)row * N, blocks + (size_t)row * BLOCKS_STRIDE, local_memory);
  }
}
#endif
