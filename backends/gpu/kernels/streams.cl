// Operations on several streams of hidden states. A row of x is SLICES slices of WIDTH values. Constants: X_STRIDE,
// Y_STRIDE.

#ifdef MIX  // C_STRIDE: stride of the coefficients, 0 if all rows share them
KERNEL(128, mix_slices)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *coefficients, GLOBAL const float *base,
                 GLOBAL float *y) {
  int i = GROUP_X * 128 + ITEM, own = i / WIDTH * SLICES;
  if (i >= Y_STRIDE) return;
  x += (size_t)GROUP_Y * X_STRIDE + i % WIDTH;
  coefficients += (size_t)GROUP_Y * C_STRIDE + own;
  size_t at = (size_t)GROUP_Y * Y_STRIDE + i;
  float total = HAS_BASE ? base[at] : 0.0f;
  for (int j = 0; j < SLICES; j++) total = FMA(x[(size_t)j * WIDTH], coefficients[j], total);
  y[at] = total;
}
#endif

#ifdef WEIGH
KERNEL(128, weigh)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *weight, GLOBAL float *y,
                   GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int i = GROUP_X * 128 + ITEM, own = smaller(i, WIDTH - 1);
  float v = x[(size_t)GROUP_Y * X_STRIDE + own] * weight[own];
  deliver(v, i, WIDTH, y + (size_t)GROUP_Y * Y_STRIDE, blocks + (size_t)GROUP_Y * BLOCKS_STRIDE, local_memory);
}
#endif

#ifdef BLEND  // The largest score so far and sums relative to it, as in attention. Constants: L_STRIDE (of `last`), EPS
KERNEL(128, blend_slices)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *last, GLOBAL const float *weight,
                          GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  x += (size_t)GROUP_Y * X_STRIDE;
  last += (size_t)GROUP_Y * L_STRIDE;
  y += (size_t)GROUP_Y * Y_STRIDE;
  float largest = 0.0f, sum = 0.0f;
  for (int j = SLICES; j >= 0; j--) {
    GLOBAL const float *own = j == SLICES ? last : x + (size_t)j * WIDTH;
    float square = 0.0f, score = 0.0f;
    for (int i = ITEM; i < WIDTH; i += 128) {
      square = FMA(own[i], own[i], square);
      score = FMA(own[i], weight[i], score);
    }
    square = group_sum(square, local_memory, 128) / (float)WIDTH;
    score = group_sum(score, local_memory, 128) / SQRT(square + EPS);
    float now = j == SLICES ? score : FMAX(largest, score), factor = exponential(score - now);
    float before = j == SLICES ? 0.0f : exponential(largest - now);
    for (int i = ITEM; i < WIDTH; i += 128) y[i] = j == SLICES ? own[i] : FMA(y[i], before, own[i] * factor);
    sum = FMA(sum, before, factor);
    largest = now;
  }
  for (int i = ITEM; i < WIDTH; i += 128) y[i] = y[i] / sum;
}
#endif

#ifdef CONNECT  // Constants: PARTS, EPS, MAGNITUDE, WRITTEN_EPS, ITERATIONS. A work-item handles one coefficient
KERNEL(128, connect_streams)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *scale, GLOBAL const float *bias,
                             GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int n = SLICES, part = ITEM < n ? 0 : ITEM < 2 * n ? 1 : 2, at = ITEM - 2 * n;
  int from = at / n, to = at % n, own = PARTS > 2 && at >= 0 && at < n * n;
  x += (size_t)GROUP_Y * X_STRIDE;
  y += (size_t)GROUP_Y * Y_STRIDE;
  float v = 0.0f;
  if (own || (ITEM < 2 * n && part < PARTS)) v = FMA(x[ITEM], scale[part], bias[ITEM]);
  if (ITEM < 2 * n && part < PARTS)
    y[ITEM] = part == 0 ? sigmoid(v) + EPS : FMA(MAGNITUDE, sigmoid(v), WRITTEN_EPS);
  if (own) local_memory[at] = v;
  BARRIER();
  if (own) {
    float most = local_memory[from * n];
    for (int i = 1; i < n; i++) most = FMAX(most, local_memory[from * n + i]);
    v = exponential(v - most);
  }
  for (int turn = 0; turn < 2 * ITERATIONS; turn++) {  // alternate rows and columns; the first rows are a softmax
    BARRIER();
    if (own) local_memory[at] = v;
    BARRIER();
    if (own) {
      float sum = 0.0f;
      for (int i = 0; i < n; i++) sum += local_memory[turn % 2 == 0 ? from * n + i : i * n + to];
      v = turn == 0 ? v / sum + EPS : v / (sum + EPS);
    }
  }
  if (own) y[2 * n + to * n + from] = v;
}
#endif

#ifdef MATCH  // a work-group handles one slice. Constants: L_WIDTH (of a row of `like`), EPS
KERNEL(128, match_slices)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *like, GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  x += (size_t)GROUP_Y * X_STRIDE + (size_t)GROUP_X * WIDTH;
  y += (size_t)GROUP_Y * Y_STRIDE + (size_t)GROUP_X * WIDTH;
  like += (size_t)GROUP_Y * L_WIDTH;
  float wanted = 0.0f, square = 0.0f;
  for (int i = ITEM; i < L_WIDTH; i += 128) wanted = FMA(like[i], like[i], wanted);
  for (int i = ITEM; i < WIDTH; i += 128) square = FMA(x[i], x[i], square);
  wanted = group_sum(wanted, local_memory, 128) / (float)L_WIDTH;
  square = group_sum(square, local_memory, 128) / (float)WIDTH;
  float factor = SQRT(wanted / FMAX(square, EPS));
  for (int i = ITEM; i < WIDTH; i += 128) y[i] = x[i] * factor;
}
#endif

#ifdef EXCESS  // Constant: FACTOR, the number of standard deviations above the mean
KERNEL(128, excess)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  x += (size_t)GROUP_Y * X_STRIDE;
  y += (size_t)GROUP_Y * Y_STRIDE;
  float mean = 0.0f, square = 0.0f;
  for (int i = ITEM; i < WIDTH; i += 128) mean += x[i];
  mean = group_sum(mean, local_memory, 128) / (float)WIDTH;
  for (int i = ITEM; i < WIDTH; i += 128) square = FMA(x[i] - mean, x[i] - mean, square);
  float cutoff = FMA(FACTOR, SQRT(group_sum(square, local_memory, 128) / (float)(WIDTH - 1)), mean);
  for (int i = ITEM; i < WIDTH; i += 128) y[i] = x[i] - cutoff < 0.0f ? 0.0f : x[i] - cutoff;
}
#endif
