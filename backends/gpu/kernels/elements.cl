// Operations number by number. Constants: WIDTH, STRIDE (of values of this width), and the expression OPERATION(a, b).

#ifdef PAIRED  // y = OPERATION(a, b); b may be a itself, or with GATE_STRIDE one number of a per row
KERNEL(128, elements)(SHAPE_PARAMETER GLOBAL const float *a, GLOBAL const float *b, GLOBAL float *y) {
  int i = GROUP_X * 128 + ITEM;
  size_t at = (size_t)GROUP_Y * STRIDE + i;
  if (i < WIDTH) {
#ifdef GATE_STRIDE
    float u = a[(size_t)GROUP_Y * GATE_STRIDE], v = b[at];
#else
    float u = a[at], v = b[at];
#endif
    y[at] = OPERATION(u, v);
  }
}
#endif

#ifdef SELECT
KERNEL(128, select_rows)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const int *step, GLOBAL float *y) {
  int i = GROUP_X * 128 + ITEM;
  size_t row = LOGIT_INDEX_OF(step)[GROUP_Y];
  if (i < WIDTH) y[(size_t)GROUP_Y * STRIDE + i] = x[row * STRIDE + i];
}
#endif

#ifdef ROTATE
// Cosines and sines stand in tables (positions, 2, N_ROT / 2). Constants: HEAD, N_ROT, NEOX.
KERNEL(128, rotate_heads)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const int *step, GLOBAL const float *table, GLOBAL float *y) {
  int i = GROUP_X * 128 + ITEM, d = i % HEAD;
  size_t at = (size_t)GROUP_Y * STRIDE + i;
  if (i >= WIDTH) return;
  if (d >= N_ROT) {
    y[at] = x[at];
    return;
  }
#if NEOX
  int pair = d % (N_ROT / 2), second = d >= N_ROT / 2, other = second ? -(N_ROT / 2) : N_ROT / 2;
#else
  int pair = d / 2, second = d & 1, other = second ? -1 : 1;
#endif
  GLOBAL const float *of = table + (size_t)POSITIONS_OF(step)[GROUP_Y] * N_ROT;
  float cosine = of[pair], sine = of[N_ROT / 2 + pair];
  y[at] = second ? x[at + other] * sine + x[at] * cosine : x[at] * cosine - x[at + other] * sine;
}
#endif

#ifdef APPEND
// Keys and values of a row to its slot. A cache is (blocks, KV_HEADS, BLOCK_TOKENS, HEAD) halves; what they cannot hold
// becomes their largest number, so that an answer stays a number.
KERNEL(128, append)(SHAPE_PARAMETER GLOBAL const float *k, GLOBAL const float *v, GLOBAL const int *step, GLOBAL ushort *keys,
                    GLOBAL ushort *values) {
  int i = GROUP_X * 128 + ITEM, slot = SLOTS_OF(step)[GROUP_Y];
  if (i >= WIDTH) return;
  size_t to = (((size_t)(slot / BLOCK_TOKENS) * KV_HEADS + i / HEAD) * BLOCK_TOKENS + slot % BLOCK_TOKENS) * HEAD + i % HEAD;
  float a = k[(size_t)GROUP_Y * STRIDE + i], b = v[(size_t)GROUP_Y * STRIDE + i];
  a = a > -65504.0f ? a : -65504.0f;  // a NaN too: it would spoil every later row
  b = b > -65504.0f ? b : -65504.0f;
  store_half(a < 65504.0f ? a : 65504.0f, keys + to);
  store_half(b < 65504.0f ? b : 65504.0f, values + to);
}
#endif
