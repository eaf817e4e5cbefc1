// RoPE. Cosines and sines are in tables (positions, 2, N_ROT / 2). Constants: HEAD, N_ROT, NEOX.

// The dimension that is rotated together with dimension d of a head, or d itself if d is not rotated.
DEVICE int partner(SHAPE_PARAMETER int d) {
  if (d >= N_ROT) return d;
#if NEOX
  return d < N_ROT / 2 ? d + N_ROT / 2 : d - N_ROT / 2;
#else
  return d ^ 1;
#endif
}

// Dimension d of a head, rotated with its partner. `of` is the table row of the head's position.
DEVICE float rotated(SHAPE_PARAMETER float x, float other, int d, GLOBAL const float *of) {
  if (d >= N_ROT) return x;
#if NEOX
  int pair = d % (N_ROT / 2), second = d >= N_ROT / 2;
#else
  int pair = d / 2, second = d & 1;
#endif
  float cosine = of[pair], sine = of[N_ROT / 2 + pair];
  return second ? other * sine + x * cosine : x * cosine - other * sine;
}

#ifdef ROTATE  // Constants: WIDTH, STRIDE
KERNEL(128, rotate_heads)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const int *step, GLOBAL const float *table, GLOBAL float *y) {
  int i = GROUP_X * 128 + ITEM, d = i % HEAD;
  size_t at = (size_t)GROUP_Y * STRIDE + i;
  if (i < WIDTH)
    y[at] = rotated(SHAPE x[at], x[at + partner(SHAPE d) - d], d, table + (size_t)POSITIONS_OF(step)[GROUP_Y] * N_ROT);
}
#endif
