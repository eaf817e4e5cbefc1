// CUDA only: asynchronous copies, matrix loads from shared memory, tensor cores. The first part wraps each instruction
// in a function that host emulation replaces (tests/backends/gpu/emulation.h). The second part holds the functions that
// kernels call. sm_75 has smaller product shapes, with operands in the same registers, and no asynchronous copies.
#define AMPERE (__CUDA_ARCH__ >= 800)

#ifndef HOST_EMULATION
DEVICE uint shared_address(const void *p) { return (uint)__cvta_generic_to_shared(p); }

DEVICE void ldmatrix_x4(uint *r, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

#if AMPERE
DEVICE void cp_async(void *to, const void *from, int inside) {
#if COPY == 16
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside * 16)
               : "memory");
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(COPY),
               "r"(inside * COPY)
               : "memory");
#endif
}

DEVICE void cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE void mma_m16n8k16_s8(int *d, uint a0, uint a1, uint b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

DEVICE void mma_m16n8k32_s8(int *d, const uint *a, const uint *b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void mma_m16n8k16_f16(float *d, const uint *a, const uint *b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void mma_m16n8k16_bf16(float *d, const uint *a, const uint *b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
DEVICE void mma_m8n8k16_s8(int *d, uint a, uint b) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a), "r"(b));
}

DEVICE void mma_m16n8k8_f16(float *d, uint a0, uint a1, uint b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}
#endif
#endif

// Copies COPY bytes (4, 8 or 16, with this alignment) to shared memory. If `inside` is 0, it writes zeros and reads
// nothing.
DEVICE void copy_later(void *to, const void *from, int inside) {
#if AMPERE
  cp_async(to, from, inside);
#else
  for (int i = 0; i < COPY / 4; i++) ((int *)to)[i] = inside ? ((const int *)from)[i] : 0;
#endif
}

DEVICE void copies_done(void) {
#if AMPERE
  cp_async_wait_all();
#endif
}

// Loads four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 give the addresses of the rows (16 bytes) of
// matrix i; lane l gets elements 2 (l % 4) and the next one in row l / 4 of each matrix.
DEVICE void load_matrices(uint *r, const void *row) { ldmatrix_x4(r, row); }

// d (16, 8) += a (16, 16) b (16, 8) of int8. Lane l holds rows l / 4 and l / 4 + 8 of a, four bytes from 4 (l % 4) on;
// column l / 4 of b; and the rows of a in d, columns 2 (l % 4) and the next.
DEVICE void mma_bytes_16(int *d, uint a0, uint a1, uint b) {
#if AMPERE
  mma_m16n8k16_s8(d, a0, a1, b);
#else
  mma_m8n8k16_s8(d, a0, b);
  mma_m8n8k16_s8(d + 2, a1, b);
#endif
}

// The same product with a depth of 32 bytes: a[2], a[3] and b[1] hold the second 16 bytes.
DEVICE void mma_bytes_32(int *d, const uint *a, const uint *b) {
#if AMPERE
  mma_m16n8k32_s8(d, a, b);
#else
  mma_bytes_16(d, a[0], a[1], b[0]);
  mma_bytes_16(d, a[2], a[3], b[1]);
#endif
}

// d (16, 8) += a (16, 16) b (16, 8) of 16-bit floats in the same registers, with two floats instead of four bytes; sums
// are in float32.
DEVICE void mma_halves(float *d, const uint *a, const uint *b) {
#if !AMPERE  // sm_75 supports only F16
  for (int i = 0; i < 2; i++) mma_m16n8k8_f16(d, a[2 * i], a[2 * i + 1], b[i]);
#elif defined(FORMAT_BF16)
  mma_m16n8k16_bf16(d, a, b);
#else
  mma_m16n8k16_f16(d, a, b);
#endif
}
