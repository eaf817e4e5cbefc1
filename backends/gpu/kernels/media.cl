// Splices the embeddings of media tokens, whose ids are negative, into the rows of a batch. Constants: WIDTH, STRIDE
// (of rows of x), MEDIA_STRIDE, START (first column of a media row), ADD.

#ifdef SPLICE
KERNEL(128, splice_rows)(SHAPE_PARAMETER GLOBAL const float *x, GLOBAL const float *media, GLOBAL const int *step,
                         GLOBAL float *y, GLOBAL float *blocks LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  int i = GROUP_X * 128 + ITEM, own = smaller(i, WIDTH - 1);
  float v = x[(size_t)GROUP_Y * STRIDE + own];
  if (TOKENS_OF(step)[GROUP_Y] < 0) {
    float m = media[(size_t)GROUP_Y * MEDIA_STRIDE + START + own];
    v = ADD ? v + m : m;
  }
  deliver(v, i, WIDTH, y + (size_t)GROUP_Y * STRIDE, blocks + (size_t)GROUP_Y * BLOCKS_STRIDE, local_memory);
}
#endif
