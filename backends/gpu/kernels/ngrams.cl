// Rows of n-grams from a table: a work-item has a number or a chunk of a head's row, and hashes the ids itself.
// Constants: K (width of a head), N (rows of the table), HEADS (of all orders), EACH (of an order), END (the token that
// ends a text), ITEMS (chunks or numbers of a head), Y_STRIDE; MULTIPLIER_OF(n) of token n back, SIZE_OF(n) and
// FIRST_OF(n) of head n.
DEVICE int bounded_id(float v) { return v >= 0.0f && v <= 16777216.0f ? (int)v : 0; }  // a prompt file may be damaged

KERNEL(64, embed_ngrams)(SHAPE_PARAMETER GLOBAL const uchar *RESTRICT w, GLOBAL const int *step,
                         GLOBAL const int *tables, GLOBAL float *rows, GLOBAL float *y) {
  int row = GROUP_Y, item = GROUP_X * 64 + ITEM, head = item / ITEMS, i = item % ITEMS, over = 0;
  GLOBAL const int *tokens = TOKENS_OF(step), *positions = POSITIONS_OF(step), *sequence = SEQUENCE_OF(step);
  GLOBAL const int *table = tables + (size_t)sequence[row] * step[TABLE_STRIDE_AT];
  if (item == 0) rows[SLOTS_OF(step)[row]] = (float)tokens[row];
  if (head >= HEADS) return;
  u64 mixed = 0;
  for (int back = 0; back < head / EACH + 2; back++) {
    int at = positions[row] - back, token = END;
    if (at >= 0 && !over) {
      if (back <= row && sequence[row - back] == sequence[row] && positions[row - back] == at)
        token = tokens[row - back];
      else
        token = bounded_id(rows[(size_t)table[at / BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS]);
    }
    over = over || (back && token == END);
    mixed ^= (u64)token * (u64)(MULTIPLIER_OF(back));
  }
  size_t number = (size_t)(mixed % (u64)(SIZE_OF(head))) + (size_t)(FIRST_OF(head));
  y += (size_t)row * Y_STRIDE + (size_t)head * K;
#ifdef QUANTIZED
  int q[8];
  float s[2], m[2];
  unpack_chunk(SHAPE w, N, number, i, q, s, m);
  for (int k = 0; k < 32; k++) {
    float v = s[k / 16] * (float)byte_of(q[k / 4], k & 3);
#if MINIMUM
    v = v - m[k / 16];
#endif
    y[32 * i + k] = v;
  }
#else
  y[i] = element(w, number * K + i);
#endif
}
