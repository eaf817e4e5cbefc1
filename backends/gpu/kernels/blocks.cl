// Activation blocks, which products with quantized matrices read instead of floats: of a row of `width` numbers the
// signed bytes, then a scale for every 32, then for every 16 their sum times scale. Kernels that make rows end with
// `deliver`. Constants: HAS_FLOATS and HAS_BLOCKS (what of a row is read later), BLOCKS_STRIDE (words of a row of blocks).

// The signed byte of a number among 32, one a work-item of a segment, and their scale = max|v| / 127: round half even of
// v * 127 / max|v|. The bits of magnitudes are ordered as integers, and a NaN is above all, so that the scale becomes one.
DEVICE int signed_byte(float v, float *scale, LOCAL float *s) {
  float largest = AS_FLOAT((int)umax32((uint)AS_INT(v) & 0x7FFFFFFFu, s));
  float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  if (!(inverse < 3.0e38f)) inverse = 0.0f;  // of a subnormal maximum: such a block is zero
  *scale = largest / 127.0f;
  return largest <= -LOWEST ? (int)FLOOR_EVEN(v * inverse) : 0;  // no number: the scale says so
}

#ifdef HAS_BLOCKS
// Number i of a row; every work-item of the group comes here, those beyond the end too. `y` and `blocks` are the row's.
DEVICE void deliver(float v, int i, int width, GLOBAL float *y, GLOBAL float *blocks, LOCAL float *s) {
#if HAS_FLOATS
  if (i < width) y[i] = v;
#endif
#if HAS_BLOCKS
  float scale;
  int q = signed_byte(v, &scale, s), sum = sum16(q, s);
  if (i < width) {
    ((GLOBAL i8 *)blocks)[i] = (i8)q;
    if ((i & 31) == 0) blocks[width / 4 + i / 32] = scale;
    if ((i & 15) == 0) blocks[width / 4 + width / 32 + i / 16] = scale * (float)sum;
  }
#endif
}
#endif
