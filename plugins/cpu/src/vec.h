// A vector of fp32 lanes and the operations that kernels need on it, for the instruction set of the compilation.
//
// Every operation is one IEEE operation: -ffp-contract=off keeps the compiler from contracting a*b+c by itself. So the
// result that a kernel computes for a row does not depend on where the row is. Different instruction sets may give
// different bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef TRTSPEC_ISA
#error "compile with -DTRTSPEC_ISA=<namespace of this instruction set>"
#endif

#define INLINE inline __attribute__((always_inline))

namespace trtspec::TRTSPEC_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t UVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HVec __attribute__((vector_size(2 * LANES)));

// Element types as they are in memory. A half-precision number is stored as its bits.
struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

template <class T> INLINE T load_as(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// Pin a value to a register: the compiler must keep it there and may assume nothing about it.
template <class T> INLINE void pin(T& in_register) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(in_register));
#elif defined(__SSE2__)
  asm volatile("" : "+x"(in_register));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(in_register));
#endif
}

INLINE Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, also for -0: the compiler leaves it out

// a * b + c, rounded once if the hardware can do so.
INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

// Sum of all lanes, added up in a fixed tree.
INLINE float sum(Vec v) {
  float lanes[LANES];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Swap lanes: lane i of the result is lane i ^ distance of v.
template <int distance, size_t... I> INLINE Vec swap_lanes(Vec v, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, int(I ^ distance)...);
#else
  return __builtin_shuffle(v, IVec{int32_t(I ^ distance)...});
#endif
}

template <int distance = LANES / 2> INLINE float highest(Vec v) {
  if constexpr (distance == 0) return v[0];
  else return highest<distance / 2>(max(v, swap_lanes<distance>(v, std::make_index_sequence<LANES>())));
}

// Reduce all lanes with op. Integers allow any order.
template <int distance = LANES / 2, class Op> INLINE int32_t fold(IVec v, Op op) {
  if constexpr (distance == 0) return v[0];
  else return fold<distance / 2>(op(v, (IVec)swap_lanes<distance>((Vec)v, std::make_index_sequence<LANES>())), op);
}

INLINE int32_t sum(IVec v) {
  return fold(v, [](IVec a, IVec b) __attribute__((always_inline)) { return a + b; });
}
INLINE int32_t highest(IVec v) {
  return fold(v, [](IVec a, IVec b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// Return whether any lane of this comparison is true.
INLINE bool any(IVec mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__SSE2__)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= mask[i];
  return found != 0;
#endif
}

// Mask of lanes: all ones in the lanes whose bit of `bits` is set.
INLINE IVec lanes_of(uint64_t bits) {
  IVec place;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) place[i] = 1 << i;
  return ((IVec{} + int32_t(bits & 0xffff)) & place) != 0;
}

// -- loads and stores of LANES elements, converted to and from fp32 --------------------------------------------------

INLINE Vec load(const float* from) { return load_as<Vec>(from); }

INLINE Vec load(const BFloat16* from) {
#if defined(__AVX512F__)  // convertvector would work on half a vector at a time
  const UVec wide = (UVec)_mm512_cvtepu16_epi32(load_as<__m256i>(from));
#elif defined(__AVX2__)
  const UVec wide = (UVec)_mm256_cvtepu16_epi32(load_as<__m128i>(from));
#else
  const UVec wide = __builtin_convertvector(load_as<HVec>(from), UVec);
#endif
  return (Vec)(wide << 16);
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  return load_as<float>(&bits);
}

INLINE float to_float(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  uint32_t bits = (magnitude << 13) + 0x38000000;                            // rebias the exponent by 112
  if (magnitude >= 0x7c00) bits += 0x38000000;                               // inf and NaN
  if (magnitude < 0x0400) {                                                  // zero and subnormals: magnitude * 2^-24
    const float small = float(magnitude) * 5.9604644775390625e-8f;
    bits = load_as<uint32_t>(&small);
  }
  bits |= sign;
  return load_as<float>(&bits);
}

INLINE Vec load(const Half* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
  Vec v;
  for (int i = 0; i < LANES; ++i) v[i] = to_float(from[i]);
  return v;
#endif
}

INLINE Vec load(const uint8_t* from) {
#if defined(__AVX512F__)
  const IVec wide = (IVec)_mm512_cvtepu8_epi32(load_as<__m128i>(from));
#elif defined(__AVX2__)
  const IVec wide = (IVec)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load_as<int64_t>(from)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  const IVec wide = __builtin_convertvector(load_as<Bytes>(from), IVec);
#endif
  return __builtin_convertvector(wide, Vec);
}

INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// Round to the nearest number, ties to even; NaN stays NaN.
INLINE void store(BFloat16* to, Vec v) {
#if defined(__AVX512BF16__)
  constexpr int DENORMAL = 0x20;  // the class of denormals, which the instruction takes for 0
  if (!_mm512_fpclass_ps_mask((__m512)v, DENORMAL)) [[likely]] {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(to, &narrow, sizeof narrow);
    return;
  }
#endif
  const UVec bits = (UVec)v;
  const UVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const UVec quiet = (bits >> 16) | 0x40;
  const HVec narrow = __builtin_convertvector((UVec)(v != v ? (IVec)quiet : (IVec)rounded), HVec);
  std::memcpy(to, &narrow, sizeof narrow);
}

INLINE Half to_half(float x) {
  const uint32_t bits = load_as<uint32_t>(&x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};              // NaN
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};             // rounds past 65504
  if (magnitude < 0x38800000) {                                              // subnormal: a multiple of 2^-24
    const float scaled = std::nearbyint(load_as<float>(&magnitude) * 16777216.0f);
    return {uint16_t(sign | uint32_t(scaled))};
  }
  return {uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13))};
}

INLINE void store(Half* to, Vec v) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(to, &narrow, sizeof narrow);
#elif defined(__F16C__)
  const __m128i narrow = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(to, &narrow, sizeof narrow);
#else
  for (int i = 0; i < LANES; ++i) to[i] = to_half(v[i]);
#endif
}

// Store integers from -128 to 127.
INLINE void store(int8_t* to, IVec v) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
  std::memcpy(to, &bytes, sizeof bytes);
#elif defined(__AVX2__)
  const __m256i shorts = _mm256_packs_epi32((__m256i)v, (__m256i)v), bytes = _mm256_packs_epi16(shorts, shorts);
  const int32_t halves[] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
  std::memcpy(to, halves, sizeof halves);
#else
  for (int i = 0; i < LANES; ++i) to[i] = int8_t(v[i]);
#endif
}

// Load the first n < LANES elements; the other lanes are 0.
template <class T> INLINE Vec load(const T* from, int n) {
  T padded[LANES] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load(padded);
}

template <class T> INLINE void store(T* to, Vec v, int n) {
  T padded[LANES];
  store(padded, v);
  std::memcpy(to, padded, n * sizeof(T));
}

// -- functions -------------------------------------------------------------------------------------------------------

// y * 2^n for a whole n, |n| <= 252.
INLINE Vec scale_by_power(Vec y, Vec n) {
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  // In two steps, because 2^n itself may not be an fp32 number. If y is NaN, n is some number and the result stays NaN.
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: the low bits of magic + n are n
  const IVec whole = (IVec)((UVec)(magic + n) - (UVec)magic), half = whole >> 1;
  const Vec first = (Vec)(((UVec)half + 127) << 23), second = (Vec)(((UVec)whole - (UVec)half + 127) << 23);
  return y * first * second;
#endif
}

// e^x within 1.01 ulp: 0 from -104 down, inf from 89 up, NaN for NaN, exactly 1 for 0.
INLINE Vec exp(Vec x) {
  x = min(splat(89.0f), max(splat(-104.0f), x));  // constants are the first operands, so that NaN stays
  // x = n ln 2 + r, |r| <= ln 2 / 2. ln 2 is split into two parts, and n times the first part is exact.
  const Vec magic = splat(12582912.0f);
  const Vec n = fma(x, splat(1.44269504f), magic) - magic;
  const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Vec p = splat(1.9875691500e-4f);  // the polynomial of Cephes' expf
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return scale_by_power(fma(p, r * r, r) + 1.0f, n);
}

// tanh x within 3 ulp; NaN for NaN.
INLINE Vec tanh(Vec x) {
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);  // the polynomial of Cephes' tanhf
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const Vec small = fma(p * square, x, x), large = 1.0f - 2.0f / (exp(x + x) + 1.0f);
  return square < splat(0.625f * 0.625f) ? small : large;
}

// -- transposing a square of LANES x LANES ---------------------------------------------------------------------------

// Interleave a and b lane by lane: a[from], b[from], a[from + 1], b[from + 1], ...
template <int from, size_t... I> INLINE Vec interleave(Vec a, Vec b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, int(from + I / 2 + I % 2 * LANES)...);
#else
  return __builtin_shuffle(a, b, IVec{int32_t(from + I / 2 + I % 2 * LANES)...});
#endif
}

// Transpose: lane i of row j goes to lane j of row i. The lanes may hold any bits.
#if defined(__AVX2__)
// First the squares of 4 x 4 within the quarters (or halves) of each four rows, then the quarters. No instruction needs
// a vector of indices, so all rows stay in registers. (With such instructions 16 rows took twice as long.)
INLINE void transpose(Vec (&rows)[LANES]) {
  constexpr int QUARTERS = LANES / 4;
  Vec columns[4][QUARTERS];  // lanes 4 * m + k of columns[k][g]: lane 4 * m + k of rows [4 * g, 4 * g + 4)
#pragma GCC unroll 4
  for (int g = 0; g < QUARTERS; ++g) {
    Vec* const four = rows + 4 * g;
#if defined(__AVX512F__)
    const auto low = [](Vec a, Vec b) { return (__m512d)_mm512_unpacklo_ps((__m512)a, (__m512)b); };
    const auto high = [](Vec a, Vec b) { return (__m512d)_mm512_unpackhi_ps((__m512)a, (__m512)b); };
#define INTERLEAVED(half, a, b) (Vec)_mm512_unpack##half##_pd(a, b)
#else
    const auto low = [](Vec a, Vec b) { return (__m256d)_mm256_unpacklo_ps((__m256)a, (__m256)b); };
    const auto high = [](Vec a, Vec b) { return (__m256d)_mm256_unpackhi_ps((__m256)a, (__m256)b); };
#define INTERLEAVED(half, a, b) (Vec)_mm256_unpack##half##_pd(a, b)
#endif
    const auto low01 = low(four[0], four[1]), low23 = low(four[2], four[3]);
    const auto high01 = high(four[0], four[1]), high23 = high(four[2], four[3]);
    columns[0][g] = INTERLEAVED(lo, low01, low23);
    columns[1][g] = INTERLEAVED(hi, low01, low23);
    columns[2][g] = INTERLEAVED(lo, high01, high23);
    columns[3][g] = INTERLEAVED(hi, high01, high23);
#undef INTERLEAVED
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
#if defined(__AVX512F__)
#define QUARTERS_OF(a, b, which) _mm512_shuffle_f32x4((__m512)(a), (__m512)(b), which)
    const auto low01 = QUARTERS_OF(columns[k][0], columns[k][1], 0x44);
    const auto low23 = QUARTERS_OF(columns[k][2], columns[k][3], 0x44);
    const auto high01 = QUARTERS_OF(columns[k][0], columns[k][1], 0xee);
    const auto high23 = QUARTERS_OF(columns[k][2], columns[k][3], 0xee);
    rows[k] = (Vec)QUARTERS_OF(low01, low23, 0x88);
    rows[4 + k] = (Vec)QUARTERS_OF(low01, low23, 0xdd);
    rows[8 + k] = (Vec)QUARTERS_OF(high01, high23, 0x88);
    rows[12 + k] = (Vec)QUARTERS_OF(high01, high23, 0xdd);
#undef QUARTERS_OF
#else
    rows[k] = (Vec)_mm256_permute2f128_ps((__m256)columns[k][0], (__m256)columns[k][1], 0x20);
    rows[4 + k] = (Vec)_mm256_permute2f128_ps((__m256)columns[k][0], (__m256)columns[k][1], 0x31);
#endif
  }
}
#else
// Each round is a perfect shuffle of all elements, which rotates the bits of an element's index by one place.
INLINE void transpose(Vec (&rows)[LANES]) {
  constexpr auto lanes = std::make_index_sequence<LANES>();
  for (int round = 1; round < LANES; round *= 2) {
    Vec next[LANES];
    for (int i = 0; i < LANES / 2; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + LANES / 2], lanes);
      next[2 * i + 1] = interleave<LANES / 2>(rows[i], rows[i + LANES / 2], lanes);
    }
    for (int i = 0; i < LANES; ++i) rows[i] = next[i];
  }
}
#endif

}  // namespace trtspec::TRTSPEC_ISA
