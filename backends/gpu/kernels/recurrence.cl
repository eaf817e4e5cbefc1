// Recurrent layers. A block of a store holds the rows of 64 positions, and in a separate buffer the state before them.
// The rows of a sequence are adjacent in a piece of a batch. The work-group of the sequence's first row processes all
// rows of the sequence, in order. Constants: MAX_ROWS, SLOTS_AT, TABLE_STRIDE_AT, and the constants of each kernel.

DEVICE int starts_run(GLOBAL const int *sequence, int row) { return row == 0 || sequence[row - 1] != sequence[row]; }

#ifdef CONVOLVE  // A work-item handles a channel of a row. Constants: WIDTH, SIZE (taps), X_STRIDE, Y_STRIDE, HAS_BIAS
KERNEL(128, convolve)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const int *step, GLOBAL const int *tables,
                      GLOBAL const float *weight, GLOBAL const float *bias, GLOBAL float *rows, GLOBAL float *y) {
  int c = GROUP_X * 128 + ITEM, row = GROUP_Y;
  if (c >= WIDTH) return;
  GLOBAL const int *positions = POSITIONS_OF(step), *sequence = SEQUENCE_OF(step);
  int position = positions[row];
  GLOBAL const int *table = tables + (size_t)sequence[row] * step[TABLE_STRIDE_AT];
  float sum = HAS_BIAS ? bias[c] : 0.0f;
  for (int j = 0; j < SIZE; j++) {
    int back = SIZE - 1 - j, at = position - back;
    if (at < 0) continue;
    float v;
    if (back <= row && sequence[row - back] == sequence[row] && positions[row - back] == at)
      v = x[(size_t)(row - back) * X_STRIDE + c];
    else
      v = rows[((size_t)table[at / BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS) * WIDTH + c];
    sum = FMA(weight[(size_t)c * SIZE + j], v, sum);
  }
  y[(size_t)row * Y_STRIDE + c] = sum;
  rows[(size_t)SLOTS_OF(step)[row] * WIDTH + c] = x[(size_t)row * X_STRIDE + c];
}
#endif

#ifdef APPEND_POOLED  // A work-item handles a column of a row. Constants: WIDTH (of x), X_STRIDE, S_STRIDE (of scores)
KERNEL(128, append_pooled)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *scores, GLOBAL const int *step,
                           GLOBAL float *rows) {
  int c = GROUP_X * 128 + ITEM;
  if (c >= WIDTH) return;
  GLOBAL float *to = rows + (size_t)SLOTS_OF(step)[GROUP_Y] * 2 * WIDTH + c;
  to[0] = x[(size_t)GROUP_Y * X_STRIDE + c];
  to[WIDTH] = scores[(size_t)GROUP_Y * S_STRIDE + c];
}
#endif

#ifdef POOL  // A work-item handles one column of a row. Constants: WIDTH (of y), PARTS, SIZE (rows per pool), Y_STRIDE
KERNEL(128, pool_rows)(SHAPE_PARAMETER GLOBAL const int *step, GLOBAL const int *tables, GLOBAL const float *bias,
                       GLOBAL const float *rows, GLOBAL float *y) {
  int c = GROUP_X * 128 + ITEM, position = POSITIONS_OF(step)[GROUP_Y], columns = PARTS * WIDTH;
  if (c >= WIDTH) return;
  GLOBAL const int *table = tables + (size_t)SEQUENCE_OF(step)[GROUP_Y] * step[TABLE_STRIDE_AT];
  float largest = LOWEST, total = 0.0f, sum = 0.0f;
  if ((position + 1) % SIZE == 0) {
    for (int second = 0; second < 2; second++)  // first the largest score, then the sums
      for (int part = 0; part < PARTS; part++) {
        int first = position + 1 - SIZE * (PARTS - part);
        if (first < 0) continue;
        for (int i = 0; i < SIZE; i++) {
          int at = first + i, column = part * WIDTH + c;
          GLOBAL const float *x = rows + ((size_t)table[at / BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS) * 2 * columns;
          float score = x[columns + column] + bias[(size_t)i * columns + column];
          if (!second) {
            largest = FMAX(largest, score);
            continue;
          }
          float weight = exponential(score - largest);
          total += weight;
          sum = FMA(weight, x[column], sum);
        }
      }
    sum = sum / total;
  }
  y[(size_t)GROUP_Y * Y_STRIDE + c] = sum;
}
#endif

#if defined(APPEND_KEYS) || defined(LINEAR_ATTENTION) || defined(CHANNEL_ATTENTION)
// A block holds keys (KEY_HEADS, KEY_DIM, positions), updates (HEADS, positions, VALUE_DIM) and decays (HEADS, DECAYS,
// positions). Stored separately: the state (HEADS, KEY_DIM, VALUE_DIM).
#define UPDATES_AT (BLOCK_TOKENS * KEY_HEADS * KEY_DIM)
#define DECAYS_AT (UPDATES_AT + BLOCK_TOKENS * HEADS * VALUE_DIM)
#define ROWS_OF_BLOCK ((size_t)DECAYS_AT + BLOCK_TOKENS * HEADS * DECAYS)
// The logarithm of a decay. `exponential` is 0 below -87. Larger numbers would round away the decays added to them.
DEVICE float limited(float decay) { return decay < -88.0f ? -88.0f : decay; }
#endif

#ifdef APPEND_KEYS  // Appends the keys of a row. Constants: HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, DECAYS, K_STRIDE
KERNEL(128, append_keys)(SHAPE_PARAMETER GLOBAL const float *k, GLOBAL const int *step, GLOBAL float *rows) {
  int d = GROUP_X * 128 + ITEM, slot = SLOTS_OF(step)[GROUP_Y];
  if (d >= KEY_HEADS * KEY_DIM) return;
  GLOBAL float *block = rows + (size_t)(slot / BLOCK_TOKENS) * ROWS_OF_BLOCK;
  block[(size_t)d * BLOCK_TOKENS + slot % BLOCK_TOKENS] = k[(size_t)GROUP_Y * K_STRIDE + d];
}
#endif

#ifdef LINEAR_ATTENTION
// One head of all rows of a sequence. A work-item handles some dimensions of a value, and for the scores a position of
// the block: the first 64 compute the scores of the key, the others the scores of the query. Additional constants:
// DELTA, TILED, HAS_SKIP, HAS_STEPS, HAS_STRENGTHS, Q_STRIDE, K_STRIDE, V_STRIDE, G_STRIDE, B_STRIDE, Y_STRIDE
KERNEL(128, linear_attention)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const float *k, GLOBAL const float *v,
                              GLOBAL const float *steps, GLOBAL const float *strengths, GLOBAL const int *step,
                              GLOBAL const int *tables, GLOBAL const float *rates, GLOBAL const float *skips,
                              GLOBAL float *rows, GLOBAL float *states, GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  GLOBAL const int *sequence = SEQUENCE_OF(step);
  int head = GROUP_X, row = GROUP_Y, count = step[0];
  int own = sequence[row], key_head = TILED ? head % KEY_HEADS : head / (HEADS / KEY_HEADS);
  GLOBAL const int *table = tables + (size_t)own * step[TABLE_STRIDE_AT];
  LOCAL float *key = local_memory, *query = key + KEY_DIM, *sums = query + KEY_DIM, *weights = sums + BLOCK_TOKENS;
  float rate = rates[head], skip = HAS_SKIP ? skips[head] : 0.0f;
  size_t of_keys = (size_t)key_head * KEY_DIM * BLOCK_TOKENS, of_state = (size_t)head * KEY_DIM * VALUE_DIM;
  size_t of_updates = UPDATES_AT + (size_t)head * BLOCK_TOKENS * VALUE_DIM;
  size_t of_decays = DECAYS_AT + (size_t)head * BLOCK_TOKENS;
  int loaded = -1, stop = row;  // number of the block whose decay sums are in local memory; end of the rows
  if (starts_run(sequence, row))
    while (stop < count && sequence[stop] == own) stop++;
  for (; row < stop; row++) {
    int position = POSITIONS_OF(step)[row], at = position % BLOCK_TOKENS, column = position / BLOCK_TOKENS;
    GLOBAL float *block = rows + (size_t)table[column] * ROWS_OF_BLOCK;
    GLOBAL float *state = states + (size_t)table[column] * HEADS * KEY_DIM * VALUE_DIM + of_state;
    int last = at == 0 && column ? column - 1 : column, known_sums = at == 0 ? (column ? BLOCK_TOKENS : 0) : at;
    GLOBAL const float *before = rows + (size_t)table[last] * ROWS_OF_BLOCK;
    GLOBAL const float *old = states + (size_t)table[last] * HEADS * KEY_DIM * VALUE_DIM + of_state;
    BARRIER();
    if (loaded != last && ITEM < known_sums) sums[ITEM] = before[of_decays + ITEM];
    BARRIER();
    if (at == 0 && column && ITEM < BLOCK_TOKENS) weights[ITEM] = exponential(sums[BLOCK_TOKENS - 1] - sums[ITEM]);
    BARRIER();
    if (at == 0 && !column) {
      for (int i = ITEM; i < VALUE_DIM; i += 128)
        for (int d = 0; d < KEY_DIM; d++) state[d * VALUE_DIM + i] = 0.0f;
    }
    if (at == 0 && column) {  // compute the state from the previous block; no barrier may be in a branch
      float shrunk = exponential(sums[BLOCK_TOKENS - 1]);
      for (int i = ITEM; i < VALUE_DIM; i += 128) {
        for (int d = 0; d < KEY_DIM; d++) {
          float sum = old[d * VALUE_DIM + i] * shrunk;
          for (int t = 0; t < BLOCK_TOKENS; t++)
            sum = FMA(before[of_keys + d * BLOCK_TOKENS + t] * weights[t], before[of_updates + t * VALUE_DIM + i], sum);
          state[d * VALUE_DIM + i] = sum;
        }
      }
    }
    loaded = column;
    for (int d = ITEM; d < KEY_DIM; d += 128) {
      key[d] = k[(size_t)row * K_STRIDE + key_head * KEY_DIM + d];
      query[d] = q[(size_t)row * Q_STRIDE + key_head * KEY_DIM + d];
    }
    BARRIER();
    float decay = limited(HAS_STEPS ? steps[(size_t)row * G_STRIDE + head] * rate : rate);
    float g = at ? sums[at - 1] + decay : decay;
    float grown = exponential(g), strength = HAS_STRENGTHS ? strengths[(size_t)row * B_STRIDE + head] : 1.0f;
    BARRIER();
    if (ITEM == 0) block[of_decays + at] = sums[at] = g;
    int t = ITEM % BLOCK_TOKENS, by_query = ITEM >= BLOCK_TOKENS;
    float score = 0.0f;
    if (t <= at && (by_query || (DELTA && t < at))) {
      LOCAL const float *other = by_query ? query : key;
      for (int d = 0; d < KEY_DIM; d++) score = FMA(block[of_keys + (size_t)d * BLOCK_TOKENS + t], other[d], score);
      score *= exponential(t == at ? 0.0f : g - sums[t]);
    }
    weights[ITEM] = score;
    BARRIER();
    for (int i = ITEM; i < VALUE_DIM; i += 128) {
      float seen = 0.0f, known = 0.0f, value = v[(size_t)row * V_STRIDE + head * VALUE_DIM + i];
      for (int d = 0; d < KEY_DIM; d++) {
        float part = state[(size_t)d * VALUE_DIM + i];
        seen = FMA(part, query[d], seen);
        if (DELTA) known = FMA(part, key[d], known);
      }
      seen *= grown;
      known *= grown;
      for (int n = 0; n < at; n++) {
        float part = block[of_updates + (size_t)n * VALUE_DIM + i];
        seen = FMA(part, weights[BLOCK_TOKENS + n], seen);
        if (DELTA) known = FMA(part, weights[n], known);
      }
      float made = (value - known) * strength;
      block[of_updates + (size_t)at * VALUE_DIM + i] = made;
      y[(size_t)row * Y_STRIDE + head * VALUE_DIM + i] = FMA(skip, value, FMA(weights[BLOCK_TOKENS + at], made, seen));
    }
  }
}
#endif

#ifdef CHANNEL_ATTENTION
// Linear attention with a decay per key channel. A work-item handles a position of the block and half of the channels.
// The decays of a block are sums since its start. Before the block's first row, the memory of the decays holds the
// decayed keys of the previous block.
KERNEL(128, channel_attention)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const float *k, GLOBAL const float *v,
                               GLOBAL const float *steps, GLOBAL const float *strengths, GLOBAL const int *step,
                               GLOBAL const int *tables, GLOBAL const float *rates, GLOBAL const float *skips,
                               GLOBAL float *rows, GLOBAL float *states, GLOBAL float *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  GLOBAL const int *sequence = SEQUENCE_OF(step);
  int head = GROUP_X, row = GROUP_Y, count = step[0];
  int own = sequence[row], key_head = TILED ? head % KEY_HEADS : head / (HEADS / KEY_HEADS);
  GLOBAL const int *table = tables + (size_t)own * step[TABLE_STRIDE_AT];
  LOCAL float *key = local_memory, *query = key + KEY_DIM, *sums = query + KEY_DIM, *grown = sums + KEY_DIM;
  LOCAL float *by_query = grown + KEY_DIM, *by_key = by_query + 2 * BLOCK_TOKENS;
  float rate = rates[head], skip = HAS_SKIP ? skips[head] : 0.0f;
  size_t of_keys = (size_t)key_head * KEY_DIM * BLOCK_TOKENS, of_state = (size_t)head * KEY_DIM * VALUE_DIM;
  size_t of_updates = UPDATES_AT + (size_t)head * BLOCK_TOKENS * VALUE_DIM;
  size_t of_decays = DECAYS_AT + (size_t)head * BLOCK_TOKENS * DECAYS;
  int t = ITEM % BLOCK_TOKENS, part = ITEM / BLOCK_TOKENS, stop = row;
  int from = part * (KEY_DIM / 2), to = part ? KEY_DIM : KEY_DIM / 2;
  if (starts_run(sequence, row))
    while (stop < count && sequence[stop] == own) stop++;
  for (; row < stop; row++) {
    int position = POSITIONS_OF(step)[row], at = position % BLOCK_TOKENS, column = position / BLOCK_TOKENS;
    GLOBAL float *block = rows + (size_t)table[column] * ROWS_OF_BLOCK, *decays = block + of_decays;
    GLOBAL float *state = states + (size_t)table[column] * HEADS * KEY_DIM * VALUE_DIM + of_state;
    int last = at == 0 && column ? column - 1 : column;
    GLOBAL const float *before = rows + (size_t)table[last] * ROWS_OF_BLOCK;
    GLOBAL const float *old = states + (size_t)table[last] * HEADS * KEY_DIM * VALUE_DIM + of_state;
    if (at == 0 && !column) {
      for (int i = ITEM; i < VALUE_DIM; i += 128)
        for (int d = 0; d < KEY_DIM; d++) state[d * VALUE_DIM + i] = 0.0f;
    }
    if (at == 0 && column) {
      for (int d = from; d < to; d++) {
        GLOBAL const float *sum = before + of_decays + (size_t)d * BLOCK_TOKENS;
        float whole = sum[BLOCK_TOKENS - 1], apart = t == BLOCK_TOKENS - 1 ? 0.0f : whole - sum[t];
        decays[(size_t)d * BLOCK_TOKENS + t] = before[of_keys + (size_t)d * BLOCK_TOKENS + t] * exponential(apart);
        if (t == 0) sums[d] = exponential(whole);  // `grown` of the previous row is still in use
      }
    }
    SHARED_BARRIER();
    if (at == 0 && column) {  // compute the state from the previous block
      for (int i = ITEM; i < VALUE_DIM; i += 128) {
        for (int d = 0; d < KEY_DIM; d++) {
          float sum = old[d * VALUE_DIM + i] * sums[d];
          for (int n = 0; n < BLOCK_TOKENS; n++)
            sum = FMA(decays[(size_t)d * BLOCK_TOKENS + n], before[of_updates + n * VALUE_DIM + i], sum);
          state[d * VALUE_DIM + i] = sum;
        }
      }
    }
    SHARED_BARRIER();
    for (int d = ITEM; d < KEY_DIM; d += 128) {
      key[d] = k[(size_t)row * K_STRIDE + key_head * KEY_DIM + d];
      query[d] = q[(size_t)row * Q_STRIDE + key_head * KEY_DIM + d];
      float decay = limited(steps[(size_t)row * G_STRIDE + head * KEY_DIM + d] * rate);
      float g = at ? decays[(size_t)d * BLOCK_TOKENS + at - 1] + decay : decay;
      decays[(size_t)d * BLOCK_TOKENS + at] = sums[d] = g;
      grown[d] = exponential(g);
    }
    float strength = HAS_STRENGTHS ? strengths[(size_t)row * B_STRIDE + head] : 1.0f;
    SHARED_BARRIER();
    float of_query = 0.0f, of_key = 0.0f;
    if (t <= at) {
      for (int d = from; d < to; d++) {
        float apart = t == at ? 0.0f : sums[d] - decays[(size_t)d * BLOCK_TOKENS + t];
        float faded = block[of_keys + (size_t)d * BLOCK_TOKENS + t] * exponential(apart);
        of_query = FMA(faded, query[d], of_query);
        if (DELTA) of_key = FMA(faded, key[d], of_key);
      }
    }
    by_query[ITEM] = of_query;
    by_key[ITEM] = of_key;
    BARRIER();
    for (int i = ITEM; i < VALUE_DIM; i += 128) {
      float seen = 0.0f, known = 0.0f, value = v[(size_t)row * V_STRIDE + head * VALUE_DIM + i];
      for (int d = 0; d < KEY_DIM; d++) {
        float left = state[(size_t)d * VALUE_DIM + i] * grown[d];
        seen = FMA(left, query[d], seen);
        if (DELTA) known = FMA(left, key[d], known);
      }
      for (int n = 0; n < at; n++) {
        float update = block[of_updates + (size_t)n * VALUE_DIM + i];
        seen = FMA(update, by_query[n] + by_query[BLOCK_TOKENS + n], seen);
        if (DELTA) known = FMA(update, by_key[n] + by_key[BLOCK_TOKENS + n], known);
      }
      float made = (value - known) * strength, newest = by_query[at] + by_query[BLOCK_TOKENS + at];
      block[of_updates + (size_t)at * VALUE_DIM + i] = made;
      y[(size_t)row * Y_STRIDE + head * VALUE_DIM + i] = FMA(skip, value, FMA(newest, made, seen));
    }
  }
}
#endif

#ifdef SELECTIVE_SCAN
// Selective scan of some channels of all rows of a sequence. A row of the store holds inputs (WIDTH), step sizes
// (WIDTH) and B (STATE_DIM). States: before the block and after the newest row (STATE_DIM, WIDTH), and the index of the
// newest row (WIDTH). Constants: WIDTH, STATE_DIM, X_STRIDE, DT_STRIDE, B_STRIDE, C_STRIDE, Y_STRIDE
#define SCAN_ROW (2 * WIDTH + STATE_DIM)
DEVICE void follow(SHAPE_PARAMETER GLOBAL float *state, GLOBAL const float *a, GLOBAL const float *gains, int c, float x,
                   float dt) {
  float stepped = x * dt;
  for (int n = 0; n < STATE_DIM; n++) {
    GLOBAL float *h = state + (size_t)n * WIDTH + c;
    *h = FMA(exponential(dt * a[(size_t)c * STATE_DIM + n]), *h, stepped * gains[n]);
  }
}

KERNEL(128, selective_scan)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *dt, GLOBAL const float *b,
                            GLOBAL const float *c, GLOBAL const int *step, GLOBAL const int *tables,
                            GLOBAL const float *a, GLOBAL const float *d, GLOBAL float *rows, GLOBAL float *states,
                            GLOBAL float *y) {
  GLOBAL const int *sequence = SEQUENCE_OF(step);
  int own = GROUP_X * 128 + ITEM, row = GROUP_Y, count = step[0];
  if (own >= WIDTH || !starts_run(sequence, row)) return;
  int number = sequence[row];
  GLOBAL const int *table = tables + (size_t)number * step[TABLE_STRIDE_AT];
  size_t size = (size_t)STATE_DIM * WIDTH, of_block = 2 * size + WIDTH;
  for (; row < count && sequence[row] == number; row++) {
    int position = POSITIONS_OF(step)[row], at = position % BLOCK_TOKENS, column = position / BLOCK_TOKENS;
    GLOBAL float *stored = rows + (size_t)table[column] * BLOCK_TOKENS * SCAN_ROW;
    GLOBAL float *before = states + table[column] * of_block, *newest = before + size, *tag = newest + size + own;
    if (at == 0) {
      GLOBAL const float *last = states + (column ? table[column - 1] : 0) * of_block + size;
      for (int n = 0; n < STATE_DIM; n++)
        before[(size_t)n * WIDTH + own] = column ? last[(size_t)n * WIDTH + own] : 0.0f;
    }
    if (at == 0 || *tag != (float)(at - 1)) {  // after a truncation, or in a new block
      for (int n = 0; n < STATE_DIM; n++) newest[(size_t)n * WIDTH + own] = before[(size_t)n * WIDTH + own];
      for (int i = 0; i < at; i++) {
        GLOBAL const float *older = stored + (size_t)i * SCAN_ROW;
        follow(SHAPE newest, a, older + 2 * WIDTH, own, older[own], older[WIDTH + own]);
      }
    }
    float input = x[(size_t)row * X_STRIDE + own], size_of_step = dt[(size_t)row * DT_STRIDE + own];
    follow(SHAPE newest, a, b + (size_t)row * B_STRIDE, own, input, size_of_step);
    *tag = (float)at;
    GLOBAL float *mine = stored + (size_t)at * SCAN_ROW;
    mine[own] = input;
    mine[WIDTH + own] = size_of_step;
    for (int n = own; n < STATE_DIM; n += WIDTH) mine[2 * WIDTH + n] = b[(size_t)row * B_STRIDE + n];
    float sum = 0.0f;
    for (int n = 0; n < STATE_DIM; n++)
      sum = FMA(newest[(size_t)n * WIDTH + own], c[(size_t)row * C_STRIDE + n], sum);
    y[(size_t)row * Y_STRIDE + own] = FMA(d[own], input, sum);
  }
}
#endif
