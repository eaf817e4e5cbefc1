// Products of matrices (N, K) with rows of activations. Constants: K, N, X_STRIDE and Y_STRIDE (elements of a row of
// input and of output), COUNT_AT (index of the row count in the step buffer), FACTOR, HAS_BIAS, HAS_RESIDUAL,
// RESIDUAL_STRIDE. A row of quantized activations is K int8, then K / 32 scales, then K / 16 sums times scale, X_STRIDE
// words in total.

// With EXPERTS, rows are pairs of a row and one of its experts; PER_ROW pairs read the same input row. The mat-vec uses
// the experts of the pairs; tiles use the output of group_pairs. With HEADS there is one matrix per head, and a row of
// activations has X_HEAD elements per head; the third index of a work-group is its head.
#ifdef EXPERTS
#define EXPERT_ARGUMENTS , GLOBAL const int *choices, GLOBAL const float *scales
#define BEGIN_TILE(size) \
  if (GROUP_Y >= choices[0]) return; \
  GLOBAL const int *tile = choices + 1 + PAIRS + 3 * GROUP_Y, *pairs = choices + 1 + tile[1]; \
  int count = tile[2], first = 0; \
  size_t rows = (size_t)EXPERTS * N, bias_at = (size_t)tile[0] * N; \
  float factor = HAS_SCALES ? scales[tile[0]] : 1.0f;
#define OUTPUT_ROW(at) pairs[at]
#define INPUT_ROW(at) (pairs[smaller(at, count - 1)] / PER_ROW)
#else
#define EXPERT_ARGUMENTS
#ifdef HEADS
#define BEGIN_MATRIX \
  size_t rows = (size_t)HEADS * N, bias_at = (size_t)GROUP_Z * N; \
  x += (size_t)GROUP_Z * X_HEAD; \
  y += bias_at; \
  float factor = FACTOR;
#else
#define BEGIN_MATRIX \
  size_t rows = N, bias_at = 0; \
  float factor = FACTOR;
#endif
#define BEGIN_TILE(size) \
  BEGIN_MATRIX \
  int count = step[COUNT_AT], first = GROUP_Y * size;
#define OUTPUT_ROW(at) (first + (at))
#define INPUT_ROW(at) smaller(first + (at), count - 1)
#endif
#ifdef HEADS
#define X_STEP X_HEAD  // elements from one input slice to the next, which give the alignment
#else
#define X_STEP X_STRIDE
#endif
#define LINEAR_ARGUMENTS \
  SHAPE_PARAMETER GLOBAL const uchar *RESTRICT w, GLOBAL const float *RESTRICT x, GLOBAL float *RESTRICT y, GLOBAL const int *step, \
  GLOBAL const float *bias, GLOBAL const float *residual EXPERT_ARGUMENTS

DEVICE float biased(float sum, float factor, GLOBAL const float *bias, size_t row) {
  float v = sum * factor;
#if HAS_BIAS
  v += bias[row];
#endif
  return v;
}

#ifdef Y_STRIDE
DEVICE void finish(SHAPE_PARAMETER float sum, int row, int column, GLOBAL float *y, GLOBAL const float *bias,
                   GLOBAL const float *residual, size_t bias_at, float factor) {
  float v = biased(sum, factor, bias, bias_at + row);
#if HAS_RESIDUAL
  v += residual[(size_t)column * RESIDUAL_STRIDE + row];
#endif
  y[(size_t)column * Y_STRIDE + row] = v;
}
#endif

#ifdef QUANTIZED
DEVICE float add_chunk(float sum, const int *q, const float *s, const float *m, const int *x, float d, float low,
                       float high) {
#if HALVES == 1
  int dot = 0;
  for (int i = 0; i < 8; i++) dot = DOT4(q[i], x[i], dot);
  sum = FMA(s[0], d * (float)dot, sum);
#if MINIMUM
  sum = FMA(-m[0], low + high, sum);
#endif
#else
  int first = 0, second = 0;
  for (int i = 0; i < 4; i++) first = DOT4(q[i], x[i], first);
  for (int i = 4; i < 8; i++) second = DOT4(q[i], x[i], second);
  sum = FMA(s[1], d * (float)second, FMA(s[0], d * (float)first, sum));
#if MINIMUM
  sum = FMA(-m[1], high, FMA(-m[0], low, sum));
#endif
#endif
  return sum;
}
#endif

#ifdef COLUMNS
// Number of activation rows from `column` on in this work-group. With COLUMNS of 1, exactly one work-group per row is
// launched.
#define COLUMNS_FROM(column) (COLUMNS == 1 ? 1 : smaller(step[COUNT_AT] - (column), COLUMNS))

// Multiplies up to COLUMNS rows of activations with row `own` of each of MATRICES matrices of `rows` rows. Every
// work-item of a segment of 32 handles every 32nd chunk and gets the result: sum (MATRICES, COLUMNS). The summation
// order depends on nothing else.
DEVICE void row_products(SHAPE_PARAMETER GLOBAL const uchar **w, size_t rows, size_t own, GLOBAL const float *x,
                         int columns, float *sum, LOCAL float *s) {
  int lane = ITEM & 31;
  for (int j = 0; j < MATRICES * COLUMNS; j++) sum[j] = 0.0f;
#ifdef QUANTIZED
  for (int c = lane; c < K / 32; c += 32) {
    int q[MATRICES][8], xq[8];
    float scale[MATRICES][2], minimum[MATRICES][2];
    for (int i = 0; i < MATRICES; i++) unpack_chunk(SHAPE w[i], rows, own, c, q[i], scale[i], minimum[i]);
    for (int j = 0; j < COLUMNS; j++) {
      if (j < columns) {
        GLOBAL const float *r = x + (size_t)j * X_STRIDE;
        eight_words((GLOBAL const uchar *)(r + 8 * c), X_STEP % 4 == 0, (uint *)xq);
        GLOBAL const float *sums = r + K / 4 + K / 32 + 2 * c;
        float d = r[K / 4 + c], low = sums[0], high = sums[1];
        for (int i = 0; i < MATRICES; i++)
          sum[i * COLUMNS + j] = add_chunk(sum[i * COLUMNS + j], q[i], scale[i], minimum[i], xq, d, low, high);
      }
    }
  }
#else
  for (int k = lane; k < K; k += 32) {
    float v[MATRICES];
    for (int i = 0; i < MATRICES; i++) v[i] = element(w[i], own * K + k);
    for (int j = 0; j < COLUMNS; j++)
      if (j < columns) {
        float a = x[(size_t)j * X_STRIDE + k];
        for (int i = 0; i < MATRICES; i++) sum[i * COLUMNS + j] = FMA(v[i], a, sum[i * COLUMNS + j]);
      }
  }
#endif
  for (int j = 0; j < MATRICES * COLUMNS; j++) sum[j] = sum32(sum[j], s);
}
#endif

#ifdef MATVEC  // each segment of 32 work-items handles one row of the matrix
KERNEL(128, matvec)(LINEAR_ARGUMENTS LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int row = GROUP_X * 4 + (ITEM >> 5), column = GROUP_Y * COLUMNS;
  size_t own = smaller(row, N - 1);
#ifdef EXPERTS
  int columns = 1, expert = choices[column];
  size_t rows = (size_t)EXPERTS * N, bias_at = (size_t)expert * N;
  float factor = HAS_SCALES ? scales[expert] : 1.0f;
  own += bias_at;
  x += (size_t)(column / PER_ROW) * X_STRIDE;
#else
  int columns = COLUMNS_FROM(column);
  BEGIN_MATRIX
  own += bias_at;
  x += (size_t)column * X_STRIDE;
#endif
  GLOBAL const uchar *matrix = w;
  float sum[COLUMNS];
  row_products(SHAPE &matrix, rows, own, x, columns, sum, local_memory);
  for (int j = 0; j < COLUMNS; j++)
    if ((ITEM & 31) == 0 && row < N && j < columns)
      finish(SHAPE sum[j], row, column + j, y, bias, residual, bias_at, factor);
}
#endif

#ifdef MATMUL
// A tile of 64 rows of the matrix and 32 rows of activations. A work-item computes 4 x 4 results.
#ifdef QUANTIZED
#define DEPTH 8  // words per chunk
#else
#define DEPTH 16  // values at a time
#endif
KERNEL(128, matmul)(LINEAR_ARGUMENTS LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL float *wl = local_memory, *xl = wl + 64 * (DEPTH + 1);
  int tx = ITEM & 7, ty = ITEM >> 3;
  BEGIN_TILE(32)
  float sum[4][4];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) sum[i][j] = 0.0f;
#ifdef QUANTIZED
  LOCAL float *ws = xl + 32 * (DEPTH + 1), *xs = ws + 64 * 4;  // scale and minimum of each half chunk; scale and sums
  for (int c = 0; c < K / 32; c++) {
    if (ITEM < 64) {
      int q[8];
      float s[2], m[2];
      unpack_chunk(SHAPE w, rows, bias_at + smaller(GROUP_X * 64 + ITEM, N - 1), c, q, s, m);
      for (int i = 0; i < 8; i++) ((LOCAL int *)wl)[ITEM * 9 + i] = q[i];
      for (int i = 0; i < 2; i++) {
        ws[ITEM * 4 + i] = s[i];
        ws[ITEM * 4 + 2 + i] = m[i];
      }
    } else {
      int t = (ITEM - 64) >> 1, part = ITEM & 1;
      GLOBAL const float *r = x + (size_t)INPUT_ROW(t) * X_STRIDE;
      for (int i = 4 * part; i < 4 * part + 4; i++)
        ((LOCAL int *)xl)[t * 9 + i] = ((GLOBAL const int *)r)[8 * c + i];
      if (part == 0) {
        xs[t * 3] = r[K / 4 + c];
        xs[t * 3 + 1] = r[K / 4 + K / 32 + 2 * c];
        xs[t * 3 + 2] = r[K / 4 + K / 32 + 2 * c + 1];
      }
    }
    BARRIER();
    int xq[4][8];
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < 8; i++) xq[j][i] = ((LOCAL int *)xl)[(tx + 8 * j) * 9 + i];
    for (int i = 0; i < 4; i++) {
      int q[8], r = ty + 16 * i;
      float s[2], m[2];
      for (int k = 0; k < 8; k++) q[k] = ((LOCAL int *)wl)[r * 9 + k];
      for (int k = 0; k < 2; k++) {
        s[k] = ws[r * 4 + k];
        m[k] = ws[r * 4 + 2 + k];
      }
      for (int j = 0; j < 4; j++) {
        LOCAL float *of = xs + (tx + 8 * j) * 3;
        sum[i][j] = add_chunk(sum[i][j], q, s, m, xq[j], of[0], of[1], of[2]);
      }
    }
    BARRIER();
  }
#else
  for (int k0 = 0; k0 < K; k0 += DEPTH) {
    for (int n = ITEM; n < 64 * DEPTH; n += 128) {
      int r = n / DEPTH, k = k0 + n % DEPTH;
      size_t row = bias_at + smaller(GROUP_X * 64 + r, N - 1);
      wl[r * (DEPTH + 1) + n % DEPTH] = k < K ? element(w, row * K + k) : 0.0f;
    }
    for (int n = ITEM; n < 32 * DEPTH; n += 128) {
      int t = n / DEPTH, k = k0 + n % DEPTH;
      xl[t * (DEPTH + 1) + n % DEPTH] = k < K ? x[(size_t)INPUT_ROW(t) * X_STRIDE + k] : 0.0f;
    }
    BARRIER();
    for (int k = 0; k < smaller(DEPTH, K - k0); k++) {
      float wv[4], xv[4];
      for (int i = 0; i < 4; i++) wv[i] = wl[(ty + 16 * i) * (DEPTH + 1) + k];
      for (int j = 0; j < 4; j++) xv[j] = xl[(tx + 8 * j) * (DEPTH + 1) + k];
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = FMA(wv[i], xv[j], sum[i][j]);
    }
    BARRIER();
  }
#endif
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      int row = GROUP_X * 64 + ty + 16 * i, at = tx + 8 * j;
      if (row < N && first + at < count)
        finish(SHAPE sum[i][j], row, OUTPUT_ROW(at), y, bias, residual, bias_at, factor);
    }
}
#endif
