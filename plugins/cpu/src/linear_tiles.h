// The formats of packed weights, and a tile of rows against a panel of each.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

constexpr int VECTORS = PANEL / LANES;  // registers of a step, and accumulators of a row

// As many rows as leave registers for the weights: 24 of 32 accumulate with AVX-512, 12 or 8 of 16 elsewhere.
constexpr int TILE_ROWS = LANES == 16 ? 12 : LANES == 8 ? 3 : 1;

// Steps of a slice: 32 KB of weights, which stay in L1 while the tiles of a block go over them.
constexpr int64_t SLICE_STEPS = 256;

// How far ahead weights are asked for, in bytes. The machine looks ahead by itself, but while multiplications fill its
// window it does not look far enough: without this 12 rows of bf16 took 1.7 times as long, and with 4 KB 8 rows a sixth
// longer than with 8; for a row or two, less is better. Weights that only one tile wants (`once`) need not displace
// anything in the outer caches.
template <int ROWS> INLINE void prefetch(const char* panel, bool once) {
  constexpr int64_t ahead = ROWS <= 2 ? 4096 : 8192;
  for (int64_t line = 0; line < STEP_BYTES; line += 64) {
    if (once) __builtin_prefetch(panel + ahead + line, 0, 0);
    else __builtin_prefetch(panel + ahead + line);
  }
}

typedef float Accumulators[PANEL];  // of one row and panel

// -- floating-point weights -------------------------------------------------------------------------------------------
// A format says how x is prepared (Input, PER_STEP), what a register of weights becomes (Weights) and how a word of a
// row is multiplied with it.

struct Fp32Weights {
  using Input = float;
  static constexpr int PER_STEP = 1;
  using Weights = Vec;

  static INLINE Weights load_weights(const char* from) { return load_as<Vec>(from); }
  static INLINE Vec multiply(Vec acc, Weights w, const Input* x) { return fma(splat(x[0]), w, acc); }
};

// Two half-precision numbers a word, widened to fp32; so is x.
struct WideWeights {
  using Input = float;
  static constexpr int PER_STEP = 2;
  struct Weights { Vec first, second; };

  static INLINE Vec multiply(Vec acc, Weights w, const Input* x) {
    return fma(splat(x[1]), w.second, fma(splat(x[0]), w.first, acc));
  }
};

struct Fp16Weights : WideWeights {
  static INLINE Weights load_weights(const char* from) {
    const UVec words = load_as<UVec>(from);
    const HVec first = __builtin_convertvector(words, HVec), second = __builtin_convertvector(words >> 16, HVec);
    return {load(reinterpret_cast<const Half*>(&first)), load(reinterpret_cast<const Half*>(&second))};
  }
};

#if defined(__AVX512BF16__)
struct Bf16Weights {  // multiplied in pairs as they are
  using Input = BFloat16;
  static constexpr int PER_STEP = 2;
  using Weights = __m512bh;

  static INLINE Weights load_weights(const char* from) { return load_as<__m512bh>(from); }
  static INLINE Vec multiply(Vec acc, Weights w, const Input* x) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, w, (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x)));
  }
};
#else
struct Bf16Weights : WideWeights {
  static INLINE Weights load_weights(const char* from) {
    const UVec words = load_as<UVec>(from);
    return {(Vec)(words << 16), (Vec)(words & 0xffff0000u)};
  }
};
#endif

// Four fp8 (e4m3) numbers a word. As an fp16 number the bits of one mean 2^-8 of it, also below its normal numbers.
struct Fp8Weights {
  using Input = float;
  static constexpr int PER_STEP = 4;
  static constexpr float UNIT = 256.0f;
  struct Weights { Vec inputs[PER_STEP]; };

  static INLINE Weights load_weights(const char* from) {
    const UVec words = load_as<UVec>(from);
    Weights w;
#pragma GCC unroll 4
    for (int i = 0; i < PER_STEP; ++i) {
      const UVec byte = words >> (8 * i);
      const HVec half = __builtin_convertvector((byte & 0x80u) << 8 | (byte & 0x7fu) << 7, HVec);
      w.inputs[i] = load(reinterpret_cast<const Half*>(&half));
    }
    return w;
  }
  static INLINE Vec multiply(Vec acc, const Weights& w, const Input* x) {
#pragma GCC unroll 4
    for (int i = 0; i < PER_STEP; ++i) acc = fma(splat(x[i]), w.inputs[i], acc);
    return acc;
  }
};

// sums += x * panel over some steps, for ROWS rows. `x` is the prepared rows at the first of these steps; `once`: no
// other tile wants these weights. All loops over rows are unrolled: with one that is not GCC keeps acc in memory.
template <class Format, int ROWS>
void float_tile(const char* panel, int64_t steps, const char* x, int64_t row_bytes, bool once, Accumulators* sums) {
  Vec acc[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(sums[r] + v * LANES);
  for (int64_t s = 0; s < steps; ++s, panel += STEP_BYTES) {
    prefetch<ROWS>(panel, once);
    typename Format::Weights w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) w[v] = Format::load_weights(panel + v * sizeof(Vec));
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const auto* word = reinterpret_cast<const typename Format::Input*>(x + r * row_bytes) + s * Format::PER_STEP;
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = Format::multiply(acc[r][v], w[v], word);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(sums[r] + v * LANES, acc[r][v]);
}

// -- integer weights --------------------------------------------------------------------------------------------------
// A prepared row is K int8 values (padded to whole words), then a scale (fp32) for each group and the sum of its values
// (int32). Weights are taken as unsigned bytes, which is what VNNI multiplies with signed ones: value = byte - offset,
// so the group's dot product is sum(byte * x) - offset * sum(x), in integers and exact on every instruction set.

// acc + the four products of unsigned bytes `w` and signed bytes `x` in each 32-bit lane.
INLINE IVec dot4(IVec acc, UVec w, IVec x) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8), odd = _mm512_srai_epi16((__m512i)x, 8);
  return acc + (IVec)_mm512_madd_epi16((__m512i)(w & 0x00ff00ffu), even) +
         (IVec)_mm512_madd_epi16((__m512i)((w >> 8) & 0x00ff00ffu), odd);
#elif defined(__AVX2__)
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8), odd = _mm256_srai_epi16((__m256i)x, 8);
  return acc + (IVec)_mm256_madd_epi16((__m256i)(w & 0x00ff00ffu), even) +
         (IVec)_mm256_madd_epi16((__m256i)((w >> 8) & 0x00ff00ffu), odd);
#else
  for (int shift = 0; shift < 32; shift += 8)
    acc += (IVec)((w >> shift) & 0xffu) * ((IVec)((UVec)x << (24 - shift)) >> 24);
  return acc;
#endif
}

INLINE IVec broadcast_word(const int8_t* from) { return IVec{} + load_as<int32_t>(from); }

struct Int8Weights {
  static constexpr int PER_STEP = 4;
  using Scale = float;
  using Weights = UVec;

  static INLINE Weights load_weights(const char* from) { return load_as<UVec>(from) ^ 0x80808080u; }  // value + 128
  static INLINE IVec multiply(IVec acc, Weights w, const int8_t* x) { return dot4(acc, w, broadcast_word(x)); }
  static INLINE IVec offset(const uint8_t*) { return IVec{} + 128; }
};

struct Int4Weights {
  static constexpr int PER_STEP = 8;
  using Scale = Half;
  struct Weights { UVec low, high; };

  static INLINE Weights load_weights(const char* from) {
    const UVec words = load_as<UVec>(from);
    return {words & 0x0f0f0f0fu, (words >> 4) & 0x0f0f0f0fu};
  }
  static INLINE IVec multiply(IVec acc, Weights w, const int8_t* x) {
    return dot4(dot4(acc, w.low, broadcast_word(x)), w.high, broadcast_word(x + 4));
  }
  static INLINE IVec offset(const uint8_t* zeros) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    return zeros == nullptr ? IVec{} + 8 : __builtin_convertvector(load_as<Bytes>(zeros), IVec);
  }
};

// Where the parts of a prepared integer row lie.
struct IntRow {
  int64_t values_bytes, groups;

  IntRow(const LinearArgs& args, int per_step) : values_bytes(args.steps * per_step), groups(args.groups) {}
  int64_t bytes() const { return values_bytes + groups * int64_t(sizeof(float) + sizeof(int32_t)); }
  INLINE float* scales(char* row) const { return reinterpret_cast<float*>(row + values_bytes); }
  INLINE int32_t* sums(char* row) const { return reinterpret_cast<int32_t*>(scales(row) + groups); }
};

// sums = x * panel over all steps, for ROWS rows: group after group, each scaled by its own x and weight scales.
template <class Format, int ROWS>
void int_tile(const LinearArgs& args, int64_t panel_index, char* x, int64_t row_bytes, bool once, Accumulators* sums) {
  using Scale = typename Format::Scale;
  const IntRow layout(args, Format::PER_STEP);
  const int64_t group_steps = args.steps / args.groups;
  const char* panel = static_cast<const char*>(args.weight) + panel_index * args.steps * STEP_BYTES;
  Vec sum[ROWS][VECTORS] = {};
  for (int64_t g = 0; g < args.groups; ++g) {
    IVec dot[ROWS][VECTORS] = {};
    for (int64_t s = g * group_steps; s < (g + 1) * group_steps; ++s, panel += STEP_BYTES) {
      prefetch<ROWS>(panel, once);
      typename Format::Weights w[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) w[v] = Format::load_weights(panel + v * sizeof(Vec));
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        const auto* word = reinterpret_cast<const int8_t*>(x + r * row_bytes) + s * Format::PER_STEP;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) dot[r][v] = Format::multiply(dot[r][v], w[v], word);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t at = (panel_index * args.groups + g) * PANEL + v * LANES;
      const Vec scale = load(static_cast<const Scale*>(args.scales) + at);
      const IVec offset = Format::offset(args.zeros == nullptr ? nullptr : args.zeros + at);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        char* row = x + r * row_bytes;
        const Vec exact = __builtin_convertvector(dot[r][v] - offset * layout.sums(row)[g], Vec);
        sum[r][v] += exact * (scale * layout.scales(row)[g]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(sums[r] + v * LANES, sum[r][v]);
}

}  // namespace trtspec::TRTSPEC_ISA
