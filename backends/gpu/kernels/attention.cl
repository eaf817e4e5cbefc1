// Attention over the paged cache. Constants: HEADS, KV_HEADS, HEAD, Q_STRIDE, FACTOR, WINDOW (0: none), SOFTCAP (0:
// none), SINKS, BLOCK_TOKENS, PARTITION, GROUPED (query heads of a work-group that share keys and values).

#define GROUP (HEADS / KV_HEADS)
#define GROUP_PARTS ((GROUP + GROUPED - 1) / GROUPED)

DEVICE float shaped(SHAPE_PARAMETER float score) {
  score *= FACTOR;
#if HAS_SOFTCAP
  score = SOFTCAP * hyperbolic_tangent(score / SOFTCAP);
#endif
  return score;
}

DEVICE size_t cache_at(SHAPE_PARAMETER GLOBAL const int *table, int kv_head, int position) {
  return (((size_t)table[position / BLOCK_TOKENS] * KV_HEADS + kv_head) * BLOCK_TOKENS + position % BLOCK_TOKENS) * HEAD;
}

DEVICE int first_seen(SHAPE_PARAMETER int position) { return WINDOW ? larger(0, position + 1 - WINDOW) : 0; }

#ifdef STAGE_attend_partition
// One partition of PARTITION positions of one row, for up to GROUPED query heads of a key-value head. Partitions begin
// at multiples of PARTITION whatever the batch, so a row's numbers do not depend on it. Per (row, head, partition) the
// result is HEAD sums, the largest score and the sum of weights.
KERNEL(128, attend_partition)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const int *step, GLOBAL const int *tables,
                              GLOBAL const ushort *keys, GLOBAL const ushort *values,
                              GLOBAL float *partial LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int row = GROUP_Z, start = GROUP_Y * PARTITION, position = POSITIONS_OF(step)[row];
  int kv_head = GROUP_X / GROUP_PARTS, g0 = GROUP_X % GROUP_PARTS * GROUPED, heads = smaller(GROUPED, GROUP - g0);
  int from = larger(start, first_seen(SHAPE position)), stop = smaller(start + PARTITION, position + 1);
  if (from >= stop) return;
  GLOBAL const int *table = tables + (size_t)SEQUENCE_OF(step)[row] * step[TABLE_STRIDE_AT];
  LOCAL float *own = local_memory, *p = own + GROUPED * HEAD, *s = p + GROUPED * PARTITION;
  int head0 = kv_head * GROUP + g0;
  for (int i = ITEM; i < heads * HEAD; i += 128) own[i] = q[(size_t)row * Q_STRIDE + head0 * HEAD + i];
  BARRIER();
  for (int i = ITEM; i < heads * PARTITION; i += 128) {
    int g = i / PARTITION, at = start + i % PARTITION;
    float score = LOWEST;
    if (at >= from && at < stop) {
      GLOBAL const uchar *k = (GLOBAL const uchar *)(keys + cache_at(SHAPE table, kv_head, at));
      score = 0.0f;
      for (int d = 0; d < HEAD; d++) score = FMA(own[g * HEAD + d], half_at(k + 2 * d), score);
      score = shaped(SHAPE score);
    }
    p[i] = score;
  }
  BARRIER();
  for (int g = 0; g < heads; g++) {
    float largest = LOWEST, sum = 0.0f;
    for (int i = ITEM; i < PARTITION; i += 128) largest = FMAX(largest, p[g * PARTITION + i]);
    largest = group_max(largest, s, 128);
    for (int i = ITEM; i < PARTITION; i += 128) {
      int at = start + i;
      float e = at >= from && at < stop ? exponential(p[g * PARTITION + i] - largest) : 0.0f;
      p[g * PARTITION + i] = e;
      sum += e;
    }
    sum = group_sum(sum, s, 128);
    if (ITEM == 0) {
      GLOBAL float *out = partial + (((size_t)row * HEADS + head0 + g) * PARTITIONS + GROUP_Y) * (HEAD + 2);
      out[HEAD] = largest;
      out[HEAD + 1] = sum;
    }
  }
  BARRIER();
  for (int i = ITEM; i < heads * HEAD; i += 128) {
    int g = i / HEAD, d = i % HEAD;
    float sum = 0.0f;
    for (int at = from; at < stop; at++)
      sum = FMA(p[g * PARTITION + at - start], half_at((GLOBAL const uchar *)(values + cache_at(SHAPE table, kv_head, at) + d)), sum);
    partial[(((size_t)row * HEADS + head0 + g) * PARTITIONS + GROUP_Y) * (HEAD + 2) + d] = sum;
  }
}

#endif

#ifdef STAGE_attend_combine  // the partitions of a row and head in order
KERNEL(64, attend_combine)(SHAPE_PARAMETER GLOBAL const float *partial, GLOBAL const int *step, GLOBAL const float *sinks,
                           GLOBAL float *y) {
  int head = GROUP_X, row = GROUP_Y, position = POSITIONS_OF(step)[row];
  GLOBAL const float *in = partial + ((size_t)row * HEADS + head) * PARTITIONS * (HEAD + 2);
  int from = first_seen(SHAPE position) / PARTITION, stop = position / PARTITION + 1;
  float largest = LOWEST, weight = 0.0f;
#if HAS_SINKS
  largest = sinks[head];
#endif
  for (int i = from; i < stop; i++) largest = FMAX(largest, in[i * (HEAD + 2) + HEAD]);
#if HAS_SINKS
  weight = exponential(sinks[head] - largest);
#endif
  for (int i = from; i < stop; i++)
    weight = FMA(exponential(in[i * (HEAD + 2) + HEAD] - largest), in[i * (HEAD + 2) + HEAD + 1], weight);
  for (int d = ITEM; d < HEAD; d += 64) {
    float sum = 0.0f;
    for (int i = from; i < stop; i++)
      sum = FMA(exponential(in[i * (HEAD + 2) + HEAD] - largest), in[i * (HEAD + 2) + d], sum);
    y[(size_t)row * Q_STRIDE + head * HEAD + d] = sum / weight;
  }
}
#endif

#ifdef STAGE_attend_tile
// A tile of up to TILE_ROWS rows of one sequence, one head: online softmax over tiles of TILE_KEYS positions. A work-item
// has OWN dimensions of the result.
KERNEL(128, attend_tile)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const int *step, GLOBAL const int *tables,
                         GLOBAL const ushort *keys, GLOBAL const ushort *values, GLOBAL const float *sinks,
                         GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int head = GROUP_X, kv_head = head / GROUP;
  int row0 = TILES_OF(step)[2 * GROUP_Y], rows = TILES_OF(step)[2 * GROUP_Y + 1];
  GLOBAL const int *position = POSITIONS_OF(step) + row0;
  GLOBAL const int *table = tables + (size_t)SEQUENCE_OF(step)[row0] * step[TABLE_STRIDE_AT];
  LOCAL float *ql = local_memory, *kl = ql + TILE_ROWS * HEAD, *p = kl + TILE_KEYS * (HEAD + 1);
  LOCAL float *largest = p + TILE_ROWS * (TILE_KEYS + 1), *weight = largest + TILE_ROWS, *fade = weight + TILE_ROWS;
  float sum[TILE_ROWS][OWN];
  for (int r = 0; r < TILE_ROWS; r++)
    for (int i = 0; i < OWN; i++) sum[r][i] = 0.0f;
  for (int i = ITEM; i < rows * HEAD; i += 128)
    ql[i] = q[(size_t)(row0 + i / HEAD) * Q_STRIDE + head * HEAD + i % HEAD];
  if (ITEM < TILE_ROWS) {
    largest[ITEM] = LOWEST;
    weight[ITEM] = 0.0f;
#if HAS_SINKS
    largest[ITEM] = sinks[head];
    weight[ITEM] = 1.0f;
#endif
  }
  int last = position[rows - 1];
  for (int k0 = first_seen(SHAPE position[0]) / TILE_KEYS * TILE_KEYS; k0 <= last; k0 += TILE_KEYS) {
    int count = smaller(TILE_KEYS, last + 1 - k0);
    for (int i = ITEM; i < count * HEAD; i += 128) {
      int j = i / HEAD, d = i % HEAD;
      kl[j * (HEAD + 1) + d] = half_at((GLOBAL const uchar *)(keys + cache_at(SHAPE table, kv_head, k0 + j) + d));
    }
    BARRIER();
    int j = ITEM % TILE_KEYS;
    for (int r = ITEM / TILE_KEYS; r < rows; r += 128 / TILE_KEYS) {
      int at = k0 + j, seen = j < count && at <= position[r] && at >= first_seen(SHAPE position[r]);
      float score = 0.0f;
      if (seen)
        for (int d = 0; d < HEAD; d++) score = FMA(ql[r * HEAD + d], kl[j * (HEAD + 1) + d], score);
      p[r * (TILE_KEYS + 1) + j] = seen ? shaped(SHAPE score) : -1.0f / 0.0f;
    }
    BARRIER();
    if (ITEM < rows) {
      LOCAL float *own = p + ITEM * (TILE_KEYS + 1);
      float before = largest[ITEM], now = before, all = 0.0f;
      for (int i = 0; i < TILE_KEYS; i++) now = FMAX(now, own[i]);
      for (int i = 0; i < TILE_KEYS; i++) {
        own[i] = own[i] == -1.0f / 0.0f ? 0.0f : exponential(own[i] - now);
        all += own[i];
      }
      fade[ITEM] = exponential(before - now);
      weight[ITEM] = FMA(weight[ITEM], fade[ITEM], all);
      largest[ITEM] = now;
    }
    BARRIER();
    for (int i = 0; i < OWN; i++) {
      int d = ITEM + 128 * i;
      if (d < HEAD) {
        for (int r = 0; r < rows; r++) sum[r][i] *= fade[r];
        for (int j = 0; j < count; j++) {
          float v = half_at((GLOBAL const uchar *)(values + cache_at(SHAPE table, kv_head, k0 + j) + d));
          for (int r = 0; r < TILE_ROWS; r++)
            if (r < rows) sum[r][i] = FMA(p[r * (TILE_KEYS + 1) + j], v, sum[r][i]);
        }
      }
    }
    BARRIER();
  }
  for (int i = 0; i < OWN; i++) {
    int d = ITEM + 128 * i;
    if (d < HEAD)
      for (int r = 0; r < rows; r++) y[(size_t)(row0 + r) * Q_STRIDE + head * HEAD + d] = sum[r][i] / weight[r];
  }
}
#endif
