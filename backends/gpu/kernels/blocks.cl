// Activation blocks, which products with quantized matrices read instead of floats. A row of `width` numbers is stored
// as int8 values, then a scale for every 32 values, then for every 16 values their sum times scale. Kernels that make
// rows end with `deliver`. Constants: HAS_FLOATS and HAS_BLOCKS (forms of the row that are read later), BLOCKS_STRIDE
// (words of a row of blocks).

// The int8 value of one of 32 numbers, one per work-item of a segment, and their scale = max|v| / 127: v * 127 / max|v|
// rounded half to even. Bits of magnitudes are ordered like integers, and NaN is above all of them, so that the scale
// becomes NaN.
DEVICE int signed_byte(float v, float *scale, LOCAL float *s) {
  float largest = AS_FLOAT((int)umax32((uint)AS_INT(v) & 0x7FFFFFFFu, s));
  float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  if (!(inverse < 3.0e38f)) inverse = 0.0f;  // for a subnormal maximum: such a block is zero
  *scale = largest / 127.0f;
  return largest <= -LOWEST ? (int)FLOOR_EVEN(v * inverse) : 0;  // for NaN or infinity, the scale carries it
}

#ifdef HAS_BLOCKS
// Number i of a row; all work-items of the group must call this, even those beyond the end. `y` and `blocks` point to
// the row.
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
