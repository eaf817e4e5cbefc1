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
