// Unpacks blocks of the quantized formats: `unpack` returns the 32 integers of chunk c of a block as 8 words of four
// int8, and scale and minimum of each half: value = scale * q - minimum. With HALVES 1, both halves share them; with
// MINIMUM 0, there is only a scale. A block is split into its body (4-byte words) and its head (the bytes that would
// break their alignment). Both keep the byte order of the GGUF. `quant.formats` defines the layouts.

// Loads four words; on CUDA in one load if the constant `wide` says that they are aligned to 16 bytes.
DEVICE void four_words(GLOBAL const uchar *p, int wide, uint *w) {
#ifndef __OPENCL_VERSION__
  if (wide) {
    uint4 v = *(const uint4 *)p;
    w[0] = v.x;
    w[1] = v.y;
    w[2] = v.z;
    w[3] = v.w;
    return;
  }
#endif
  for (int i = 0; i < 4; i++) w[i] = word_at(p, 4 * i);
}
DEVICE void eight_words(GLOBAL const uchar *p, int wide, uint *w) {
  four_words(p, wide, w);
  four_words(p + 16, wide, w + 4);
}

#if defined(LEVELS)
// Looks up four nibbles in a table of 16 one-byte levels.
#ifdef __OPENCL_VERSION__
TABLE uchar level_table[16] = {LEVELS};
DEVICE int level(uint n) {
  return (int)((uint)level_table[n & 15] | (uint)level_table[(n >> 8) & 15] << 8 |
               (uint)level_table[(n >> 16) & 15] << 16 | (uint)level_table[(n >> 24) & 15] << 24);
}
#else
DEVICE int level(uint n) {  // byte_perm selects among 8 bytes by 3 bits; the fourth bit selects between two results
  const uchar t[16] = {LEVELS};
  const uint t0 = t[0] | t[1] << 8 | t[2] << 16 | t[3] << 24, t1 = t[4] | t[5] << 8 | t[6] << 16 | t[7] << 24;
  const uint t2 = t[8] | t[9] << 8 | t[10] << 16 | t[11] << 24, t3 = t[12] | t[13] << 8 | t[14] << 16 | t[15] << 24;
  uint low = n & 0x07070707u;
  uint selector = (low | low >> 4) & 0x00FF00FFu;
  selector = (selector | selector >> 8) & 0xFFFFu;
  uint a = __byte_perm(t0, t1, selector), b = __byte_perm(t2, t3, selector);
  uint mask = ((n >> 3) & 0x01010101u) * 0xFFu;
  return (int)((a & ~mask) | (b & mask));
}
#endif
#endif

#if defined(POINTS)
// Applies the signs given by four bits to magnitudes, which are all nonzero.
DEVICE int with_signs(uint magnitudes, uint bits) {
  uint minus = spread(bits);
  return (int)((magnitudes ^ (minus * 0xFFu)) + minus);
}
// Expands 7 sign bits to 8. The eighth bit makes the number of set bits even.
DEVICE uint signs_of_code(uint code) {
  uint parity = code ^ (code >> 4);
  parity ^= parity >> 2;
  return code | (((parity ^ (parity >> 1)) & 1u) << 7);
}
#endif

DEVICE void unpack(GLOBAL const uchar *b, GLOBAL const uchar *h, int c, int *q, float *s, float *m) {
  const int wide = BODY % 16 == 0;
  uint words[8];
  s[1] = m[0] = m[1] = 0.0f;
#if defined(FORMAT_Q4_0)
  s[0] = half_at(h);
  four_words(b, wide, words);
  for (int i = 0; i < 4; i++) {
    q[i] = less(nibbles(words[i], 0), 8);
    q[i + 4] = less(nibbles(words[i], 1), 8);
  }
#elif defined(FORMAT_Q4_1)
  s[0] = half_at(b);
  m[0] = -half_at(b + 2);
  for (int i = 0; i < 4; i++) {
    uint w = word_at(b, 4 + 4 * i);
    q[i] = (int)nibbles(w, 0);
    q[i + 4] = (int)nibbles(w, 1);
  }
#elif defined(FORMAT_Q5_0)
  s[0] = half_at(h);
  uint fifth = word_at(b, 0);
  for (int i = 0; i < 4; i++) {
    uint w = word_at(b, 4 + 4 * i);
    q[i] = less(nibbles(w, 0) | spread(fifth >> (4 * i)) << 4, 16);
    q[i + 4] = less(nibbles(w, 1) | spread(fifth >> (16 + 4 * i)) << 4, 16);
  }
#elif defined(FORMAT_Q5_1)
  s[0] = half_at(b);
  m[0] = -half_at(b + 2);
  uint fifth = word_at(b, 4);
  for (int i = 0; i < 4; i++) {
    uint w = word_at(b, 8 + 4 * i);
    q[i] = (int)(nibbles(w, 0) | spread(fifth >> (4 * i)) << 4);
    q[i + 4] = (int)(nibbles(w, 1) | spread(fifth >> (16 + 4 * i)) << 4);
  }
#elif defined(FORMAT_Q8_0)
  s[0] = half_at(h);
  eight_words(b, wide, (uint *)q);
#elif defined(FORMAT_Q2_K)
  for (int part = 0; part < 2; part++) {
    uint packed = b[2 * c + part];
    s[part] = half_at(b + 80) * (float)(packed & 15u);
    m[part] = half_at(b + 82) * (float)(packed >> 4);
  }
  for (int i = 0; i < 8; i++) q[i] = (int)((word_at(b, 16 + 32 * (c / 4) + 4 * i) >> (2 * (c % 4))) & 0x03030303u);
#elif defined(FORMAT_Q3_K)
  for (int part = 0; part < 2; part++) {
    int j = 2 * c + part;
    uint low = ((uint)b[96 + j % 8] >> (4 * (j / 8))) & 15u, high = ((uint)b[104 + j % 4] >> (2 * (j / 4))) & 3u;
    s[part] = half_at(h) * (float)((int)(low | high << 4) - 32);
  }
  for (int i = 0; i < 8; i++) {
    uint low = (word_at(b, 32 + 32 * (c / 4) + 4 * i) >> (2 * (c % 4))) & 0x03030303u;
    q[i] = less(low | ((word_at(b, 4 * i) >> c) & 0x01010101u) << 2, 4);
  }
#elif defined(FORMAT_Q4_K) || defined(FORMAT_Q5_K)
  uint scale, minimum;
  if (c < 4) {
    scale = b[4 + c] & 63u;
    minimum = b[8 + c] & 63u;
  } else {
    scale = (b[8 + c] & 15u) | ((uint)b[c] >> 6) << 4;
    minimum = ((uint)b[8 + c] >> 4) | ((uint)b[4 + c] >> 6) << 4;
  }
  s[0] = half_at(b) * (float)scale;
  m[0] = half_at(b + 2) * (float)minimum;
#if defined(FORMAT_Q4_K)
  eight_words(b + 16 + 32 * (c / 2), wide, words);
  for (int i = 0; i < 8; i++) q[i] = (int)nibbles(words[i], c & 1);
#else
  uint high[8];
  eight_words(b + 48 + 32 * (c / 2), wide, words);
  eight_words(b + 16, wide, high);
  for (int i = 0; i < 8; i++) q[i] = (int)(nibbles(words[i], c & 1) | ((high[i] >> c) & 0x01010101u) << 4);
#endif
#elif defined(FORMAT_Q6_K)
  for (int part = 0; part < 2; part++) s[part] = half_at(h) * (float)((GLOBAL const i8 *)b)[192 + 2 * c + part];
  uint high[8];
  eight_words(b + 64 * (c / 4) + 32 * (c & 1), wide, words);
  eight_words(b + 128 + 32 * (c / 4), wide, high);
  for (int i = 0; i < 8; i++)
    q[i] = less(nibbles(words[i], (c >> 1) & 1) | ((high[i] >> (2 * (c % 4))) & 0x03030303u) << 4, 32);
#elif defined(FORMAT_IQ4_NL)
  s[0] = half_at(h);
  four_words(b, wide, words);
  for (int i = 0; i < 4; i++) {
    q[i] = level(nibbles(words[i], 0));
    q[i + 4] = level(nibbles(words[i], 1));
  }
#elif defined(FORMAT_IQ4_XS)
  uint low = ((uint)b[4 + c / 2] >> (4 * (c & 1))) & 15u, high = (short_at(b, 2) >> (2 * c)) & 3u;
  s[0] = half_at(b) * (float)((int)(low | high << 4) - 32);
  for (int i = 0; i < 4; i++) {
    uint w = word_at(b, 8 + 16 * c + 4 * i);
    q[i] = level(nibbles(w, 0));
    q[i + 4] = level(nibbles(w, 1));
  }
#elif defined(FORMAT_MXFP4)
  int e = h[0];  // 2^(e - 128): half of the power of two, because the levels are doubled
  s[0] = AS_FLOAT(e == 0 ? 0x00200000 : e == 1 ? 0x00400000 : (e - 1) << 23);
  four_words(b, wide, words);
  for (int i = 0; i < 4; i++) {
    q[i] = level(nibbles(words[i], 0));
    q[i + 4] = level(nibbles(words[i], 1));
  }
#elif defined(FORMAT_NVFP4)
  for (int part = 0; part < 2; part++) {  // half of the unsigned E4M3 value; 0x7F reads as 0
    int e = b[2 * c + part], exponent = (e >> 3) & 15, mantissa = e & 7;
    float value = exponent ? AS_FLOAT((exponent + 119) << 23 | mantissa << 20) : (float)mantissa * 0.0009765625f;
    s[part] = e == 0x7F ? 0.0f : value;
    for (int i = 0; i < 2; i++) {
      uint w = word_at(b, 4 + 8 * (2 * c + part) + 4 * i);
      q[4 * part + i] = level(nibbles(w, 0));
      q[4 * part + 2 + i] = level(nibbles(w, 1));
    }
  }
#elif defined(FORMAT_TQ1_0)
  s[0] = half_at(h);
  for (int i = 0; i < 8; i++) {  // value 32 c + 4 i: the index of its word, and of the ternary digit in its bytes
    int at = c < 5 ? 4 * i : c < 7 || i < 4 ? 32 + 4 * (i & 3) : 48;
    int n = c < 5 ? c : c < 7 ? 2 * (c - 5) + i / 4 : i < 4 ? 4 : i - 4;
    uint power = n == 0 ? 1u : n == 1 ? 3u : n == 2 ? 9u : n == 3 ? 27u : 81u;
    uint w = word_at(b, at), digits = 0;
    for (int k = 0; k < 4; k++) digits |= (((((w >> (8 * k)) & 255u) * power) & 255u) * 3u >> 8) << (8 * k);
    q[i] = less(digits, 1);
  }
#elif defined(FORMAT_TQ2_0)
  s[0] = half_at(h);
  eight_words(b + 32 * (c / 4), wide, words);
  for (int i = 0; i < 8; i++) q[i] = less((words[i] >> (2 * (c % 4))) & 0x03030303u, 1);
#elif defined(FORMAT_Q1_0)
  s[0] = half_at(h);
  for (int i = 0; i < 8; i++) q[i] = less(spread(word_at(b, 4 * c) >> (4 * i)) << 1, 1);
#elif defined(FORMAT_Q2_0)
  s[0] = half_at(h);
  for (int i = 0; i < 8; i++) {
    uint four = b[8 * c + i];
    q[i] = less((four | four << 6 | four << 12 | four << 18) & 0x03030303u, 1);
  }
#elif defined(FORMAT_IQ2_XXS)
  uint packed = word_at(b, 8 * c + 4);
  s[0] = half_at(h) * (((float)(packed >> 28) + 0.5f) * 0.25f);
  for (int r = 0; r < 4; r++) {
    int point = 2 * (int)b[8 * c + r];
    uint signs = signs_of_code((packed >> (7 * r)) & 127u);
    q[2 * r] = with_signs(points[point], signs);
    q[2 * r + 1] = with_signs(points[point + 1], signs >> 4);
  }
#elif defined(FORMAT_IQ2_XS) || defined(FORMAT_IQ2_S)
#if defined(FORMAT_IQ2_XS)
#define SCALES_AT 64
#else
#define SCALES_AT 72
#endif
  for (int part = 0; part < 2; part++)
    s[part] = half_at(h) * (((float)(((uint)b[SCALES_AT + c] >> (4 * part)) & 15u) + 0.5f) * 0.25f);
  for (int r = 0; r < 4; r++) {
    int n = 4 * c + r;
#if defined(FORMAT_IQ2_XS)
    uint packed = short_at(b, 2 * n), signs = signs_of_code(packed >> 9);
    int point = 2 * (int)(packed & 511u);
#else
    uint signs = b[32 + n];
    int point = 2 * (int)(b[n] | (((uint)b[64 + c] >> (2 * r)) & 3u) << 8);
#endif
    q[2 * r] = with_signs(points[point], signs);
    q[2 * r + 1] = with_signs(points[point + 1], signs >> 4);
  }
#elif defined(FORMAT_IQ3_XXS)
  uint packed = word_at(b, 64 + 4 * c);
  s[0] = half_at(h) * (((float)(packed >> 28) + 0.5f) * 0.5f);
  for (int i = 0; i < 8; i++)
    q[i] = with_signs(points[b[8 * c + i]], signs_of_code((packed >> (7 * (i / 2))) & 127u) >> (4 * (i & 1)));
#elif defined(FORMAT_IQ3_S)
  s[0] = half_at(h) * ((float)(((uint)b[104 + c / 2] >> (4 * (c & 1))) & 15u) * 2.0f + 1.0f);
  for (int i = 0; i < 8; i++) {
    int point = (int)(b[8 * c + i] | (((uint)b[64 + c] >> i) & 1u) << 8);
    q[i] = with_signs(points[point], (uint)b[72 + 4 * c + i / 2] >> (4 * (i & 1)));
  }
#elif defined(FORMAT_IQ1_S) || defined(FORMAT_IQ1_M)  // eighths: 8 * coordinate (stored plus 128 in `points`), +- 1
#if defined(FORMAT_IQ1_S)
  uint packed = short_at(b, 32 + 2 * c);
  s[0] = half_at(h) * ((float)((packed >> 12) & 7u) * 2.0f + 1.0f) * 0.125f;
#else
  uint bits = short_at(b, 48) >> 12 | (short_at(b, 50) >> 12) << 4 | (short_at(b, 52) >> 12) << 8 |
              (short_at(b, 54) >> 12) << 12;
  for (int part = 0; part < 2; part++) {
    int j = 2 * c + part;
    s[part] = half_bits(bits) * ((float)((short_at(b, 48 + 2 * (j / 4)) >> (3 * (j % 4))) & 7u) * 2.0f + 1.0f) * 0.125f;
  }
#endif
  for (int r = 0; r < 4; r++) {
    int n = 4 * c + r;
#if defined(FORMAT_IQ1_S)
    int point = 2 * (int)(b[n] | ((packed >> (3 * r)) & 7u) << 8);
    uint down = packed >> 15;
#else
    uint high = ((uint)b[32 + n / 2] >> (4 * (n & 1))) & 15u;
    int point = 2 * (int)(b[n] | (high & 7u) << 8);
    uint down = high >> 3;
#endif
    uint shift = down ? 0u : 0x02020202u;
    q[2 * r] = (int)((points[point] + shift - 0x01010101u) ^ 0x80808080u);
    q[2 * r + 1] = (int)((points[point + 1] + shift - 0x01010101u) ^ 0x80808080u);
  }
#endif
#if HALVES == 1
  s[1] = s[0];
  m[1] = m[0];
#endif
}

// Unpacks chunk c of row `row` of a matrix of `rows` rows that starts at `w`. All bodies come first, then all heads.
DEVICE void unpack_chunk(SHAPE_PARAMETER GLOBAL const uchar *w, size_t rows, size_t row, int c, int *q, float *s, float *m) {
  size_t block = row * (K / BLOCK_VALUES) + c / (BLOCK_VALUES / 32);
  GLOBAL const uchar *heads = w + rows * (K / BLOCK_VALUES) * BODY;
  unpack(w + block * BODY, heads + block * HEAD_BYTES, c % (BLOCK_VALUES / 32), q, s, m);
}
