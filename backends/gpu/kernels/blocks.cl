// Activation blocks, which products with quantized matrices read instead of floats. A row of `width` values is stored
// as int8, then a scale for every 32 values, then for every 16 values their sum times the scale. Kernels that compute
// such rows end with `deliver`. Constants: HAS_FLOATS and HAS_BLOCKS (forms of the row that are read later),
// BLOCKS_STRIDE (words of a row of blocks).

// Quantizes one of 32 floats, one per work-item of a segment, to int8 with the scale max|v| / 127: v * 127 / max|v| is
// rounded half to even. Magnitude bits order like integers, and NaN is above all floats, so it makes the scale NaN.
DEVICE int signed_byte(float v, float *scale, LOCAL float *s) {
  float largest = AS_FLOAT((int)umax32((uint)AS_INT(v) & 0x7FFFFFFFu, s));
  float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  if (!(inverse < 3.0e38f)) inverse = 0.0f;  // a block with a subnormal maximum becomes zero
  *scale = largest / 127.0f;
  return largest <= -LOWEST ? (int)FLOOR_EVEN(v * inverse) : 0;  // NaN and infinity are kept in the scale
}

#ifdef HAS_BLOCKS
// Delivers value i of a row. All work-items of the group must call this, even those past the end of the row. `y` and
// `blocks` point to the row.
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
