// Attention over the paged cache. Constants, in addition to the cache's: HEADS, Q_STRIDE, FACTOR, WINDOW
// (sliding-window size: positions including the row's own, 0: all; if not CAUSAL, also the same number after it),
// CHUNKED, CAUSAL, SOFTCAP (0: none), HAS_SINKS, AFTER (attend only to positions after the encoder text), SPANS, HAS_SLOPES,
// REACH (largest distance with its own bias, 0: no relative position bias), PARTITION, GROUPED (query heads of a
// work-group that share keys and values, a power of two).

#define GROUP (HEADS / KV_HEADS)
#define Y_STRIDE (HEADS * VALUE_HEAD)
#define STATE (VALUE_HEAD + 2)  // floats per row, head and partition
#define GROUP_PARTS ((GROUP + GROUPED - 1) / GROUPED)
#define KEY_GROUPS (KEY_SIZE / 32)
#define VALUE_UNITS (VALUE_SIZE / UNIT_VALUES(VALUE_TYPE))
// Words of a query head in the output of prepare_queries.
#define QUERY_WORDS (KEY_SIZE / 4 + 2 * KEY_GROUPS)
#ifdef GENERIC
#define KEY_UNIT_MOST 8
#define VALUE_UNIT_MOST 8
#else
#define KEY_UNIT_MOST UNIT_VALUES(KEY_TYPE)
#define VALUE_UNIT_MOST UNIT_VALUES(VALUE_TYPE)
#endif

// `behind`: key position minus query position. `slopes`: one slope per head, or, with REACH, the biases of all
// distances, (HEADS, 2 REACH + 1).
DEVICE float shaped(SHAPE_PARAMETER float score, GLOBAL const float *slopes, int head, int behind) {
  score *= FACTOR;
  if (HAS_SOFTCAP) score = SOFTCAP * hyperbolic_tangent(score / SOFTCAP);
  if (REACH) score += slopes[head * (2 * REACH + 1) + smaller(larger(behind, -REACH), REACH) + REACH];
  if (HAS_SLOPES) score = FMA(slopes[head], (float)(CAUSAL || behind < 0 ? behind : -behind), score);
  return score;
}

// Index of the cache block that holds a KV head's keys and values at a position.
DEVICE size_t block_of(SHAPE_PARAMETER GLOBAL const int *table, int kv_head, int position) {
  return (size_t)table[position / BLOCK_TOKENS] * KV_HEADS + kv_head;
}

DEVICE void value_unit(SHAPE_PARAMETER GLOBAL const uchar *values, size_t block, int position, int unit, float *v) {
  GLOBAL const uchar *at = values + block * VALUE_BYTES;
  int own = position % BLOCK_TOKENS;
  GLOBAL const ushort *scales = (GLOBAL const ushort *)(at + 4 * BLOCK_TOKENS * VALUE_WORDS) + own * (VALUE_SIZE / 32);
  unit_values(VALUE_TYPE, (GLOBAL const uint *)at + own * VALUE_WORDS, 1, scales, 1, unit, v);
}

DEVICE int first_seen(SHAPE_PARAMETER GLOBAL const int *step, int row) {
  int position = POSITIONS_OF(step)[row];
  if (AFTER) return ENDS_OF(step)[row] + 1;
  if (CHUNKED) return position / larger(WINDOW, 1) * WINDOW;
  return WINDOW ? larger(0, position + 1 - WINDOW) : 0;
}

// The last position that a row attends to: its own position, or the last position of its span or of its sequence in the
// batch.
DEVICE int last_seen(SHAPE_PARAMETER GLOBAL const int *step, int row) {
  if (SPANS) return step[step[7] + row];
  int position = POSITIONS_OF(step)[row];
  if (CAUSAL) return position;
  int end = ENDS_OF(step)[row];
  return WINDOW ? smaller(end, position + WINDOW - 1) : end;
}

#ifdef STAGE_attend_partition
// One partition of PARTITION positions of one row, for up to GROUPED query heads of a KV head. Partitions begin at
// multiples of PARTITION in any batch, so a row's result does not depend on the batch. The result per (row, head,
// partition) is VALUE_HEAD sums, the largest score and the sum of weights. A work-item handles two positions for the
// scores, then some dimensions of the values in every LANES-th position.
KERNEL(128, attend_partition)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const int *step, GLOBAL const int *tables,
                              GLOBAL const uchar *keys, GLOBAL const uchar *values, GLOBAL const float *slopes,
                              GLOBAL float *partial LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int row = GROUP_Z, start = GROUP_Y * PARTITION, position = POSITIONS_OF(step)[row];
  int kv_head = GROUP_X / GROUP_PARTS, g0 = GROUP_X % GROUP_PARTS * GROUPED, heads = smaller(GROUPED, GROUP - g0);
  int from = larger(start, first_seen(SHAPE step, row)), stop = smaller(start + PARTITION, last_seen(SHAPE step, row) + 1);
  if (from >= stop) return;
  GLOBAL const int *table = tables + (size_t)SEQUENCE_OF(step)[row] * step[TABLE_STRIDE_AT];
  LOCAL float *s = local_memory, *p = s + 128, *own = p + GROUPED * PARTITION;
  int head0 = kv_head * GROUP + g0, width = IN_BLOCKS(KEY_TYPE) ? QUERY_WORDS : KEY_SIZE;
  for (int i = ITEM; i < GROUPED * width; i += 128) {
    int g = i / width, d = i % width, size = IN_BLOCKS(KEY_TYPE) ? QUERY_WORDS : HEAD;
    own[i] = g < heads && d < size ? q[((size_t)row * HEADS + head0 + g) * size + d] : 0.0f;
  }
  BARRIER();

  float score[2][GROUPED];
  GLOBAL const uint *words[2];
  GLOBAL const ushort *scales[2];
  int any = 0;
  for (int n = 0; n < 2; n++) {
    int at = start + ITEM + 128 * n, seen = at >= from && at < stop;
    any |= seen;
    at = seen ? at : from;
    GLOBAL const uchar *of = keys + block_of(SHAPE table, kv_head, at) * KEY_BYTES;
    words[n] = (GLOBAL const uint *)of + at % BLOCK_TOKENS;
    scales[n] = (GLOBAL const ushort *)(of + 4 * BLOCK_TOKENS * KEY_WORDS) + at % BLOCK_TOKENS;
    for (int g = 0; g < GROUPED; g++) score[n][g] = 0.0f;
  }
  if (any && IN_BLOCKS(KEY_TYPE)) {
    for (int group = 0; group < KEY_GROUPS; group++) {
      int a[8], b[8], at = group * GROUP_WORDS(KEY_TYPE) * BLOCK_TOKENS;
      float low[2], scale[2];
      group_integers(KEY_TYPE, words[0] + at, BLOCK_TOKENS, a);
      group_integers(KEY_TYPE, words[1] + at, BLOCK_TOKENS, b);
      for (int n = 0; n < 2; n++)
        scale[n] = group_scale(KEY_TYPE, words[n] + at, scales[n] + group * BLOCK_TOKENS, &low[n]);
      for (int g = 0; g < GROUPED; g++) {
        LOCAL const float *of = own + g * QUERY_WORDS;
        int first = 0, second = 0;
        for (int i = 0; i < 8; i++) {
          int x = ((LOCAL const int *)of)[8 * group + i];
          first = DOT4(a[i], x, first);
          second = DOT4(b[i], x, second);
        }
        float d = of[KEY_SIZE / 4 + group];
        score[0][g] = FMA(scale[0], d * (float)first, score[0][g]);
        score[1][g] = FMA(scale[1], d * (float)second, score[1][g]);
        if (HAS_MINIMUM(KEY_TYPE)) {
          float sum = of[KEY_SIZE / 4 + KEY_GROUPS + group];
          score[0][g] = FMA(low[0], sum, score[0][g]);
          score[1][g] = FMA(low[1], sum, score[1][g]);
        }
      }
    }
  } else if (any) {
    for (int u = 0; u < KEY_WORDS; u++) {
      float a[KEY_UNIT_MOST], b[KEY_UNIT_MOST];
      word_values(KEY_TYPE, words[0][u * BLOCK_TOKENS], a);
      word_values(KEY_TYPE, words[1][u * BLOCK_TOKENS], b);
      for (int n = 0; n < UNIT_VALUES(KEY_TYPE); n++)
        for (int g = 0; g < GROUPED; g++) {
          float x = own[g * KEY_SIZE + u * UNIT_VALUES(KEY_TYPE) + n];
          score[0][g] = FMA(x, a[n], score[0][g]);
          score[1][g] = FMA(x, b[n], score[1][g]);
        }
    }
  }
  for (int n = 0; n < 2; n++) {
    int at = start + ITEM + 128 * n, seen = at >= from && at < stop;
    for (int g = 0; g < GROUPED; g++) {
      int head = head0 + smaller(g, heads - 1);
      p[g * PARTITION + ITEM + 128 * n] = seen ? shaped(SHAPE score[n][g], slopes, head, at - position) : LOWEST;
    }
  }
  BARRIER();
  for (int base = 0; base < GROUPED; base += 4) {  // each segment of 32 work-items handles one head
    int g = smaller(base + (ITEM >> 5), GROUPED - 1), mine = base + (ITEM >> 5) < heads;
    float largest = LOWEST, sum = 0.0f;
    for (int i = ITEM & 31; i < PARTITION; i += 32) largest = FMAX(largest, p[g * PARTITION + i]);
    largest = max32(largest, s);
    for (int i = ITEM & 31; i < PARTITION; i += 32)
      if (mine) {
        int at = start + i;
        float e = at >= from && at < stop ? exponential(p[g * PARTITION + i] - largest) : 0.0f;
        p[g * PARTITION + i] = e;
        sum += e;
      }
    sum = sum32(sum, s);
    if (mine && (ITEM & 31) == 0) {
      GLOBAL float *out = partial + (((size_t)row * HEADS + head0 + g) * PARTITIONS + GROUP_Y) * STATE;
      out[VALUE_HEAD] = largest;
      out[VALUE_HEAD + 1] = sum;
    }
  }

  int across = smaller(VALUE_UNITS, 128), lanes = smaller(128 / across, 16), lane = ITEM / across;
  for (int first = 0; first < VALUE_UNITS; first += 128) {
    int u = first + ITEM % across, working = lane < lanes && u < VALUE_UNITS;
    float sum[GROUPED][VALUE_UNIT_MOST];
    for (int g = 0; g < GROUPED; g++)
      for (int n = 0; n < VALUE_UNIT_MOST; n++) sum[g][n] = 0.0f;
    BARRIER();
    if (working)
      for (int at = start + lane; at < stop; at += lanes)
        if (at >= from) {
          float v[VALUE_UNIT_MOST];
          value_unit(SHAPE values, block_of(SHAPE table, kv_head, at), at, u, v);
          for (int g = 0; g < GROUPED; g++)
            for (int n = 0; n < UNIT_VALUES(VALUE_TYPE); n++)
              sum[g][n] = FMA(p[g * PARTITION + at - start], v[n], sum[g][n]);
        }
    for (int l = 0; l < lanes; l++) {  // lanes are added in order
      if (working && lane == l)
        for (int g = 0; g < GROUPED; g++)
          for (int n = 0; n < UNIT_VALUES(VALUE_TYPE); n++) {
            LOCAL float *to = own + g * VALUE_SIZE + unit_dimension(VALUE_TYPE, u, n);
            *to = l ? *to + sum[g][n] : sum[g][n];
          }
      BARRIER();
    }
  }
  for (int i = ITEM; i < heads * VALUE_HEAD; i += 128) {
    int g = i / VALUE_HEAD, d = i % VALUE_HEAD;
    partial[(((size_t)row * HEADS + head0 + g) * PARTITIONS + GROUP_Y) * STATE + d] = own[g * VALUE_SIZE + d];
  }
}
#endif

#ifdef STAGE_attend_combine  // combines the partitions of a row and head in order
KERNEL(128, attend_combine)(SHAPE_PARAMETER GLOBAL const float *partial, GLOBAL const int *step, GLOBAL const float *sinks,
                            GLOBAL float *y, GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL float *out = local_memory + 128;
  int head = GROUP_X, row = GROUP_Y;
  GLOBAL const float *in = partial + ((size_t)row * HEADS + head) * PARTITIONS * STATE;
  int from = first_seen(SHAPE step, row) / PARTITION, stop = last_seen(SHAPE step, row) / PARTITION + 1;
  float largest = HAS_SINKS ? sinks[head] : LOWEST, weight = 0.0f;
  for (int i = from; i < stop; i++) largest = FMAX(largest, in[i * STATE + VALUE_HEAD]);
  if (HAS_SINKS) weight = exponential(sinks[head] - largest);
  for (int i = from; i < stop; i++)
    weight = FMA(exponential(in[i * STATE + VALUE_HEAD] - largest), in[i * STATE + VALUE_HEAD + 1], weight);
  for (int d = ITEM; d < VALUE_HEAD; d += 128) {
    float sum = 0.0f;
    for (int i = from; i < stop; i++)
      sum = FMA(exponential(in[i * STATE + VALUE_HEAD] - largest), in[i * STATE + d], sum);
    out[d] = sum / weight;
  }
  hadamard(VALUE_TYPE, VALUE_HEAD, VALUE_ROTATION, out, 1, VALUE_HEAD);
  for (int base = 0; base < VALUE_HEAD; base += 128) {
    int d = base + ITEM, i = d < VALUE_HEAD ? head * VALUE_HEAD + d : Y_STRIDE;  // Y_STRIDE is past the row
    float v = out[smaller(d, VALUE_HEAD - 1)];
    deliver(v, i, Y_STRIDE, y + (size_t)row * Y_STRIDE, blocks + (size_t)row * BLOCKS_STRIDE, local_memory);
  }
}
#endif

#ifdef STAGE_attend_tile
// A tile of up to OWN_ROWS rows of one sequence and one head: online softmax over tiles of TILE_KEYS positions. First
// their keys and then their values are unpacked into local memory. A work-item handles every 8th row and every 16th key
// or dimension.
#define ROWS_EACH (OWN_ROWS / 8)
#define KEYS_EACH ((TILE_KEYS + 15) / 16)
#define SHARES (128 / OWN_ROWS)  // work-items that share a row of the softmax
KERNEL(128, attend_tile)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const int *step, GLOBAL const int *tables,
                         GLOBAL const uchar *keys, GLOBAL const uchar *values, GLOBAL const float *sinks,
                         GLOBAL const float *slopes, GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int head = GROUP_X, kv_head = head / GROUP, tile = GROUP_Y / (TILE_ROWS / OWN_ROWS);
  int part = GROUP_Y % (TILE_ROWS / OWN_ROWS) * OWN_ROWS, tx = ITEM & 15, ty = ITEM >> 4;
  int row0 = TILES_OF(step)[2 * tile] + part, rows = smaller(TILES_OF(step)[2 * tile + 1] - part, OWN_ROWS);
  if (rows <= 0) return;
  GLOBAL const int *position = POSITIONS_OF(step) + row0;
  GLOBAL const int *table = tables + (size_t)SEQUENCE_OF(step)[row0] * step[TABLE_STRIDE_AT];
  int stride = larger(KEY_SIZE, VALUE_SIZE) + 1;  // odd, so that rows use different banks
  LOCAL float *s = local_memory, *ql = s + 128, *kl = ql + OWN_ROWS * stride, *p = kl + TILE_KEYS * stride;
  LOCAL float *largest = p + OWN_ROWS * (TILE_KEYS + 1), *weight = largest + OWN_ROWS, *fade = weight + OWN_ROWS;
  float sum[ROWS_EACH][DIMENSIONS_EACH];
  for (int r = 0; r < ROWS_EACH; r++)
    for (int i = 0; i < DIMENSIONS_EACH; i++) sum[r][i] = 0.0f;
  for (int i = ITEM; i < OWN_ROWS * KEY_SIZE; i += 128) {
    int r = i / KEY_SIZE, d = i % KEY_SIZE;
    float x = 0.0f;
    if (r < rows && IN_BLOCKS(KEY_TYPE)) {
      GLOBAL const float *of = q + ((size_t)(row0 + r) * HEADS + head) * QUERY_WORDS;
      x = (float)((GLOBAL const i8 *)of)[d] * of[KEY_SIZE / 4 + d / 32];
    } else if (r < rows && d < HEAD)
      x = q[(size_t)(row0 + r) * Q_STRIDE + head * HEAD + d];
    ql[r * stride + d] = x;
  }
  if (ITEM < OWN_ROWS) {
    largest[ITEM] = HAS_SINKS ? sinks[head] : LOWEST;
    weight[ITEM] = HAS_SINKS ? 1.0f : 0.0f;
  }
  BARRIER();
  int last = last_seen(SHAPE step, row0 + rows - 1);
  for (int k0 = first_seen(SHAPE step, row0) / TILE_KEYS * TILE_KEYS; k0 <= last; k0 += TILE_KEYS) {
    int count = smaller(TILE_KEYS, last + 1 - k0), units = KEY_SIZE / UNIT_VALUES(KEY_TYPE);
    for (int i = ITEM; i < TILE_KEYS * units; i += 128) {
      int j = i % TILE_KEYS, u = i / TILE_KEYS;
      float v[KEY_UNIT_MOST];
      for (int n = 0; n < KEY_UNIT_MOST; n++) v[n] = 0.0f;
      if (j < count) {
        GLOBAL const uchar *of = keys + block_of(SHAPE table, kv_head, k0 + j) * KEY_BYTES;
        int own = (k0 + j) % BLOCK_TOKENS;
        GLOBAL const ushort *scales = (GLOBAL const ushort *)(of + 4 * BLOCK_TOKENS * KEY_WORDS) + own;
        unit_values(KEY_TYPE, (GLOBAL const uint *)of + own, BLOCK_TOKENS, scales, BLOCK_TOKENS, u, v);
      }
      for (int n = 0; n < UNIT_VALUES(KEY_TYPE); n++) kl[j * stride + unit_dimension(KEY_TYPE, u, n)] = v[n];
    }
    BARRIER();
    float score[ROWS_EACH][KEYS_EACH];
    for (int r = 0; r < ROWS_EACH; r++)
      for (int i = 0; i < KEYS_EACH; i++) score[r][i] = 0.0f;
    for (int d = 0; d < HEAD; d++) {
      float a[ROWS_EACH], b[KEYS_EACH];
      for (int r = 0; r < ROWS_EACH; r++) a[r] = ql[(ty + 8 * r) * stride + d];
      for (int i = 0; i < KEYS_EACH; i++) b[i] = kl[smaller(tx + 16 * i, TILE_KEYS - 1) * stride + d];
      for (int r = 0; r < ROWS_EACH; r++)
        for (int i = 0; i < KEYS_EACH; i++) score[r][i] = FMA(a[r], b[i], score[r][i]);
    }
    for (int r = 0; r < ROWS_EACH; r++)
      for (int i = 0; i < KEYS_EACH; i++) {
        int own = ty + 8 * r, j = tx + 16 * i, at = k0 + j, row = smaller(own, rows - 1), here = position[row];
        int seen = own < rows && at <= last_seen(SHAPE step, row0 + row) && at >= first_seen(SHAPE step, row0 + row);
        if (j < TILE_KEYS)
          p[own * (TILE_KEYS + 1) + j] = seen ? shaped(SHAPE score[r][i], slopes, head, at - here) : -1.0f / 0.0f;
      }
    BARRIER();
    for (int i = ITEM; i < TILE_KEYS * VALUE_UNITS; i += 128) {
      int u = i % VALUE_UNITS, j = i / VALUE_UNITS;
      float v[VALUE_UNIT_MOST];
      for (int n = 0; n < VALUE_UNIT_MOST; n++) v[n] = 0.0f;
      if (j < count) value_unit(SHAPE values, block_of(SHAPE table, kv_head, k0 + j), k0 + j, u, v);
      for (int n = 0; n < UNIT_VALUES(VALUE_TYPE); n++) kl[j * stride + unit_dimension(VALUE_TYPE, u, n)] = v[n];
    }
    int row = ITEM / SHARES, share = ITEM % SHARES;
    LOCAL float *own = p + row * (TILE_KEYS + 1);
    float before = largest[row], now = before, all = 0.0f;
    for (int i = share; i < TILE_KEYS; i += SHARES) now = FMAX(now, own[i]);
    s[ITEM] = now;
    BARRIER();
    for (int i = 0; i < SHARES; i++) now = FMAX(now, s[row * SHARES + i]);
    for (int i = share; i < TILE_KEYS; i += SHARES) {
      own[i] = own[i] == -1.0f / 0.0f ? 0.0f : exponential(own[i] - now);
      all += own[i];
    }
    BARRIER();
    s[ITEM] = all;
    BARRIER();
    if (share == 0) {
      all = 0.0f;
      for (int i = 0; i < SHARES; i++) all += s[row * SHARES + i];
      fade[row] = exponential(before - now);
      weight[row] = FMA(weight[row], fade[row], all);
      largest[row] = now;
    }
    BARRIER();
    for (int r = 0; r < ROWS_EACH; r++)
      for (int i = 0; i < DIMENSIONS_EACH; i++) sum[r][i] *= fade[ty + 8 * r];
    for (int j = 0; j < count; j++) {
      float a[ROWS_EACH];
      for (int r = 0; r < ROWS_EACH; r++) a[r] = p[(ty + 8 * r) * (TILE_KEYS + 1) + j];
      for (int i = 0; i < DIMENSIONS_EACH; i++) {
        int d = tx + 16 * i;
        float v = d < VALUE_HEAD ? kl[j * stride + d] : 0.0f;
        for (int r = 0; r < ROWS_EACH; r++) sum[r][i] = FMA(a[r], v, sum[r][i]);
      }
    }
    BARRIER();
  }
  for (int r = 0; r < ROWS_EACH; r++)
    for (int i = 0; i < DIMENSIONS_EACH; i++)
      if (tx + 16 * i < VALUE_HEAD) ql[(ty + 8 * r) * stride + tx + 16 * i] = sum[r][i] / weight[ty + 8 * r];
  hadamard(VALUE_TYPE, VALUE_HEAD, VALUE_ROTATION, ql, OWN_ROWS, stride);
  for (int i = ITEM; i < rows * VALUE_HEAD; i += 128) {
    int r = i / VALUE_HEAD, d = i % VALUE_HEAD;
    y[(size_t)(row0 + r) * Y_STRIDE + head * VALUE_HEAD + d] = ql[r * stride + d];
  }
}
#endif
