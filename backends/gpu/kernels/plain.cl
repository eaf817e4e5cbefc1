// Reads the float formats: element i of a matrix, counted from its start.
DEVICE float element(GLOBAL const uchar *w, size_t i) {
#if defined(FORMAT_F32)
  return ((GLOBAL const float *)w)[i];
#elif defined(FORMAT_F16)
  return half_at(w + 2 * i);
#elif defined(FORMAT_BF16)
  return AS_FLOAT((int)((uint)((GLOBAL const ushort *)w)[i] << 16));
#endif
}
