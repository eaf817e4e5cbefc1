// The largest logits of a row in descending order, ties by token id. A work-group sorts SORTED keys and passes the
// first KEEP to the next pass, until one work-group is left. A key is two words: the inverted order of the logit, then
// its id. Smaller keys come first, and NaN before all others. `numbers` holds KEEP, then the number of keys of a row
// that each pass reads. Constants: STRIDE (logits of a row), PASS, SORTED.

DEVICE uint order_of(float value) {
  uint bits = (uint)AS_INT(value);
  if (bits == 0x80000000u) bits = 0;  // negative zero counts as positive zero
  return IS_NAN(value) ? 0u : bits >> 31 ? bits : ~(bits | 0x80000000u);
}

KERNEL(256, largest)(SHAPE_PARAMETER GLOBAL const float *logits, GLOBAL const int *numbers, GLOBAL const uint *in,
                     GLOBAL uint *out LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL uint *high = (LOCAL uint *)local_memory, *low = high + SORTED;
  int keep = numbers[0], all = numbers[1 + PASS], start = GROUP_X * SORTED, groups = (all + SORTED - 1) / SORTED;
  int count = smaller(SORTED, all - start), reach = 2;
  while (reach < count) reach <<= 1;
  in += 2 * (size_t)GROUP_Y * all;
  out += 2 * ((size_t)GROUP_Y * groups + GROUP_X) * keep;
  for (int i = ITEM; i < reach; i += 256) {
    high[i] = low[i] = 0xFFFFFFFFu;
    if (i < count) {
      int at = start + i;
      high[i] = PASS ? in[2 * at] : order_of(logits[(size_t)GROUP_Y * STRIDE + at]);
      low[i] = PASS ? in[2 * at + 1] : (uint)at;
    }
  }
  BARRIER();
  for (int size = 2; size <= reach; size <<= 1)  // bitonic sort: runs of `size`, rising and falling in alternation
    for (int gap = size >> 1; gap > 0; gap >>= 1) {
      for (int i = ITEM; i < reach >> 1; i += 256) {
        int a = 2 * i - (i & (gap - 1)), b = a + gap;
        uint ah = high[a], al = low[a], bh = high[b], bl = low[b];
        int falls = ah > bh || (ah == bh && al > bl);
        if (falls == ((a & size) == 0)) {
          high[a] = bh;
          low[a] = bl;
          high[b] = ah;
          low[b] = al;
        }
      }
      BARRIER();
    }
  for (int i = ITEM; i < keep; i += 256) {
    out[2 * i] = i < reach ? high[i] : 0xFFFFFFFFu;
    out[2 * i + 1] = i < reach ? low[i] : 0xFFFFFFFFu;
  }
}
