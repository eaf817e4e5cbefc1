// Attention to listed rows of the cache; follows attention.cl. Constants, in addition to that file's: SELECTED (maximum
// number of positions in a slice of a selection, 0: no selection), SLICES (1, or one per KV head), POOL (positions per
// pool, 0: no pools); for the layer with pools POOL_ROWS (of a block), POOL_KEY_BYTES and POOL_VALUE_BYTES (of a head).
// A slice of a row's selection is a count, then positions in order. With ONCE a value is the first dimensions of its
// key. With pools, the rows of the sliding window come first, then the rows of the selected pools, or of all pools.

#define POOL_SIZE larger(POOL, 1)
#define ROW_WORDS (ONCE ? KEY_WORDS : VALUE_WORDS)  // words from one value to the next
#define ROW_GROUPS ((ONCE ? KEY_SIZE : VALUE_SIZE) / 32)

// The number of cache rows for a query at `position`; `near` of them are in its sliding window.
DEVICE int listed_count(SHAPE_PARAMETER GLOBAL const float *list, int position, int near) {
  if (!POOL) return (int)list[0];
  return near + (SELECTED ? (int)list[0] : position + 1) / POOL_SIZE;
}

// The position of listed cache row j; for a pool, its last position.
DEVICE int listed_position(SHAPE_PARAMETER GLOBAL const float *list, int j, int position, int near) {
  if (!POOL) return (int)list[1 + j];
  if (j < near) return position + 1 - near + j;
  int end = (j - near + 1) * POOL_SIZE - 1;
  return SELECTED ? (int)list[1 + end] : end;
}

// One row and up to GROUPED query heads of a KV head: online softmax over 128 listed cache rows at a time. A work-item
// handles one listed row for the scores, then units of the values, whose sums run over the positions in order.
KERNEL(128, attend_selected)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const int *step, GLOBAL const int *tables,
                             GLOBAL const uchar *keys, GLOBAL const uchar *values, GLOBAL const int *pool_tables,
                             GLOBAL const uchar *pool_keys, GLOBAL const uchar *pool_values, GLOBAL const float *sinks,
                             GLOBAL const float *selection, GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int row = GROUP_Y, kv_head = GROUP_X / GROUP_PARTS, g0 = GROUP_X % GROUP_PARTS * GROUPED;
  int heads = smaller(GROUPED, GROUP - g0), head0 = kv_head * GROUP + g0, units = KEY_SIZE / UNIT_VALUES(KEY_TYPE);
  GLOBAL const int *table = tables + (size_t)SEQUENCE_OF(step)[row] * step[TABLE_STRIDE_AT];
  GLOBAL const int *pool_table = pool_tables + (size_t)SEQUENCE_OF(step)[row] * step[2];
  int position = POSITIONS_OF(step)[row], near = POOL ? smaller(position + 1, WINDOW) : 0;
  GLOBAL const float *list = selection + ((size_t)row * SLICES + (SLICES > 1 ? kv_head : 0)) * (1 + SELECTED);
  LOCAL float *s = local_memory, *ql = s + 128, *p = ql + GROUPED * KEY_SIZE, *sum = p + GROUPED * 128;
  LOCAL float *largest = sum + GROUPED * VALUE_SIZE, *weight = largest + GROUPED, *fade = weight + GROUPED;
  for (int i = ITEM; i < GROUPED * KEY_SIZE; i += 128) {
    int g = i / KEY_SIZE, d = i % KEY_SIZE;
    float x = 0.0f;
    if (g < heads && IN_BLOCKS(KEY_TYPE)) {
      GLOBAL const float *of = q + ((size_t)row * HEADS + head0 + g) * QUERY_WORDS;
      x = (float)((GLOBAL const i8 *)of)[d] * of[KEY_SIZE / 4 + d / 32];
    } else if (g < heads && d < HEAD)
      x = q[(size_t)row * Q_STRIDE + (head0 + g) * HEAD + d];
    ql[i] = x;
  }
  for (int i = ITEM; i < GROUPED * VALUE_SIZE; i += 128) sum[i] = 0.0f;
  if (ITEM < GROUPED) {
    largest[ITEM] = HAS_SINKS ? sinks[head0 + smaller(ITEM, heads - 1)] : LOWEST;
    weight[ITEM] = HAS_SINKS ? 1.0f : 0.0f;
  }
  BARRIER();
  int count = listed_count(SHAPE list, position, near);
  for (int k0 = 0; k0 < count; k0 += 128) {
    int here = smaller(128, count - k0), mine = k0 + smaller(ITEM, here - 1), far = POOL && mine >= near;
    int at = listed_position(SHAPE list, mine, position, near), own = at % BLOCK_TOKENS, rows = far ? POOL_ROWS : BLOCK_TOKENS;
    if (far) own = own / POOL_SIZE % POOL_ROWS;
    GLOBAL const uchar *of = far ? pool_keys : keys;
    of += block_of(SHAPE far ? pool_table : table, kv_head, at) * (far ? POOL_KEY_BYTES : KEY_BYTES);
    GLOBAL const uint *words = (GLOBAL const uint *)of + own * KEY_WORDS;
    GLOBAL const ushort *scales = (GLOBAL const ushort *)(of + 4 * rows * KEY_WORDS) + own * KEY_GROUPS;
    float score[GROUPED];
    for (int g = 0; g < GROUPED; g++) score[g] = 0.0f;
    for (int u = 0; u < units; u++) {
      float v[KEY_UNIT_MOST];
      unit_values(KEY_TYPE, words, 1, scales, 1, u, v);
      for (int n = 0; n < UNIT_VALUES(KEY_TYPE); n++) {
        int d = unit_dimension(KEY_TYPE, u, n);
        for (int g = 0; g < GROUPED; g++) score[g] = FMA(ql[g * KEY_SIZE + d], v[n], score[g]);
      }
    }
    for (int g = 0; g < GROUPED; g++) p[g * 128 + ITEM] = ITEM < here ? shaped(SHAPE score[g], sinks, 0, 0) : LOWEST;
    BARRIER();
    for (int base = 0; base < GROUPED; base += 4) {  // each segment of 32 work-items handles one head
      int g = smaller(base + (ITEM >> 5), GROUPED - 1), mine = base + (ITEM >> 5) < GROUPED;
      float before = largest[g], now = before, all = 0.0f;
      for (int i = ITEM & 31; i < here; i += 32) now = FMAX(now, p[g * 128 + i]);
      now = max32(now, s);
      for (int i = ITEM & 31; i < 128; i += 32)
        if (mine) {
          float e = i < here ? exponential(p[g * 128 + i] - now) : 0.0f;
          p[g * 128 + i] = e;
          all += e;
        }
      all = sum32(all, s);
      if (mine && (ITEM & 31) == 0) {
        fade[g] = exponential(before - now);
        weight[g] = FMA(weight[g], fade[g], all);
        largest[g] = now;
      }
    }
    BARRIER();
    for (int u = ITEM; u < VALUE_UNITS; u += 128) {
      float seen[GROUPED][VALUE_UNIT_MOST];
      for (int g = 0; g < GROUPED; g++)
        for (int n = 0; n < UNIT_VALUES(VALUE_TYPE); n++)
          seen[g][n] = sum[g * VALUE_SIZE + unit_dimension(VALUE_TYPE, u, n)] * fade[g];
      for (int j = 0; j < here; j++) {
        int far = POOL && k0 + j >= near, at = listed_position(SHAPE list, k0 + j, position, near);
        int own = at % BLOCK_TOKENS, rows = far ? POOL_ROWS : BLOCK_TOKENS;
        if (far) own = own / POOL_SIZE % POOL_ROWS;
        GLOBAL const uchar *of = far ? pool_values : values;
        of += block_of(SHAPE far ? pool_table : table, kv_head, at) * (far ? POOL_VALUE_BYTES : VALUE_BYTES);
        float v[VALUE_UNIT_MOST];
        unit_values(VALUE_TYPE, (GLOBAL const uint *)of + own * ROW_WORDS, 1,
                    (GLOBAL const ushort *)(of + 4 * rows * ROW_WORDS) + own * ROW_GROUPS, 1, u, v);
        for (int g = 0; g < GROUPED; g++)
          for (int n = 0; n < UNIT_VALUES(VALUE_TYPE); n++) seen[g][n] = FMA(p[g * 128 + j], v[n], seen[g][n]);
      }
      for (int g = 0; g < GROUPED; g++)
        for (int n = 0; n < UNIT_VALUES(VALUE_TYPE); n++)
          sum[g * VALUE_SIZE + unit_dimension(VALUE_TYPE, u, n)] = seen[g][n];
    }
    BARRIER();
  }
  for (int i = ITEM; i < GROUPED * VALUE_SIZE; i += 128) sum[i] = sum[i] / weight[i / VALUE_SIZE];
  hadamard(VALUE_TYPE, VALUE_HEAD, VALUE_ROTATION, sum, GROUPED, VALUE_SIZE);
  BARRIER();
  for (int i = ITEM; i < heads * VALUE_HEAD; i += 128) {
    int g = i / VALUE_HEAD, d = i % VALUE_HEAD;
    y[(size_t)row * Y_STRIDE + (head0 + g) * VALUE_HEAD + d] = sum[g * VALUE_SIZE + d];
  }
}
