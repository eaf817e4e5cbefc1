// The contents of the paged cache (format: backends.cache, layout: backends.gpu.cachetypes): values in words, units of
// several values that are read together, and the Hadamard rotation. Constants: KV_HEADS, BLOCK_TOKENS (positions of a
// block), BLOCK_ROWS (rows of a block: one per position, or one per pool of EVERY positions), HEAD and VALUE_HEAD
// (dimensions of keys and of values), and for both keys and values the TYPE, the SIZE of a head with padding, the WORDS
// of a position, the BYTES of a head's block, and the factor of the ROTATION. With KEY_ROWS, keys are stored like
// values, one row per position.

#define F32_CACHE 0
#define F16_CACHE 1
#define BF16_CACHE 2
#define FP8_CACHE 3
#define Q8_0_CACHE 4
#define Q5_1_CACHE 5
#define Q5_0_CACHE 6
#define Q4_1_CACHE 7
#define Q4_0_CACHE 8
#define IN_BLOCKS(type) ((type) >= Q8_0_CACHE)
#define IS_ROTATED(type) ((type) >= Q5_1_CACHE)
#define HAS_MINIMUM(type) ((type) == Q5_1_CACHE || (type) == Q4_1_CACHE)
#define HAS_FIFTH(type) ((type) == Q5_1_CACHE || (type) == Q5_0_CACHE)
#define ZERO_OF(type) ((type) == Q5_0_CACHE ? 16 : (type) == Q4_0_CACHE ? 8 : 0)
#define GROUP_WORDS(type) ((type) == Q8_0_CACHE ? 8 : 4 + HAS_MINIMUM(type) + HAS_FIFTH(type))
#define UNIT_VALUES(type) ((type) == F32_CACHE ? 1 : (type) <= BF16_CACHE ? 2 : (type) <= Q8_0_CACHE ? 4 : 8)

// The 32 integers of a group at a position, as 8 words of four int8. Neighbouring words of the group are `stride`
// apart.
DEVICE void group_integers(int type, GLOBAL const uint *of, int stride, int *q) {
  if (type == Q8_0_CACHE) {
    for (int i = 0; i < 8; i++) q[i] = (int)of[i * stride];
    return;
  }
  int at = HAS_MINIMUM(type);
  uint fifth = 0;
  if (HAS_FIFTH(type)) fifth = of[at++ * stride];
  for (int i = 0; i < 4; i++) {
    uint w = of[(at + i) * stride];
    q[i] = less(nibbles(w, 0) | spread(fifth >> (4 * i)) << 4, ZERO_OF(type));
    q[i + 4] = less(nibbles(w, 1) | spread(fifth >> (16 + 4 * i)) << 4, ZERO_OF(type));
  }
}

DEVICE float group_scale(int type, GLOBAL const uint *of, GLOBAL const ushort *scale, float *minimum) {
  *minimum = 0.0f;
  if (!HAS_MINIMUM(type)) return half_at((GLOBAL const uchar *)scale);
  uint both = of[0];
  *minimum = half_bits(both >> 16);
  return half_bits(both & 0xFFFFu);
}

// The values in a word of a float type.
DEVICE void word_values(int type, uint w, float *v) {
  if (type == F32_CACHE) {
    v[0] = AS_FLOAT((int)w);
  } else if (type == F16_CACHE) {
    v[0] = half_bits(w & 0xFFFFu);
    v[1] = half_bits(w >> 16);
  } else if (type == BF16_CACHE) {
    v[0] = AS_FLOAT((int)(w << 16));
    v[1] = AS_FLOAT((int)(w & 0xFFFF0000u));
  } else if (type == FP8_CACHE) {  // converted through halves, whose exponent bias is larger by 8
    for (int n = 0; n < 4; n++) {
      uint bits = w >> (8 * n);
      v[n] = half_bits((bits & 0x80u) << 8 | (bits & 0x7Fu) << 7) * 256.0f;
    }
  }
}

// The UNIT_VALUES values of a unit at a position: of one word, or, for block formats, of the four low and four high
// nibbles of its bytes.
DEVICE void unit_values(int type, GLOBAL const uint *words, int stride, GLOBAL const ushort *scales, int scale_stride,
                        int unit, float *v) {
  if (!IN_BLOCKS(type)) {
    word_values(type, words[unit * stride], v);
    return;
  }
  int units = 32 / UNIT_VALUES(type), group = unit / units, i = unit % units, at = HAS_MINIMUM(type) + HAS_FIFTH(type);
  GLOBAL const uint *of = words + group * GROUP_WORDS(type) * stride;
  float minimum, scale = group_scale(type, of, scales + group * scale_stride, &minimum);
  uint w = of[(at + i) * stride];
  if (type == Q8_0_CACHE) {
    for (int n = 0; n < 4; n++) v[n] = scale * (float)byte_of((int)w, n);
    return;
  }
  uint fifth = HAS_FIFTH(type) ? of[(at - 1) * stride] : 0;
  int low = less(nibbles(w, 0) | spread(fifth >> (4 * i)) << 4, ZERO_OF(type));
  int high = less(nibbles(w, 1) | spread(fifth >> (16 + 4 * i)) << 4, ZERO_OF(type));
  for (int n = 0; n < 4; n++) {
    v[n] = scale * (float)byte_of(low, n);
    v[n + 4] = scale * (float)byte_of(high, n);
    if (HAS_MINIMUM(type)) {
      v[n] = v[n] + minimum;
      v[n + 4] = v[n + 4] + minimum;
    }
  }
}

// The dimension within the head of value n of a unit.
DEVICE int unit_dimension(int type, int unit, int n) {
  if (!IS_ROTATED(type)) return unit * UNIT_VALUES(type) + n;
  return unit / 4 * 32 + unit % 4 * 4 + n + (n < 4 ? 0 : 12);
}

// Rotates `count` heads of `width` values, `stride` apart, if the type uses rotation: butterflies, then a
// multiplication by `factor`, which is 1 / sqrt(values in one rotation). The barriers are outside of branches, because
// PoCL would duplicate the rest of the kernel.
DEVICE void hadamard(int type, int width, float factor, LOCAL float *x, int count, int stride) {
  int size = IS_ROTATED(type) ? width & -width : 1;
  for (int span = 1; span < size; span <<= 1) {
    BARRIER();
    for (int i = ITEM; i < count * (width / 2); i += 128) {
      int n = i % (width / 2), a = i / (width / 2) * stride + 2 * n - (n & (span - 1));
      float u = x[a], w = x[a + span];
      x[a] = u + w;
      x[a + span] = u - w;
    }
  }
  BARRIER();
  if (IS_ROTATED(type))
    for (int i = ITEM; i < count * width; i += 128) x[i / width * stride + i % width] *= factor;
  BARRIER();
}

#ifdef APPEND
DEVICE float within(float x, float largest) {  // NaN becomes `largest`: otherwise it would corrupt every later row
  x = x < largest ? x : largest;
  return x > -largest ? x : -largest;
}

DEVICE float reciprocal(float d) {
  float r = 1.0f / d;
  return r <= -LOWEST && r >= LOWEST ? r : 0.0f;
}

DEVICE uint fp8_of(float x) {
  uint bits = (uint)AS_INT(x), size = bits & 0x7FFFFFFFu;
  uint normal = ((size + 0x7FFFFu + ((size >> 20) & 1u)) >> 20) - 960u;
  uint small = (uint)(AS_INT(AS_FLOAT((int)size) + 16384.0f) - AS_INT(16384.0f));  // from 2^14 on: multiples of 2^-9
  return (AS_FLOAT((int)size) < 0.015625f ? small : normal) | ((bits >> 24) & 0x80u);
}

// Quantizes one of a group of 32 values, one per work-item of a segment; also returns the group's scale and minimum.
DEVICE int quantized(int type, float x, float *scale, float *minimum, LOCAL float *s) {
  float size = x < 0.0f ? -x : x, largest = max32(size, s), most = max32(x, s), least = -max32(-x, s), d;
  uint first = umax32(size == largest ? (uint)(31 - (ITEM & 31)) << 1 | (x < 0.0f) : 0, s);
  *minimum = 0.0f;
  if (type == Q8_0_CACHE) {
    *scale = d = largest / 127.0f;
    float y = x * reciprocal(d);
    return (int)(y + (y < 0.0f ? -0.49999997f : 0.49999997f));
  }
  if (HAS_MINIMUM(type)) {
    float top = HAS_FIFTH(type) ? 31.0f : 15.0f;
    *minimum = least;
    *scale = d = (most - least) / top;
    return (int)FMIN((x - least) * reciprocal(d) + 0.5f, top);
  }
  // The first value with the largest magnitude becomes the lowest integer.
  float zero = (float)ZERO_OF(type);
  *scale = d = ((first & 1u) && largest > 0.0f ? -largest : largest) / -zero;
  return (int)FMIN(x * reciprocal(d) + (zero + 0.5f), 2.0f * zero - 1.0f);
}

// Word `w` of a group, packed from its 32 integers, which are stored as ints. The word of scale and minimum is
// separate.
DEVICE uint packed(int type, LOCAL const int *q, int w) {
  uint word = 0;
  if (type == Q8_0_CACHE) {
    for (int i = 0; i < 4; i++) word |= ((uint)q[4 * w + i] & 255u) << (8 * i);
    return word;
  }
  int at = HAS_MINIMUM(type) + HAS_FIFTH(type);
  if (w < at) {
    for (int i = 0; i < 32; i++) word |= (uint)(q[i] >> 4) << i;
    return word;
  }
  for (int i = 0; i < 4; i++) {
    int low = q[4 * (w - at) + i] & 15, high = q[4 * (w - at) + i + 16] & 15;
    word |= (uint)(low | high << 4) << (8 * i);
  }
  return word;
}

// A work-group stores one head of a row: first its keys, then its values. With ROTATED, RoPE is first applied to the
// keys, and additional work-groups apply it to the heads of the queries. With NORMED, both are normalized before, in
// the order of norm_rows.
#if ROTATED
#define ROTATED_ARGUMENTS , GLOBAL const float *q, GLOBAL const float *key_table, GLOBAL const float *query_table, \
  GLOBAL const float *key_weight, GLOBAL const float *query_weight, GLOBAL float *queries
#else
#define ROTATED_ARGUMENTS
#endif
#if NORMED
#define NUMBER(d) (in[d] * factor * weight[d])
#else
#define NUMBER(d) in[d]
#endif
KERNEL(128, append)(SHAPE_PARAMETER GLOBAL const float *k, GLOBAL const float *v, GLOBAL const int *step, GLOBAL uchar *keys,
                    GLOBAL uchar *values ROTATED_ARGUMENTS LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL float *s = local_memory, *x = s + 128;
  int second = GROUP_X >= KV_HEADS, own = GROUP_X % KV_HEADS, slot = SLOTS_OF(step)[GROUP_Y];
  int position = slot % BLOCK_TOKENS / EVERY % BLOCK_ROWS, ends = (POSITIONS_OF(step)[GROUP_Y] + 1) % EVERY == 0;
  int width = second ? VALUE_HEAD : HEAD;
  GLOBAL const float *in = (second ? v : k) + ((size_t)GROUP_Y * KV_HEADS + own) * width;
#if ROTATED
  int query = GROUP_X - 2 * KV_HEADS;
  size_t of_query = (size_t)GROUP_Y * Q_STRIDE + query * HEAD;
  if (query >= 0) in = q + of_query;
#if NORMED
  GLOBAL const float *weight = query >= 0 ? query_weight : key_weight;
  float square = 0.0f;
  for (int i = ITEM; i < HEAD; i += 128) square = FMA(in[i], in[i], square);
  float factor = 1.0f / SQRT(group_sum(square, s, 128) / (float)HEAD + EPS);
#endif
  for (int d = ITEM; query >= 0 && d < HEAD; d += 128)
    queries[of_query + d] = rotated(SHAPE NUMBER(d), NUMBER(partner(SHAPE d)), d, step, query_table, GROUP_Y);
#else
  int query = -1;
#endif
  int type = second ? VALUE_TYPE : KEY_TYPE, size = second ? VALUE_SIZE : KEY_SIZE, words = second ? VALUE_WORDS : KEY_WORDS;
  if (query >= 0 || !ends) type = F16_CACHE, size = words = 0;  // nothing to store, but all must reach the barriers
  int by_rows = second || KEY_ROWS, stride = by_rows ? 1 : BLOCK_ROWS, groups = size / 32;
  size_t head = (size_t)(slot / BLOCK_TOKENS) * KV_HEADS + own;
  GLOBAL uchar *to = second ? values + head * VALUE_BYTES : keys + head * KEY_BYTES;
  GLOBAL uint *out = (GLOBAL uint *)to + (by_rows ? position * words : position);
  GLOBAL ushort *scales = (GLOBAL ushort *)(to + 4 * BLOCK_ROWS * words) + (by_rows ? position * groups : position);
  float largest = type == F32_CACHE ? 3.40282347e38f : type == BF16_CACHE ? 3.38953139e38f : type == FP8_CACHE ? 448.0f : 65504.0f;
  for (int i = ITEM; i < size; i += 128) {
    float number = i < width ? in[i] : 0.0f;
#if ROTATED
    if (!second && i < HEAD) number = rotated(SHAPE NUMBER(i), NUMBER(partner(SHAPE i)), i, step, key_table, GROUP_Y);
#endif
    x[i] = within(number, largest);
  }
  hadamard(type, width, second ? VALUE_ROTATION : KEY_ROTATION, x, 1, width);
  for (int i = ITEM; i < smaller(width, size); i += 128) x[i] = within(x[i], largest);
  BARRIER();
  if (!IN_BLOCKS(type)) {
    groups = 0;
    for (int w = ITEM; w < words; w += 128) {
      if (type == F16_CACHE) {
        store_half(x[2 * w], (GLOBAL ushort *)(out + w * stride));
        store_half(x[2 * w + 1], (GLOBAL ushort *)(out + w * stride) + 1);
        continue;
      }
      uint word = 0;
      if (type == F32_CACHE)
        word = (uint)AS_INT(x[w]);
      else if (type == FP8_CACHE)
        for (int n = 0; n < 4; n++) word |= fp8_of(x[4 * w + n]) << (8 * n);
      else
        for (int n = 0; n < 2; n++) {
          uint bits = (uint)AS_INT(x[2 * w + n]);
          word |= ((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16) << (16 * n);
        }
      out[w * stride] = word;
    }
  }
  for (int base = 0; base < groups; base += 4) {
    int group = base + (ITEM >> 5), at = 32 * group + (ITEM & 31);
    float scale, minimum;
    int q = quantized(type, group < groups ? x[at] : 0.0f, &scale, &minimum, s);
    if (group < groups) {
      ((LOCAL int *)x)[at] = q;
      if ((ITEM & 31) == 0) {
        GLOBAL ushort *first = (GLOBAL ushort *)(out + group * GROUP_WORDS(type) * stride);
        store_half(scale, HAS_MINIMUM(type) ? first : scales + group * stride);
        if (HAS_MINIMUM(type)) store_half(minimum, first + 1);
      }
    }
  }
  BARRIER();
  for (int i = ITEM; groups && i < words; i += 128) {
    int group = i / GROUP_WORDS(type), w = i % GROUP_WORDS(type);
    if (w >= HAS_MINIMUM(type)) out[i * stride] = packed(type, (LOCAL const int *)x + 32 * group, w);
  }
}
#endif

#ifdef PREPARE
// Prepares a query head for keys in block formats: rotates it if the keys are rotated, and quantizes it to int8,
// followed by the scales of 32 values, and their sums times scale. A work-group handles one head of a row.
KERNEL(128, prepare_queries)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL float *s = local_memory, *x = s + 128;
  int groups = KEY_SIZE / 32;
  q += (size_t)GROUP_Y * Q_STRIDE + GROUP_X * HEAD;
  y += ((size_t)GROUP_Y * HEADS + GROUP_X) * (KEY_SIZE / 4 + 2 * groups);
  for (int i = ITEM; i < KEY_SIZE; i += 128) x[i] = i < HEAD ? q[i] : 0.0f;
  hadamard(KEY_TYPE, HEAD, KEY_ROTATION, x, 1, HEAD);
  for (int base = 0; base < groups; base += 4) {
    int group = base + (ITEM >> 5), at = 32 * group + (ITEM & 31);
    float scale, integer = (float)signed_byte(group < groups ? x[at] : 0.0f, &scale, s), sum = sum32(integer, s);
    if (group < groups) {
      ((GLOBAL i8 *)y)[at] = (i8)(int)integer;
      if ((ITEM & 31) == 0) {
        y[KEY_SIZE / 4 + group] = scale;
        y[KEY_SIZE / 4 + groups + group] = scale * sum;
      }
    }
  }
}
#endif
