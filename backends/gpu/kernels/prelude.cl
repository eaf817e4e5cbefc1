// One kernel source, two languages: OpenCL C 1.2, and CUDA C++ compiled by NVRTC without any header. Rules for kernels:
// every pointer to memory is GLOBAL or LOCAL; no templates, overloads, vector types, plain char or long; halves are
// only stored; sizes are given by -D; all work-items of a group reach every barrier; sums have a fixed order. Shapes
// and factors are compile-time constants. With GENERIC they are run-time values, which every kernel gets as its first
// parameter (SHAPE_PARAMETER): then one compilation serves all models, for devices whose compiler is slow. A kernel
// that needs local memory ends its parameters with LOCAL_ARGUMENT and begins with LOCAL_MEMORY.
#ifdef __OPENCL_VERSION__
#pragma OPENCL FP_CONTRACT OFF
#define GLOBAL __global
#define LOCAL __local
#define TABLE __constant
#define RESTRICT restrict
#define DEVICE static inline
#define KERNEL(size, name) __kernel __attribute__((reqd_work_group_size(size, 1, 1))) void name
#define LOCAL_ARGUMENT , __local float *local_memory
#define LOCAL_MEMORY
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define SHARED_BARRIER() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)  // for data shared in global memory
#define ITEM ((int)get_local_id(0))
#define GROUP_X ((int)get_group_id(0))
#define GROUP_Y ((int)get_group_id(1))
#define GROUP_Z ((int)get_group_id(2))
#define FMA(a, b, c) fma((a), (b), (c))
#define SQRT(x) sqrt(x)
#define FLOOR_EVEN(x) rint(x)
#define FMAX(a, b) fmax((float)(a), (float)(b))
#define FMIN(a, b) fmin((float)(a), (float)(b))
#define AS_INT(x) as_int(x)
#define AS_FLOAT(x) as_float(x)
typedef char i8;
DEVICE float half_at(GLOBAL const uchar *p) { return vload_half(0, (GLOBAL const half *)p); }
DEVICE float half_bits(uint bits) { ushort h = (ushort)bits; return vload_half(0, (const half *)&h); }
DEVICE void store_half(float v, GLOBAL ushort *p) { vstore_half_rte(v, 0, (GLOBAL half *)p); }
#if defined(cl_khr_integer_dot_product)
#define DOT4(a, b, c) ((c) + dot_4x8packed_ss_int((uint)(a), (uint)(b)))
#else
DEVICE int DOT4(int a, int b, int c) {
  char4 x = as_char4(a), y = as_char4(b);
  return c + (int)x.s0 * y.s0 + (int)x.s1 * y.s1 + (int)x.s2 * y.s2 + (int)x.s3 * y.s3;
}
#endif
// Reductions over segments, which are 32 neighbouring work-items. `s` has room for one value per work-item of the
// group.
#define SEGMENT(name, type, first, combine) \
  DEVICE type name(type v, LOCAL float *s) { \
    LOCAL type *t = (LOCAL type *)s; \
    for (int o = first; o > 0; o >>= 1) { \
      t[ITEM] = v; BARRIER(); type w = t[ITEM ^ o]; BARRIER(); v = combine; } \
    return v; }
#else  // CUDA
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef signed char i8;
#define GLOBAL
#define LOCAL
#define RESTRICT __restrict__
#define DEVICE static __device__ __forceinline__
#define TABLE __device__ const
#ifdef GROUPS  // minimum number of work-groups that fit on a multiprocessor at a time
#define KERNEL(size, name) extern "C" __global__ void __launch_bounds__(size, GROUPS) name
#else
#define KERNEL(size, name) extern "C" __global__ void __launch_bounds__(size) name
#endif
#define LOCAL_ARGUMENT
#define LOCAL_MEMORY extern __shared__ float local_memory[];
#define BARRIER() __syncthreads()
#define SHARED_BARRIER() __syncthreads()
#define ITEM ((int)threadIdx.x)
#define GROUP_X ((int)blockIdx.x)
#define GROUP_Y ((int)blockIdx.y)
#define GROUP_Z ((int)blockIdx.z)
#define FMA(a, b, c) fmaf((a), (b), (c))
#define SQRT(x) sqrtf(x)
#define FLOOR_EVEN(x) rintf(x)
#define FMAX(a, b) fmaxf((a), (b))
#define FMIN(a, b) fminf((a), (b))
#define AS_INT(x) __float_as_int(x)
#define AS_FLOAT(x) __int_as_float(x)
#ifndef HOST_EMULATION
DEVICE float half_bits(uint bits) {
  float f;
  ushort h = (ushort)bits;
  asm("{.reg .b16 t; mov.b16 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "h"(h));
  return f;
}
DEVICE void store_half(float v, ushort *p) {
  ushort h;
  asm("{.reg .b16 t; cvt.rn.f16.f32 t, %1; mov.b16 %0, t;}" : "=h"(h) : "f"(v));
  *p = h;
}
#endif
DEVICE float half_at(const uchar *p) { return half_bits(*(const ushort *)p); }
#define DOT4(a, b, c) __dp4a((int)(a), (int)(b), (int)(c))
#define SEGMENT(name, type, first, combine) \
  DEVICE type name(type v, float *) { \
    for (int o = first; o > 0; o >>= 1) { type w = __shfl_xor_sync(0xffffffffu, v, o); v = combine; } \
    return v; }
#endif

#ifdef GENERIC
#define SHAPE_PARAMETER GLOBAL const int *shape,
#define SHAPE shape,
#else
#define SHAPE_PARAMETER
#define SHAPE
#endif

SEGMENT(sum32, float, 16, v + w)
SEGMENT(sum16, int, 8, v + w)
SEGMENT(max32, float, 16, FMAX(v, w))
#if !defined(__OPENCL_VERSION__) && __CUDA_ARCH__ >= 800
DEVICE uint umax32(uint v, float *) { return __reduce_max_sync(0xffffffffu, v); }  // a single instruction
#else
SEGMENT(umax32, uint, 16, v > w ? v : w)
#endif

// Reductions over a whole work-group of SIZE work-items: over each segment, then over the segments in order.
#define GROUP_REDUCTION(name, segment, combine) \
  DEVICE float name(float v, LOCAL float *s, int size) { \
    v = segment(v, s); BARRIER(); \
    if ((ITEM & 31) == 0) s[ITEM >> 5] = v; \
    BARRIER(); \
    v = s[0]; \
    for (int i = 1; i < size >> 5; i++) { float w = s[i]; v = combine; } \
    BARRIER(); \
    return v; }
GROUP_REDUCTION(group_sum, sum32, v + w)
GROUP_REDUCTION(group_max, max32, FMAX(v, w))

#define LOWEST (-3.402823466e38f)
#define IS_NAN(x) ((x) != (x))

DEVICE uint word_at(GLOBAL const uchar *p, int at) { return *(GLOBAL const uint *)(p + at); }
DEVICE uint short_at(GLOBAL const uchar *p, int at) { return (uint)*(GLOBAL const ushort *)(p + at); }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

// Subtracts n from each of four bytes below 128 in a word; the results are int8.
DEVICE int less(uint w, uint n) { return (int)(((w | 0x80808080u) - n * 0x01010101u) ^ 0x80808080u); }
// Puts four bits into the lowest bits of four bytes.
DEVICE uint spread(uint bits) { return ((bits & 15u) * 0x00204081u) & 0x01010101u; }
DEVICE uint nibbles(uint w, int high) { return (w >> (4 * high)) & 0x0F0F0F0Fu; }
DEVICE int byte_of(int word, int i) { return (int)((uint)word << (24 - 8 * i)) >> 24; }

// e^x as in the CPU backend: range reduction and the polynomial of Cephes' expf, relative error below 2e-7. 0 below
// -87, no infinity above 88; e^0 is 1; NaN stays NaN. The parts are y and power, with e^x = (1 + y) * power.
DEVICE float exponential_parts(float x, float *power) {
  float c = x > 88.0f ? 88.0f : (x < -87.0f ? -87.0f : x);
  float n = FLOOR_EVEN(c * 1.44269504f);
  float r = FMA(n, 2.12194440e-4f, FMA(n, -0.693359375f, c));
  float p = 1.9875691500e-4f;
  p = FMA(p, r, 1.3981999507e-3f);
  p = FMA(p, r, 8.3334519073e-3f);
  p = FMA(p, r, 4.1665795894e-2f);
  p = FMA(p, r, 1.6666665459e-1f);
  p = FMA(p, r, 5.0000001201e-1f);
  *power = AS_FLOAT((IS_NAN(x) ? 127 : (int)n + 127) << 23);
  return FMA(p, r * r, r);
}
DEVICE float exponential(float x) {
  float power, y = exponential_parts(x, &power) + 1.0f;
  return x < -87.0f ? 0.0f : y * power;
}
DEVICE float exponential_less_one(float x) {
  float power, y = exponential_parts(x, &power);
  return FMA(y, power, power - 1.0f);
}
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
DEVICE float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }
DEVICE float silu(float x) { return x * sigmoid(x); }
DEVICE float gelu(float x) { return x * sigmoid(FMA(x * x * x, 0.044715f, x) * 1.5957691216057308f); }
DEVICE float identity(float x) { return x; }
DEVICE float relu(float x) { return x < 0.0f ? 0.0f : x; }
DEVICE float relu2(float x) { return relu(x) * relu(x); }
// log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x|, by the polynomial of Cephes' logf; a large t is halved.
DEVICE float softplus(float x) {
  float t = exponential(x < 0.0f ? x : -x);
  int large = t > 0.4142135f;
  float z = large ? (t - 1.0f) * 0.5f : t;
  float p = 7.0376836292e-2f;
  p = FMA(p, z, -1.1514610310e-1f);
  p = FMA(p, z, 1.1676998740e-1f);
  p = FMA(p, z, -1.2420140846e-1f);
  p = FMA(p, z, 1.4249322787e-1f);
  p = FMA(p, z, -1.6668057665e-1f);
  p = FMA(p, z, 2.0000714765e-1f);
  p = FMA(p, z, -2.4999993993e-1f);
  p = FMA(p, z, 3.3333331174e-1f);
  return relu(x) + (FMA(z * z, FMA(p, z, -0.5f), z) + (large ? 0.69314718f : 0.0f));
}
DEVICE float signed_root(float x) {
  float size = x < 0.0f ? -x : x, root = SQRT(size < 1e-6f ? 1e-6f : size);
  return x < 0.0f ? -root : x == 0.0f ? 0.0f : root;
}
DEVICE float xielu(float x, float positive, float negative, float beta, float eps) {
  float below = negative * (exponential_less_one(x > eps ? eps : x) - x);
  return FMA(beta, x, x > 0.0f ? positive * x * x : below);
}
// Activations with limits. With this operand order, NaN propagates.
DEVICE float bounded(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }
DEVICE float swiglu_clamp(float gate, float up, float limit) {
  return silu(gate > limit ? limit : gate) * bounded(up, limit);
}
DEVICE float silu_clamp(float gate, float up, float limit) {
  float g = silu(gate);
  return (g > limit ? limit : g) * bounded(up, limit);
}
DEVICE float situ(float gate, float up, float limit) {
  return limit * hyperbolic_tangent(gate / limit) * sigmoid(gate) * (limit * hyperbolic_tangent(up / limit));
}
// The activation of gpt-oss.
DEVICE float swiglu_oai(float gate, float up) {
  float g = gate > 7.0f ? 7.0f : gate;
  return g * sigmoid(1.702f * g) * (bounded(up, 7.0f) + 1.0f);
}

// The step buffer: device memory that changes in every step. It holds 8 ints (rows, logit rows, blocks per row of the
// block tables and of the sliding window's tables; offset, row stride and axis stride of positions on several axes),
// then arrays of MAX_ROWS ints.
#define TOKENS_OF(step) ((step) + 8)
#define POSITIONS_OF(step) ((step) + 8 + MAX_ROWS)
#define SEQUENCE_OF(step) ((step) + 8 + 3 * MAX_ROWS)
#define TILES_OF(step) ((step) + 8 + 4 * MAX_ROWS)
#define SLOTS_OF(step) ((step) + 8 + SLOTS_AT * MAX_ROWS)  // SLOTS_AT: 2, or 6 for layers with separate blocks
#define ENDS_OF(step) ((step) + 8 + 6 * MAX_ROWS)  // for non-causal plans, whose layers never have separate blocks
#define LOGIT_INDEX_OF(step) ((step) + 8 + 7 * MAX_ROWS)
