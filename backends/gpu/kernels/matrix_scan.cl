// The WKV scan of RWKV-6 and RWKV-7. A work-item handles one dimension of a head's values, and its column of the state,
// in all rows of a sequence. The work-group of the sequence's first row processes all its rows, in order. A block holds
// rows (positions, ROW) of values, keys, decays, and with ERASES probes and erases. Stored separately: the states
// before the block and after the newest row (HEADS, KEY_DIM, VALUE_DIM), and the index of the newest row (VALUES).
// Constants: MAX_ROWS, SLOTS_AT, TABLE_STRIDE_AT, HEADS, KEY_DIM, VALUE_DIM, ERASES, BEFORE, K_STRIDE, V_STRIDE

#ifdef MATRIX_SCAN
#define VALUES (HEADS * VALUE_DIM)
#define KEYS (HEADS * KEY_DIM)
#define ROW (VALUES + (ERASES ? 4 : 2) * KEYS)
#define OF_STATE ((size_t)KEY_DIM * VALUES)

// Applies a row to the state column that starts at `state`. Returns the product with `query`.
DEVICE float follow_matrix(SHAPE_PARAMETER GLOBAL float *state, float value, GLOBAL const float *key,
                           GLOBAL const float *decay, GLOBAL const float *probe, GLOBAL const float *erase,
                           GLOBAL const float *query) {
  float known = 0.0f, seen = 0.0f;
  if (ERASES)
    for (int d = 0; d < KEY_DIM; d++) known = FMA(state[(size_t)d * VALUE_DIM], probe[d], known);
  for (int d = 0; d < KEY_DIM; d++) {
    float old = state[(size_t)d * VALUE_DIM], fresh = old * decay[d];
    if (ERASES) fresh = FMA(known, -erase[d], fresh);
    fresh = FMA(value, key[d], fresh);
    state[(size_t)d * VALUE_DIM] = fresh;
    seen = FMA(BEFORE ? old : fresh, query[d], seen);
  }
  return seen;
}

KERNEL(128, matrix_scan)(SHAPE_PARAMETER GLOBAL const float *q, GLOBAL const float *k, GLOBAL const float *v,
                         GLOBAL const float *decay, GLOBAL const float *probe, GLOBAL const float *erase,
                         GLOBAL const int *step, GLOBAL const int *tables, GLOBAL float *rows, GLOBAL float *states,
                         GLOBAL float *y) {
  GLOBAL const int *sequence = SEQUENCE_OF(step);
  int own = GROUP_X * 128 + ITEM, row = GROUP_Y, count = step[0];
  if (own >= VALUES || (row > 0 && sequence[row - 1] == sequence[row])) return;
  int number = sequence[row], head = own / VALUE_DIM, of_keys = head * KEY_DIM;
  GLOBAL const int *table = tables + (size_t)number * step[TABLE_STRIDE_AT];
  size_t of_block = 2 * OF_STATE + VALUES, column_at = (size_t)head * KEY_DIM * VALUE_DIM + own % VALUE_DIM;
  for (; row < count && sequence[row] == number; row++) {
    int position = POSITIONS_OF(step)[row], at = position % BLOCK_TOKENS, block = position / BLOCK_TOKENS;
    size_t key_at = (size_t)row * K_STRIDE + of_keys;
    GLOBAL float *stored = rows + (size_t)table[block] * BLOCK_TOKENS * ROW;
    GLOBAL float *before = states + table[block] * of_block + column_at, *newest = before + OF_STATE;
    GLOBAL float *tag = states + table[block] * of_block + 2 * OF_STATE + own;
    GLOBAL const float *query = q + key_at;
    if (at == 0) {
      GLOBAL const float *last = states + (block ? table[block - 1] : 0) * of_block + column_at + OF_STATE;
      for (int d = 0; d < KEY_DIM; d++) before[(size_t)d * VALUE_DIM] = block ? last[(size_t)d * VALUE_DIM] : 0.0f;
    }
    if (at == 0 || *tag != (float)(at - 1)) {  // after a truncation, or in a new block
      for (int d = 0; d < KEY_DIM; d++) newest[(size_t)d * VALUE_DIM] = before[(size_t)d * VALUE_DIM];
      for (int t = 0; t < at; t++) {
        GLOBAL const float *older = stored + (size_t)t * ROW, *key = older + VALUES + of_keys;
        follow_matrix(SHAPE newest, older[own], key, key + KEYS, key + 2 * KEYS, key + 3 * KEYS, query);
      }
    }
    float value = v[(size_t)row * V_STRIDE + own];
    y[(size_t)row * V_STRIDE + own] =
        follow_matrix(SHAPE newest, value, k + key_at, decay + key_at, probe + key_at, erase + key_at, query);
    *tag = (float)at;
    GLOBAL float *mine = stored + (size_t)at * ROW;  // a later step reads this again after a truncation
    mine[own] = value;
    for (int d = own % VALUE_DIM; d < KEY_DIM; d += VALUE_DIM) {
      GLOBAL float *to = mine + VALUES + of_keys + d;
      to[0] = k[key_at + d];
      to[KEYS] = decay[key_at + d];
      if (ERASES) {
        to[2 * KEYS] = probe[key_at + d];
        to[3 * KEYS] = erase[key_at + d];
      }
    }
  }
}
#endif
