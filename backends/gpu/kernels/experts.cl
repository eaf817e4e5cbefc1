// Mixture of experts, without the products. Constants: EXPERTS, USED, STRIDEs, FACTOR, WIDTH, COUNT_AT, PAIRS (maximum
// number of pairs of a row and one of its experts), TILE (pairs per tile of the products).

#ifdef ROUTE
// A work-group handles one row. It computes the scores of all experts, then selects the best remaining expert USED
// times (ties go to the lower expert), then computes the weights. GATING 0: softmax, 1: sigmoid, 2: softmax of the
// selected, 3: sigmoid of each selected, 4: softmax of each selected over the close ones among the experts not yet
// selected, 5: square root of softplus. With HAS_GIVEN the experts are `given` (rows, GIVEN_STRIDE).
KERNEL(128, route)(SHAPE_PARAMETER GLOBAL const float *logits, GLOBAL const float *bias, GLOBAL const float *given,
                   GLOBAL int *choices, GLOBAL float *weights LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL float *score = local_memory, *rank = score + EXPERTS, *best = rank + EXPERTS;
  LOCAL int *place = (LOCAL int *)(best + 128), *chosen = place + 128;
  logits += (size_t)GROUP_X * STRIDE;
  for (int e = ITEM; e < EXPERTS; e += 128) 
    score[e] = GATING == 1 ? sigmoid(logits[e]) : GATING == 5 ? SQRT(softplus(logits[e])) : logits[e];
  BARRIER();
#if GATING == 0
  float largest = LOWEST, sum = 0.0f;
  for (int e = ITEM; e < EXPERTS; e += 128) largest = FMAX(largest, score[e]);
  largest = group_max(largest, best, 128);
  for (int e = ITEM; e < EXPERTS; e += 128) {
    score[e] = exponential(score[e] - largest);
    sum += score[e];
  }
  sum = group_sum(sum, best, 128);
  for (int e = ITEM; e < EXPERTS; e += 128) score[e] = score[e] / sum;
  BARRIER();
#endif
  for (int e = ITEM; e < EXPERTS; e += 128) {
    float r = score[e];
#if HAS_BIAS
    r += bias[e];
#endif
    rank[e] = IS_NAN(r) ? LOWEST : r;
  }
  // A work-item handles a group of experts: it finds the group's best expert, or the best two, and counts the better
  // groups.
  int size = EXPERTS / EXPERT_GROUPS, grouped = EXPERT_GROUPS > 1 && ITEM < EXPERT_GROUPS, better = 0;
  BARRIER();
  if (grouped) {
    float first = LOWEST, second = LOWEST;
    for (int e = ITEM * size; e < (ITEM + 1) * size; e++) {
      second = rank[e] > first ? first : FMAX(second, rank[e]);
      first = FMAX(first, rank[e]);
    }
    best[ITEM] = GATING == 0 || second == LOWEST ? first : first + second;
  }
  BARRIER();
  if (grouped) {
    for (int g = 0; g < EXPERT_GROUPS; g++) better += best[g] > best[ITEM] || (best[g] == best[ITEM] && g < ITEM);
    for (int e = ITEM * size; e < (ITEM + 1) * size; e++) rank[e] = better < GROUPS_USED ? rank[e] : LOWEST;
  }
  for (int i = 0; i < USED; i++) {
    BARRIER();
    int own = EXPERTS;
    for (int e = ITEM; e < EXPERTS; e += 128) {
      int taken = 0;
      for (int k = 0; k < i; k++) taken |= chosen[k] == e;
      if (!taken && (own == EXPERTS || rank[e] > rank[own])) own = e;
    }
    place[ITEM] = own;
    best[ITEM] = own == EXPERTS ? LOWEST : rank[own];
    for (int part = 64; part > 0; part >>= 1) {
      BARRIER();
      if (ITEM < part) {
        int other = ITEM + part, wins = best[other] > best[ITEM] || (best[other] == best[ITEM] && place[other] < place[ITEM]);
        if (wins) {
          best[ITEM] = best[other];
          place[ITEM] = place[other];
        }
      }
    }
    BARRIER();
#if HAS_GIVEN
    if (ITEM == 0) chosen[i] = (int)given[(size_t)GROUP_X * GIVEN_STRIDE + i];
#else
    if (ITEM == 0) chosen[i] = place[0];
#endif
  }
  BARRIER();
  if (ITEM == 0) {
    float total = 0.0f, peak = score[chosen[0]];
    for (int i = 0; i < USED; i++) {
      best[i] = score[chosen[i]];
      peak = FMAX(peak, best[i]);
    }
#if GATING == 2
    for (int i = 0; i < USED; i++) {
      best[i] = exponential(best[i] - peak);
      total += best[i];
    }
    for (int i = 0; i < USED; i++) best[i] = best[i] / total;
    total = 0.0f;
#elif GATING == 3
    for (int i = 0; i < USED; i++) best[i] = sigmoid(best[i]);
#elif GATING == 4
    for (int i = 0; i < USED; i++) {
      float own = best[i], sum = own - own + 1.0f;
      rank[chosen[i]] = LOWEST;
      for (int e = 0; e < EXPERTS; e++) {
        float size = FMAX(FMAX(score[e], -score[e]), own);
        if (rank[e] > LOWEST && own - score[e] <= 0.02f * size) sum += exponential(score[e] - own);
      }
      best[i] = 1.0f / sum;
    }
#endif
    for (int i = 0; i < USED; i++) total += best[i];
    for (int i = 0; i < USED; i++) {
      float weight = best[i];
#if NORMALIZE
      weight = weight / FMAX(total, 6.103515625e-05f);
#endif
      choices[GROUP_X * USED + i] = chosen[i];
      weights[GROUP_X * USED + i] = weight * FACTOR;
    }
  }
}
#endif

#ifdef COMBINE
KERNEL(128, combine)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *weights, GLOBAL float *y) {
  int i = GROUP_X * 128 + ITEM;
  if (i >= WIDTH) return;
  float sum = 0.0f;
  for (int n = 0; n < USED; n++) {
    int pair = GROUP_Y * USED + n;
    sum = FMA(WEIGHTED ? weights[pair] : 1.0f, x[(size_t)pair * STRIDE + i], sum);
  }
  y[(size_t)GROUP_Y * STRIDE + i] = sum;
}
#endif

#ifdef GROUP_PAIRS
// Tiles for products with one expert each. Output: the number of tiles, then the pairs ordered by expert, then for
// every tile its expert, the index of its first pair, and its number of pairs. A work-item handles every 128th expert
// and reads all choices.
KERNEL(128, group_pairs)(SHAPE_PARAMETER GLOBAL const int *choices, GLOBAL const int *step, GLOBAL int *groups LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL int *counts = (LOCAL int *)local_memory;
  int pairs = step[COUNT_AT] * USED;
  for (int e = ITEM; e < EXPERTS; e += 128) {
    int own = 0;
    for (int i = 0; i < pairs; i++) own += choices[i] == e;
    counts[e] = own;
  }
  BARRIER();
  for (int e = ITEM; e < EXPERTS; e += 128) {
    int first = 0, tile = 0, own = counts[e];
    for (int i = 0; i < e; i++) {
      first += counts[i];
      tile += (counts[i] + TILE - 1) / TILE;
    }
    if (e == EXPERTS - 1) groups[0] = tile + (own + TILE - 1) / TILE;
    for (int at = 0; at < own; at += TILE, tile++) {
      GLOBAL int *of = groups + 1 + PAIRS + 3 * tile;
      of[0] = e;
      of[1] = first + at;
      of[2] = smaller(TILE, own - at);
    }
    for (int i = 0; i < pairs; i++)
      if (choices[i] == e) groups[1 + first++] = i;
  }
}
#endif
