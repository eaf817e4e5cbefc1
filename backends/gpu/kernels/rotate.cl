// RoPE. Cosines and sines are in tables (positions, 2, N_ROT / 2). Constants: HEAD, N_ROT, NEOX,
// AXES: the table begins with the axis of each pair.

// The dimension that is rotated together with dimension d of a head, or d itself if d is not rotated.
DEVICE int partner(SHAPE_PARAMETER int d) {
  if (d >= N_ROT) return d;
#if NEOX
  return d < N_ROT / 2 ? d + N_ROT / 2 : d - N_ROT / 2;
#else
  return d ^ 1;
#endif
}

// Dimension d of a head of a row, rotated with its partner.
DEVICE float rotated(SHAPE_PARAMETER float x, float other, int d, GLOBAL const int *step, GLOBAL const float *table, int row) {
  if (d >= N_ROT) return x;
#if NEOX
  int pair = d % (N_ROT / 2), second = d >= N_ROT / 2;
#else
  int pair = d / 2, second = d & 1;
#endif
#if AXES
  int position = step[step[4] + row * step[5] + ((GLOBAL const int *)table)[pair] * step[6]];
  GLOBAL const float *of = table + N_ROT / 2 + (size_t)position * N_ROT;
#else
  GLOBAL const float *of = table + (size_t)POSITIONS_OF(step)[row] * N_ROT;
#endif
  float cosine = of[pair], sine = of[N_ROT / 2 + pair];
  return second ? other * sine + x * cosine : x * cosine - other * sine;
}

#ifdef ROTATE  // Constants: WIDTH, STRIDE
KERNEL(128, rotate_heads)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const int *step, GLOBAL const float *table, GLOBAL float *y) {
  int i = GROUP_X * 128 + ITEM, d = i % HEAD;
  size_t at = (size_t)GROUP_Y * STRIDE + i;
  if (i < WIDTH)
    y[at] = rotated(SHAPE x[at], x[at + partner(SHAPE d) - d], d, step, table, GROUP_Y);
}
#endif
