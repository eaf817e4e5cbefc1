// Operations on whole rows: embedding, norms, input rows for tensor cores. Constants: K (width of a row or group),
// strides.

#ifdef EMBED
KERNEL(64, embed)(SHAPE_PARAMETER GLOBAL const uchar *RESTRICT w, GLOBAL const int *step, GLOBAL float *RESTRICT y) {
  int row = GROUP_Y, i = GROUP_X * 64 + ITEM;
#if BY_POSITION
  size_t token = smaller(POSITIONS_OF(step)[row], N - 1);
#else
  size_t token = larger(TOKENS_OF(step)[row], 0);
#endif
#ifdef QUANTIZED
  if (i < K / 32) {  // each work-item handles one chunk
    int q[8];
    float s[2], m[2];
    unpack_chunk(SHAPE w, N, token, i, q, s, m);
    for (int k = 0; k < 32; k++) {
      float v = s[k / 16] * (float)byte_of(q[k / 4], k & 3);
#if MINIMUM
      v = v - m[k / 16];
#endif
      y[(size_t)row * Y_STRIDE + 32 * i + k] = v;
    }
  }
#else
  if (i < K) y[(size_t)row * Y_STRIDE + i] = element(w, token * K + i);
#endif
}
#endif

#ifdef NORM  // a work-group of SIZE handles a group of a row, or the whole row if it outputs blocks
KERNEL(SIZE, norm_rows)(SHAPE_PARAMETER GLOBAL const float *RESTRICT x, GLOBAL const float *RESTRICT weight,
                        GLOBAL const float *bias, GLOBAL float *y, GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int group = GROUP_X;
  x += (size_t)GROUP_Y * X_STRIDE + (size_t)group * K;
  y += (size_t)GROUP_Y * Y_STRIDE + (size_t)group * K;
  blocks += (size_t)GROUP_Y * BLOCKS_STRIDE;
  weight += group * GROUP_STRIDE;
  float mean = 0.0f, factor = 1.0f;
#if LAYER
  for (int i = ITEM; i < K; i += SIZE) mean += x[i];
  mean = group_sum(mean, local_memory, SIZE) / (float)K;
#endif
#if NORMS
  float square = 0.0f;
  for (int i = ITEM; i < K; i += SIZE) square = FMA(x[i] - mean, x[i] - mean, square);
  factor = 1.0f / SQRT(group_sum(square, local_memory, SIZE) / (float)K + EPS);
#endif
  for (int base = 0; base < K; base += SIZE) {
    int i = base + ITEM, own = smaller(i, K - 1);
    float v = (x[own] - mean) * factor * weight[own];
#if HAS_BIAS
    v += bias[group * GROUP_STRIDE + own];
#endif
    deliver(v, i, K, y, blocks, local_memory);
  }
}
#endif

#ifdef SPLIT
// A row as 16-bit floats for tensor cores: TERMS times K floats whose sum is the row except for rounding, then a word
// with the factor for the products. F16 has one term, the row times the power of two that brings its largest magnitude
// to 2^14, below the limit of 65504. BF16 has two terms, 16 bits of each float.
DEVICE uint bfloat_of(float v) {
  uint bits = (uint)AS_INT(v);
  return IS_NAN(v) ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

KERNEL(128, split_rows)(SHAPE_PARAMETER GLOBAL const float *RESTRICT x, GLOBAL float *RESTRICT y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  x += (size_t)GROUP_Y * X_STRIDE;
  y += (size_t)GROUP_Y * Y_STRIDE;
  GLOBAL ushort *out = (GLOBAL ushort *)y;
  float back = 1.0f;
#ifdef FORMAT_F16
  float largest = 0.0f;
  for (int i = ITEM; i < K; i += 128) largest = FMAX(largest, x[i] < 0.0f ? -x[i] : x[i]);
  int exponent = AS_INT(group_max(largest, local_memory, 128)) >> 23;
  exponent = exponent == 255 ? 141 : larger(exponent, 15);
  float factor = AS_FLOAT((268 - exponent) << 23);
  back = AS_FLOAT((exponent - 14) << 23);
  for (int i = ITEM; i < K; i += 128) store_half(x[i] * factor, out + i);
#else
  for (int i = ITEM; i < K; i += 128) {
    uint bits = bfloat_of(x[i]);
    out[i] = (ushort)bits;
    out[K + i] = (ushort)bfloat_of(x[i] - AS_FLOAT((int)(bits << 16)));
  }
#endif
  if (ITEM == 0) y[TERMS * K / 2] = back;
}
#endif
