// Run CUDA kernels on the host. This file is prepended to a kernel's source and compiled as C++ with -DHOST_EMULATION.
// Every thread of a block is a fiber of one OS thread. Fibers run one after another, each up to its next barrier or warp
// operation, so a read without the required barrier finds no data. A block's shared memory starts as NaNs, asynchronous
// copies complete as late as allowed, and accesses must be aligned. Tensor-core fragments follow the PTX manual.
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

// Declarations that replace <math.h> and <utility>, which take twice as long to compile as a kernel.
extern "C" {
float expf(float), fmaf(float, float, float), fmaxf(float, float), fminf(float, float), logf(float), rintf(float);
float sqrtf(float);
}

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__

struct dim3_ { int x, y, z; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
alignas(128) float local_memory[1 << 16];

namespace emulated {
const int THREADS = 1024, STACK = 1 << 16;
struct Copy { unsigned char *to, bytes[16]; int size; };
struct Fiber { jmp_buf place; int begun, state; Copy copies[64]; int pending; };  // begun: also in an earlier block; state 0: running, 1: waiting, 2: done
Fiber fibers[THREADS];
unsigned slots[THREADS][8];  // values that a lane shares with its warp
int size, now, at_barrier, at_warp[THREADS / 32], finished;
const char *failure;
jmp_buf scheduler;
char *stacks;

// Not swapcontext, which makes a system call for the signal mask each time.
void leave() { if (!_setjmp(fibers[now].place)) _longjmp(scheduler, 1); }
inline void rest() { fibers[now].state = 1; leave(); }
inline void wake(int from, int to) { for (int i = from; i < to; i++) if (fibers[i].state == 1) fibers[i].state = 0; }
inline void stop(const char *why) {  // stop the grid from a thread
  failure = why;
  _longjmp(scheduler, 1);
}
}  // namespace emulated
// Called for a misaligned access by code compiled with -fsanitize=alignment. A GPU would fault.
extern "C" void __ubsan_handle_type_mismatch_v1(void *, void *) { emulated::failure = "an access that is not aligned"; }
namespace emulated {
inline void block_barrier() {
  if (++at_barrier == size) { at_barrier = 0; wake(0, size); } else rest();
}
inline void warp_barrier() {
  int warp = now / 32;
  if (++at_warp[warp] == 32) { at_warp[warp] = 0; wake(32 * warp, 32 * warp + 32); } else rest();
}
// Every lane contributes `count` words, and gets the result of `read` on all words of its warp.
template <class T, class F> T among(const void *own, int count, F read) {
  memcpy(slots[now], own, 4 * count);
  warp_barrier();
  T result = read(slots + now / 32 * 32);
  warp_barrier();
  return result;
}
inline float half_float(unsigned bits) {
  unsigned short h = (unsigned short)bits; _Float16 v; memcpy(&v, &h, 2); return (float)v;
}
inline unsigned float_half(float x) { _Float16 v = (_Float16)x; unsigned short h; memcpy(&h, &v, 2); return h; }
}  // namespace emulated

struct Index { struct { operator int() const { return emulated::now; } } x; };
static Index threadIdx;
static dim3_ blockIdx;
inline void __syncthreads() { emulated::block_barrier(); }
inline float __int_as_float(int v) { float r; memcpy(&r, &v, 4); return r; }
inline int __float_as_int(float v) { int r; memcpy(&r, &v, 4); return r; }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(signed char)(a >> i) * (signed char)(b >> i);
  return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
inline float half_bits(unsigned bits) { return emulated::half_float(bits); }
inline void store_half(float v, unsigned short *p) { *p = (unsigned short)emulated::float_half(v); }
template <class T> T __shfl_xor_sync(unsigned, T v, int o) {
  int other = (emulated::now & 31) ^ o;
  return emulated::among<T>(&v, 1, [=](unsigned (*of)[8]) { T r; memcpy(&r, of[other], 4); return r; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  return emulated::among<unsigned>(&v, 1, [](unsigned (*of)[8]) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r = of[i][0] > r ? of[i][0] : r;
    return r;
  });
}

// The instructions of instructions.cl. EMULATED_COPY is the size of a copy in bytes.
#ifdef EMULATED_COPY
inline void cp_async(void *to, const void *from, int inside) {
  auto &f = emulated::fibers[emulated::now];
  if (f.pending == 64) emulated::stop("more copies under way than expected");
  if ((uintptr_t)to % EMULATED_COPY || (inside && (uintptr_t)from % EMULATED_COPY)) emulated::stop("a copy is not aligned");
  auto &c = f.copies[f.pending++];
  c.to = (unsigned char *)to;
  c.size = EMULATED_COPY;
  memset(c.bytes, 0, 16);
  if (inside) memcpy(c.bytes, from, EMULATED_COPY);
}
inline void cp_async_wait_all() {
  auto &f = emulated::fibers[emulated::now];
  for (int i = 0; i < f.pending; i++) memcpy(f.copies[i].to, f.copies[i].bytes, f.copies[i].size);
  f.pending = 0;
}
inline void ldmatrix_x4(unsigned *r, const void *row) {
  if ((uintptr_t)row % 16) emulated::stop("a row of a matrix is not aligned");
  uint4 v = emulated::among<uint4>(&row, 2, [](unsigned (*of)[8]) {
    unsigned found[4];
    for (int i = 0; i < 4; i++) {
      const unsigned *line;
      memcpy(&line, of[8 * i + (emulated::now & 31) / 4], 8);
      found[i] = line[emulated::now & 3];
    }
    return uint4{found[0], found[1], found[2], found[3]};
  });
  r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}
// d (8 * eights, 8) += a b. Elements have `bits` bits, a lane has `quads` registers of b, and `read` converts elements.
template <class D, class F>
void multiply(D *d, const unsigned *a, const unsigned *b, int eights, int bits, int quads, F read) {
  unsigned *own = emulated::slots[emulated::now];
  memcpy(own, a, 4 * eights * quads);
  memcpy(own + 4, b, 4 * quads);
  emulated::warp_barrier();
  unsigned (*of)[8] = emulated::slots + emulated::now / 32 * 32;
  int g = (emulated::now & 31) >> 2, t = emulated::now & 3, each = 32 / bits;
  for (int i = 0; i < 2 * eights; i++) {
    int n = 2 * t + (i & 1);
    D s = 0;
    for (int k = 0; k < 4 * each * quads; k++) {
      int lane = k / each & 3, quad = k / (4 * each), shift = bits * (k % each);
      s += (D)read(of[g * 4 + lane][eights * quad + (i >> 1)] >> shift) * (D)read(of[4 * n + lane][4 + quad] >> shift);
    }
    d[i] += s;
  }
  emulated::warp_barrier();
}
inline int byte_number(unsigned v) { return (signed char)v; }
inline float bfloat_number(unsigned v) { return __int_as_float((int)(v << 16)); }
inline void mma_m8n8k16_s8(int *d, unsigned a, unsigned b) { multiply(d, &a, &b, 1, 8, 1, byte_number); }
inline void mma_m16n8k16_s8(int *d, unsigned a0, unsigned a1, unsigned b) {
  unsigned a[2] = {a0, a1};
  multiply(d, a, &b, 2, 8, 1, byte_number);
}
inline void mma_m16n8k32_s8(int *d, const unsigned *a, const unsigned *b) { multiply(d, a, b, 2, 8, 2, byte_number); }
inline void mma_m16n8k8_f16(float *d, unsigned a0, unsigned a1, unsigned b) {
  unsigned a[2] = {a0, a1};
  multiply(d, a, &b, 2, 16, 1, emulated::half_float);
}
inline void mma_m16n8k16_f16(float *d, const unsigned *a, const unsigned *b) {
  multiply(d, a, b, 2, 16, 2, emulated::half_float);
}
inline void mma_m16n8k16_bf16(float *d, const unsigned *a, const unsigned *b) { multiply(d, a, b, 2, 16, 2, bfloat_number); }
#endif

namespace emulated {
template <int... I> struct Places {};
template <int N, int... I> struct Counted : Counted<N - 1, N - 1, I...> {};
template <int... I> struct Counted<0, I...> { typedef Places<I...> places; };
template <class... A, int... I> void call(void (*f)(A...), void **a, Places<I...>) { f((A)a[I]...); }
template <class... A> void call(void (*f)(A...), void **a) { call(f, a, typename Counted<sizeof...(A)>::places()); }
void (*body)(void **);
void **arguments;
void enter() {
  for (;;) {
    body(arguments);
    if (fibers[now].pending) failure = "a thread ends before its copies do";
    fibers[now].state = 2;
    finished++;
    leave();
  }
}
// Resume a fiber, which returns by calling `leave`.
void resume() {
  auto &f = fibers[now];
  if (f.begun) _longjmp(f.place, 1);
  f.begun = 1;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks + (size_t)now * STACK;
  context.uc_stack.ss_size = STACK;
  makecontext(&context, enter, 0);
  setcontext(&context);
}
// Run the threads of a block to their end. With `backwards`, the last thread runs first.
void run_block(int threads, int backwards) {
  memset(at_warp, 0, sizeof at_warp);
  finished = at_barrier = 0;
  for (int i = 0; i < threads; i++) fibers[i].state = fibers[i].pending = 0;
  while (finished < threads) {
    int ran = 0;
    for (int i = 0; i < threads; i++) {
      now = backwards ? threads - 1 - i : i;
      if (fibers[now].state) continue;
      ran = 1;
      if (!_setjmp(scheduler)) resume();
      if (failure) return;
    }
    if (!ran) { failure = "threads wait for threads that have ended"; return; }
  }
}
// Run the blocks of a grid one after another. Return the error, or null.
const char *launch(void (*f)(void **), void **a, const int *grid, int threads, int local_bytes, int backwards) {
  if (threads > THREADS || threads % 32 || local_bytes > (int)sizeof local_memory) return "a block that is too large";
  if (!stacks) {
    stacks = (char *)malloc((size_t)THREADS * STACK);
    memset(local_memory, 0xFF, sizeof local_memory);
  }
  auto beyond = (const char *)local_memory + local_bytes / 4 * 4;
  size_t rest = sizeof local_memory - local_bytes / 4 * 4;
  body = f, arguments = a, size = threads, failure = nullptr;
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0] && !failure; x++) {
        blockIdx = {x, y, z};
        memset(local_memory, 0xFF, local_bytes);
        run_block(threads, backwards);
        if (!failure && rest && (*(const signed char *)beyond != -1 || memcmp(beyond, beyond + 1, rest - 1)))
          failure = "a store beyond the shared memory of the block";
      }
  if (failure) {  // abandon the running fibers
    for (auto &f : fibers) f.begun = 0;
    memset(local_memory, 0xFF, sizeof local_memory);
  }
  return failure;
}
}  // namespace emulated
