// The indexer of top-k attention: scores the positions that a row may attend to, and selects the best. Constants, in
// addition to the cache's: HEADS, Q_STRIDE, WEIGHTED, COUNT (selected blocks) of BLOCK positions each, LOCAL_BLOCKS,
// POSITIONS (room for scores), GROUPED (heads that share a key), POOLED (blocks have one key, at their end). Each row
// and group has POSITIONS scores, and the same number of integers in the order of the scores.

#define MOST (COUNT * BLOCK + (POOLED ? BLOCK - 1 : 0))
#define GROUPS (WEIGHTED ? 1 : HEADS)
#define INDEX_QUERY_WORDS (KEY_SIZE / 4 + 2 * (KEY_SIZE / 32))
#ifdef GENERIC
#define UNIT_MOST 8
#else
#define UNIT_MOST UNIT_VALUES(KEY_TYPE)
#endif

#ifdef STAGE_index_scores
// A work-item handles a position, or a pool if the cache holds only keys of pools. Sums run over the dimensions of a
// key, then over the heads.
KERNEL(128, index_scores)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const float *weights, GLOBAL const int *step,
                          GLOBAL const int *tables, GLOBAL const uchar *keys, GLOBAL float *scores LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL float *own = local_memory;
  int row = GROUP_Y, position = POSITIONS_OF(step)[row], mine = GROUP_X * 128 + ITEM;
  int count = (position + 1) / EVERY, seen = mine < count;
  if (GROUP_X * 128 >= count || position < MOST) return;
  int at = seen ? mine : 0, units = KEY_SIZE / UNIT_VALUES(KEY_TYPE);
  GLOBAL const int *table = tables + (size_t)SEQUENCE_OF(step)[row] * step[2];
  GLOBAL const uchar *of = keys + (size_t)table[at * EVERY / BLOCK_TOKENS] * KEY_BYTES;
  GLOBAL const uint *words = (GLOBAL const uint *)of + at % BLOCK_ROWS;
  GLOBAL const ushort *scales = (GLOBAL const ushort *)(of + 4 * BLOCK_ROWS * KEY_WORDS) + at % BLOCK_ROWS;
  GLOBAL float *out = scores + (size_t)row * GROUPS * 2 * POSITIONS + mine;
  float total = 0.0f;
  for (int first = 0; first < HEADS; first += GROUPED) {
    BARRIER();
    for (int i = ITEM; i < GROUPED * KEY_SIZE; i += 128) {
      int head = first + i / KEY_SIZE, d = i % KEY_SIZE;
      float x = 0.0f;
      if (head < HEADS && IN_BLOCKS(KEY_TYPE)) {
        GLOBAL const float *prepared = q + ((size_t)row * HEADS + head) * INDEX_QUERY_WORDS;
        x = (float)((GLOBAL const i8 *)prepared)[d] * prepared[KEY_SIZE / 4 + d / 32];
      } else if (head < HEADS && d < HEAD)
        x = q[(size_t)row * Q_STRIDE + head * HEAD + d];
      own[i] = x;
    }
    BARRIER();
    float score[GROUPED];
    for (int g = 0; g < GROUPED; g++) score[g] = 0.0f;
    for (int u = 0; u < units; u++) {
      float v[UNIT_MOST];
      unit_values(KEY_TYPE, words, BLOCK_ROWS, scales, BLOCK_ROWS, u, v);
      for (int n = 0; n < UNIT_VALUES(KEY_TYPE); n++) {
        int d = unit_dimension(KEY_TYPE, u, n);
        for (int g = 0; g < GROUPED; g++) score[g] = FMA(own[g * KEY_SIZE + d], v[n], score[g]);
      }
    }
    for (int g = 0; g < GROUPED; g++)
      if (first + g < HEADS) {
        if (WEIGHTED)
          total = FMA(relu(score[g]), weights[(size_t)row * HEADS + first + g], total);
        else if (seen)
          out[(size_t)(first + g) * 2 * POSITIONS] = score[g];
      }
  }
  if (WEIGHTED && seen) out[0] = total;
}
#endif

#ifdef STAGE_select_positions
// A work-group handles a row and group. A binary search over integers finds the lowest selected integer. Of equal
// integers the first are selected.
KERNEL(128, select_positions)(SHAPE_PARAMETER GLOBAL const int *step, GLOBAL float *scores, GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL float *s = local_memory;
  LOCAL int *above = (LOCAL int *)(s + 128), *equal = above + 128;
  int group = GROUP_X, row = GROUP_Y, seen = POSITIONS_OF(step)[row] + 1;
  GLOBAL const float *of = scores + ((size_t)row * GROUPS + group) * 2 * POSITIONS;
  GLOBAL int *order = (GLOBAL int *)of + POSITIONS;
  GLOBAL float *out = y + ((size_t)row * GROUPS + group) * (1 + MOST);
  if (seen <= MOST) {
    for (int i = ITEM; i < MOST; i += 128) out[1 + i] = i < seen ? (float)i : 0.0f;
    if (ITEM == 0) out[0] = (float)seen;
    return;
  }
  int units = (seen + (POOLED ? 0 : BLOCK - 1)) / BLOCK;
  for (int u = ITEM; u < units; u += 128) {
    float best = of[EVERY > 1 ? u : u * BLOCK + (POOLED ? BLOCK - 1 : 0)];
    for (int i = u * BLOCK + 1; !POOLED && i < smaller((u + 1) * BLOCK, seen); i++) best = of[i] > best ? of[i] : best;
    int bits = AS_INT(best + 0.0f);
    order[u] = u >= units - LOCAL_BLOCKS ? 0x7FFFFFFF : bits ^ (bits < 0 ? 0x7FFFFFFF : 0);
  }
  SHARED_BARRIER();
  uint least = 0x80000000u;
  for (uint bit = 0x80000000u; bit; bit >>= 1) {
    int higher = (int)(least + bit);
    float count = 0.0f;
    for (int u = ITEM; u < units; u += 128) count += order[u] >= higher ? 1.0f : 0.0f;
    if (group_sum(count, s, 128) >= (float)COUNT) least = (uint)higher;
  }
  int lowest = (int)least, each = (units + 127) / 128, first = smaller(ITEM * each, units), last = smaller(first + each, units);
  int higher = 0, same = 0;
  for (int u = first; u < last; u++) {
    higher += order[u] > lowest;
    same += order[u] == lowest;
  }
  above[ITEM] = higher;
  equal[ITEM] = same;
  BARRIER();
  int all = 0, ties = COUNT, all_equal = 0, equals = 0;
  for (int i = 0; i < 128; i++) {
    if (i < ITEM) all += above[i], equals += equal[i];
    ties -= above[i];
    all_equal += equal[i];
  }
  int place = all + smaller(equals, ties);
  for (int u = first; u < last; u++) {
    int chosen = order[u] > lowest || (order[u] == lowest && equals < ties);
    equals += order[u] == lowest;
    for (int i = 0; chosen && i < BLOCK && u * BLOCK + i < seen; i++) out[1 + place * BLOCK + i] = (float)(u * BLOCK + i);
    place += chosen;
  }
  int end = order[units - 1] > lowest || (order[units - 1] == lowest && all_equal <= ties);  // last may be short
  int count = COUNT * BLOCK - (end && !POOLED ? units * BLOCK - seen : 0);
  if (POOLED) {  // also select the positions after the last block
    count += seen - units * BLOCK;
    for (int i = units * BLOCK + ITEM; i < seen; i += 128) out[1 + COUNT * BLOCK + i - units * BLOCK] = (float)i;
  }
  for (int i = count + ITEM; i < MOST; i += 128) out[1 + i] = 0.0f;
  if (ITEM == 0) out[0] = (float)count;
}
#endif
