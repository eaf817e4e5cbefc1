// Prefill on NVIDIA's tensor cores: products of a matrix (N, K) with many rows of activations. CUDA only. Constants:
// those in linear.cl, TILE_X and TILE_W (rows of activations and of the matrix in a tile), COPY (alignment in bytes of
// rows of activations, at most 16), TERMS (16-bit numbers whose sum is an activation).
//
// A work-group computes a tile of TILE_X x TILE_W results with TILE_W / 16 warps, each with TILE_X / 2 x 32 of them. A
// step is 64 bytes of depth: every work-item unpacks one chunk (32 bytes: 32 int8 or 16 halves) of one row of the
// matrix once for all TILE_X rows, while copies fetch the activations; the next step's bytes are copied while this step
// multiplies. Rows of 64 bytes are stored without gaps, their four pieces of 16 bytes permuted so that no two of 8 rows
// share banks.
//
// int8: 16 x 8 x 32 products are one instruction and 12 of float32 (a subtraction, a product and a fused multiply-add
// per result and chunk; 16 with minimums, 24 to 32 if each half of a chunk has its own scale), so float32 is the limit:
// 128 lanes per clock give 1365 multiply-adds per clock, a third of the int8 rate of sm_90, two thirds of sm_89's.
// Bytes of a step of 128 x 128 x 64 at 4.5 bits: 4.6 KB of weights, 8.7 KB of activations, 12 per clock.

#ifdef QUANTIZED
#define CHUNK 32
#define SCALES (HALVES * (1 + MINIMUM))  // per chunk of the matrix: the scales, then the minimums
#define SUMS (1 + HALVES * MINIMUM)      // per chunk of a row: its scale, then its sum or its halves' sums
#else
#define CHUNK 16
#define SCALES 0
#define SUMS 0
#endif
#define CHUNKS (K / CHUNK)
#define ROW_BYTES (K / CHUNK * 32)
#define ITEMS (2 * TILE_W)
#define M_TILES (TILE_X / 32)
#define PIECES (TERMS * TILE_X * 4)            // 16-byte pieces of activations per step
#define OWN ((PIECES + ITEMS - 1) / ITEMS)     // pieces per work-item
#define MAGIC 0x4B400000                       // 1.5 * 2^23 as float bits; adding an integer to the bits adds it
#define MAGIC_FLOAT 12582912.0f

DEVICE uchar *piece(uchar *rows, int row, int p) { return rows + 64 * row + 16 * (p ^ ((row >> 1) & 3)); }

// Loads chunk c of a row of the matrix: 8 words, with their scales and minimums. Past the end of the row, zeros.
DEVICE void chunk_of(const uchar *w, size_t rows, size_t row, int c, int *q, float *s, float *m) {
  if (CHUNKS % 2 && c >= CHUNKS) {
    for (int i = 0; i < 8; i++) q[i] = 0;
    s[0] = s[1] = m[0] = m[1] = 0.0f;
    return;
  }
#ifdef QUANTIZED
  unpack_chunk(w, rows, row, c, q, s, m);
#else
  const int4 *from = (const int4 *)(w + (row * K + (size_t)c * CHUNK) * 2);
  for (int i = 0; i < 2; i++) {
    int4 v = from[i];
    q[4 * i] = v.x;
    q[4 * i + 1] = v.y;
    q[4 * i + 2] = v.z;
    q[4 * i + 3] = v.w;
  }
#endif
}

#ifdef QUANTIZED
// Adds a chunk to one 16 x 8 tile of results, in the order of operations of add_chunk, so that results are equal.
DEVICE void add_products(float *sum, const uint *a, const uint *b, const float *scales, const float *sums) {
#if HALVES == 1
  int dot[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
  mma_bytes_32(dot, a, b);
  for (int i = 0; i < 4; i++) {
    const float *w = scales + (i & 1), *x = sums + (i >> 1);
    sum[i] = FMA(w[0], x[0] * (AS_FLOAT(dot[i]) - MAGIC_FLOAT), sum[i]);
#if MINIMUM
    sum[i] = FMA(-w[2], x[2], sum[i]);
#endif
  }
#else
  int first[4] = {MAGIC, MAGIC, MAGIC, MAGIC}, second[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
  mma_bytes_16(first, a[0], a[1], b[0]);
  mma_bytes_16(second, a[2], a[3], b[1]);
  for (int i = 0; i < 4; i++) {
    const float *w = scales + (i & 1), *x = sums + (i >> 1);
    sum[i] = FMA(w[0], x[0] * (AS_FLOAT(first[i]) - MAGIC_FLOAT), sum[i]);
    sum[i] = FMA(w[2], x[0] * (AS_FLOAT(second[i]) - MAGIC_FLOAT), sum[i]);
#if MINIMUM
    sum[i] = FMA(-w[4], x[2], sum[i]);
    sum[i] = FMA(-w[6], x[4], sum[i]);
#endif
  }
#endif
}
#endif

KERNEL(ITEMS, tensor)(LINEAR_ARGUMENTS) {
  LOCAL_MEMORY
  uchar *wl = (uchar *)local_memory, *xl = wl + 2 * 64 * TILE_W;  // two steps of weights and of activations
  float *ws = (float *)(xl + 2 * 64 * TERMS * TILE_X), *xs = ws + 2 * 2 * SCALES * TILE_W;  // [step][chunk][which][row]
  int lane = ITEM & 31, g = lane >> 2, t = lane & 3;
  int x0 = (ITEM >> 5 & 1) * (TILE_X / 2), w0 = (ITEM >> 6) * 32;  // this warp's offsets in the tile
  int row = ITEM >> 1, chunk = ITEM & 1;                           // matrix row and chunk for this work-item
  BEGIN_TILE(TILE_X)
  size_t own_row = bias_at + smaller(GROUP_X * TILE_W + row, N - 1);
  uint from[OWN];  // bytes from x to each piece of this work-item
  for (int n = 0; n < OWN; n++) {
    int at = ITEM + n * ITEMS;
    from[n] = (uint)INPUT_ROW(at / 4 % TILE_X) * (4 * X_STRIDE) + at / (4 * TILE_X) * ROW_BYTES + at % 4 * 16;
  }
  float sum[M_TILES][4][4];
  for (int i = 0; i < M_TILES; i++)
    for (int j = 0; j < 4; j++)
      for (int n = 0; n < 4; n++) sum[i][j][n] = 0.0f;

  // Step -1 only fetches the input of step 0.
  for (int now = -1; now < (CHUNKS + 1) / 2; now++) {
    int next = now + 1, more = next < (CHUNKS + 1) / 2;
    uchar *wn = wl + (next & 1) * 64 * TILE_W, *xn = xl + (next & 1) * 64 * TERMS * TILE_X;
    if (more) {
      for (int n = 0; n < OWN; n++) {
        int at = ITEM + n * ITEMS, inside = 64 * next + at % 4 * 16 < ROW_BYTES;
        if (PIECES % ITEMS == 0 || at < PIECES)
          for (int i = 0; i < 16; i += COPY)
            copy_later(piece(xn, at / 4, at % 4) + i, (const uchar *)x + (inside ? from[n] + 64 * next + i : 0u), inside);
      }
      int q[8], c = 2 * next + chunk;
      float s[2], m[2];
      chunk_of(w, rows, own_row, c, q, s, m);
      for (int p = 0; p < 2; p++) {
        int4 v = {q[4 * p], q[4 * p + 1], q[4 * p + 2], q[4 * p + 3]};
        *(int4 *)piece(wn, row, 2 * chunk + p) = v;
      }
#ifdef QUANTIZED
      float *wv = ws + ((next & 1) * 2 + chunk) * SCALES * TILE_W + row;
      for (int k = 0; k < HALVES; k++) {
        wv[k * TILE_W] = s[k];
        if (MINIMUM) wv[(HALVES + k) * TILE_W] = m[k];
      }
      for (int at = row; at < TILE_X; at += TILE_W) {
        const float *r = x + (size_t)INPUT_ROW(at) * X_STRIDE + K / 4;
        float *xv = xs + ((next & 1) * 2 + chunk) * SUMS * TILE_X + at;
        int part = smaller(c, CHUNKS - 1);
        xv[0] = r[part];
#if MINIMUM
        r += K / 32 + 2 * part;
        xv[TILE_X] = HALVES == 1 ? r[0] + r[1] : r[0];
        if (HALVES == 2) xv[2 * TILE_X] = r[1];
#endif
      }
#endif
    }
    if (now >= 0) {
      uchar *wp = wl + (now & 1) * 64 * TILE_W, *xp = xl + (now & 1) * 64 * TERMS * TILE_X;
      for (int half = 0; half < 2; half++) {
        uint b[4][2];
        for (int j = 0; j < 4; j += 2)  // two tiles of 8 rows, with two pieces each
          load_matrices(b[j], piece(wp, w0 + 8 * j + (lane >> 4) * 8 + (lane & 7), 2 * half + (lane >> 3 & 1)));
#ifdef QUANTIZED
        const float *wv = ws + ((now & 1) * 2 + half) * SCALES * TILE_W + w0 + 2 * t;
        const float *xv = xs + ((now & 1) * 2 + half) * SUMS * TILE_X + x0 + g;
        float scales[4][2 * SCALES];
        for (int j = 0; j < 4; j++)
          for (int k = 0; k < SCALES; k++)
            for (int i = 0; i < 2; i++) scales[j][2 * k + i] = wv[k * TILE_W + 8 * j + i];
#endif
        for (int i = 0; i < M_TILES; i++) {
          uint a[4];
#ifdef QUANTIZED
          float sums[2 * SUMS];
          for (int k = 0; k < SUMS; k++)
            for (int n = 0; n < 2; n++) sums[2 * k + n] = xv[k * TILE_X + 16 * i + 8 * n];
#endif
          for (int term = 0; term < TERMS; term++) {
            load_matrices(a, piece(xp, term * TILE_X + x0 + 16 * i + (lane & 15), 2 * half + (lane >> 4)));
            for (int j = 0; j < 4; j++)
#ifdef QUANTIZED
              add_products(sum[i][j], a, b[j], scales[j], sums);
#else
              mma_halves(sum[i][j], a, b[j]);
#endif
          }
        }
      }
    }
    if (more) copies_done();
    BARRIER();
  }

  for (int i = 0; i < M_TILES; i++)
    for (int k = 0; k < 2; k++) {
      int at = x0 + 16 * i + 8 * k + g;
      if (first + at >= count) continue;
      int column = OUTPUT_ROW(at);
      float scale = 1.0f;
#ifndef QUANTIZED
      scale = x[(size_t)INPUT_ROW(at) * X_STRIDE + TERMS * K / 2];
#endif
      for (int j = 0; j < 4; j++)
        for (int n = 0; n < 2; n++) {
          int r = GROUP_X * TILE_W + w0 + 8 * j + 2 * t + n;
          if (r < N) finish(sum[i][j][2 * k + n] * scale, r, column, y, bias, residual, bias_at, factor);
        }
    }
}
