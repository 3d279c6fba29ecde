// The formats of packed weights: how a step of a panel is multiplied with a row's inputs of that step.
//
// A format takes PER_STEP inputs per step, in PARTS parts. weights<part> unpacks a register of words. input<part> is
// the matching word of a prepared row. multiply adds the products of both to a Sum, lane by lane. A prepared row has
// ROW_BYTES per step. GROUPED: columns have a scale for each group of steps. ONE_PASS_ROWS: tiles of so many rows pass
// over a panel once, if there are registers for it (linear_tiles.h). streamed_rows: the largest number of rows, with
// groups of the given number of steps, with which a machine that reads ahead keeps up (measured on Zen 4).
#pragma once

#include <type_traits>
#include <utility>

#include "kernels.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

constexpr int64_t MOST_GROUP_STEPS = 16;  // for int4; groups of int8 have up to twice as many

constexpr int NEVER = 1000;  // no tile has so many rows

// Prepared rows are padded with zeros to a multiple of this number of steps, so that tiles are whole.
#if defined(__AMX_INT8__)
constexpr int64_t STEPS_OF_ROWS = 16;
#else
constexpr int64_t STEPS_OF_ROWS = 1;
#endif
INLINE int64_t row_steps(const LinearArgs& args) {
  return (args.steps + STEPS_OF_ROWS - 1) / STEPS_OF_ROWS * STEPS_OF_ROWS;
}

INLINE IVec broadcast_word(const char* from) { return IVec{} + load_as<int32_t>(from); }

// -- floating-point weights -------------------------------------------------------------------------------------------

// Weights that are widened to fp32, as the inputs are. Each part is one number.
template <int PER_STEP_> struct WideWeights {
  using Input = float;
  using Sum = Vec;
  static constexpr int PER_STEP = PER_STEP_, PARTS = PER_STEP, ROW_BYTES = PER_STEP * int(sizeof(Input));
  static constexpr int ONE_PASS_ROWS = LANES == 16 ? 6 : NEVER;
  static constexpr bool GROUPED = false;

  static constexpr int streamed_rows(int64_t) { return 2; }
  template <int part> static INLINE Vec input(const char* row) { return splat(load_as<float>(row + 4 * part)); }
  static INLINE Vec multiply(Vec sum, Vec weights, Vec input) { return fma(input, weights, sum); }
};

struct Fp32Weights : WideWeights<1> {
  template <int part> static INLINE Vec weights(const char* from) { return load_as<Vec>(from); }
};

struct Fp16Weights : WideWeights<2> {
  template <int part> static INLINE Vec weights(const char* from) {
    const HVec halves = __builtin_convertvector(load_as<UVec>(from) >> (16 * part), HVec);
    return load(reinterpret_cast<const Half*>(&halves));
  }
};

#if defined(__AVX512BF16__)
struct Bf16Weights {  // multiplied in pairs, without widening
  using Input = BFloat16;
  using Sum = Vec;
  static constexpr int PER_STEP = 2, PARTS = 1, ROW_BYTES = PER_STEP * int(sizeof(Input));
  static constexpr int ONE_PASS_ROWS = 6;
  static constexpr bool GROUPED = false;

  static constexpr int streamed_rows(int64_t) { return 5; }
  template <int part> static INLINE __m512bh weights(const char* from) {
    auto words = load_as<__m512i>(from);
    pin(words);  // else GCC loads them again for each of three rows, which took 1.8 times as long in cache
    return (__m512bh)words;
  }
  template <int part> static INLINE __m512bh input(const char* row) { return (__m512bh)broadcast_word(row); }
  static INLINE Vec multiply(Vec sum, __m512bh weights, __m512bh input) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, weights, input);
  }
};
#else
struct Bf16Weights : WideWeights<2> {
  template <int part> static INLINE Vec weights(const char* from) {
    const UVec words = load_as<UVec>(from);
    return (Vec)(part == 0 ? words << 16 : words & 0xffff0000u);
  }
};
#endif

// The bits of an fp8 number (e4m3), read as an fp16 number, are 2^-8 times its value, also for subnormal numbers.
struct Fp8Weights : WideWeights<4> {
  static constexpr int ONE_PASS_ROWS = NEVER;  // a pass mostly unpacks
  static constexpr float UNIT = 256.0f;

  template <int part> static INLINE Vec weights(const char* from) {
    const UVec byte = load_as<UVec>(from) >> (8 * part);
    const HVec half = __builtin_convertvector((byte & 0x80u) << 8 | (byte & 0x7fu) << 7, HVec);
    return load(reinterpret_cast<const Half*>(&half));
  }
};

// -- integer weights --------------------------------------------------------------------------------------------------
// A prepared row holds its K inputs, rounded to -127..127. After them come an fp32 scale for each group, and the sum of
// each group's values (SumOfX). Weights are taken as unsigned: value = weight - offset. So a group's dot product is
// sum(weight * x) - offset * sum(x), in integers and exact on every instruction set.

typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define TRTSPEC_SHORTS 1  // products of 16 bits, or of 16-bit numbers

// The products of 16-bit numbers, each two adjacent products added up.
INLINE IVec dot2(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (IVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return (IVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// The products of unsigned and signed bytes, each two adjacent products added up to 16 bits, with saturation.
INLINE Shorts dot2_bytes(UVec bytes, IVec x) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_maddubs_epi16((__m512i)bytes, (__m512i)x);
#else
  return (Shorts)_mm256_maddubs_epi16((__m256i)bytes, (__m256i)x);
#endif
}
#else
#define TRTSPEC_SHORTS 0

// sum + the four products of unsigned and signed bytes in each 32-bit lane.
INLINE IVec dot4(IVec sum, UVec bytes, IVec x) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (IVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)bytes, (__m256i)x);
#else
  for (int shift = 0; shift < 32; shift += 8)
    sum += (IVec)((bytes >> shift) & 0xffu) * ((IVec)((UVec)x << (24 - shift)) >> 24);
  return sum;
#endif
}
#endif

#if defined(__AVX512VNNI__)
constexpr bool INTEGERS_ARE_FAST = true;
#else
constexpr bool INTEGERS_ARE_FAST = false;
#endif

struct Int8Weights {
  using Sum = IVec;
  using SumOfX = int32_t;
  static constexpr int ONE_PASS_ROWS = INTEGERS_ARE_FAST ? 1 : NEVER;
  static constexpr bool GROUPED = false;
  static constexpr int PER_STEP = 4;

  static constexpr int streamed_rows(int64_t) { return INTEGERS_ARE_FAST ? 4 : 1; }

#if TRTSPEC_SHORTS
  // Two adjacent bytes are taken as one 16-bit number, 256 * odd + even. Its product with x_even is too large by
  // 256 * odd * x_even. The second part corrects that: odd * (x_odd - 256 * x_even). Its second factor fits in 16 bits
  // too. Between the parts a sum is off by less than 2^24. Only bytes of even index have an offset.
  static constexpr int PARTS = 2, ROW_BYTES = 8;

  template <int part> static INLINE Shorts weights(const char* from) {
    const UVec words = load_as<UVec>(from);
    return part == 0 ? (Shorts)(words ^ 0x00800080u) : (Shorts)words >> 8;
  }
  template <int part> static INLINE Shorts input(const char* row) { return (Shorts)broadcast_word(row + 4 * part); }
  static INLINE IVec multiply(IVec sum, Shorts weights, Shorts input) { return sum + dot2(weights, input); }

  // Turn the inputs of `count` steps, which are int8 in the row's second half, into what the parts read. Return the sum
  // that the offset is multiplied with.
  static int32_t arrange(char* row, int64_t steps, int64_t first, int64_t count, int32_t) {
    IVec total = {};
    const auto arrange_some = [&](int64_t s, int64_t n) __attribute__((always_inline)) {
      IVec words = {};
      std::memcpy(&words, row + 4 * (steps + s), 4 * n);
      const Shorts even = (Shorts)((Shorts)words << 8) >> 8, odd = (Shorts)words >> 8;
      total += dot2(even, Shorts{} + 1);
      constexpr auto lanes = std::make_index_sequence<LANES>();
      const Vec first = (Vec)even, second = (Vec)(Shorts)(odd - (even << 8));
      const Vec both[] = {interleave<0>(first, second, lanes), interleave<LANES / 2>(first, second, lanes)};
      std::memcpy(row + 8 * s, both, 8 * n);
    };
    const int64_t end = first + count;
    int64_t s = first;
    for (; s + LANES <= end; s += LANES) arrange_some(s, LANES);
    if (s < end) arrange_some(s, end - s);
    return sum(total);
  }
#else
  static constexpr int PARTS = 1, ROW_BYTES = 4;

  template <int part> static INLINE UVec weights(const char* from) { return load_as<UVec>(from) ^ 0x80808080u; }
  template <int part> static INLINE IVec input(const char* row) { return broadcast_word(row); }
  static INLINE IVec multiply(IVec sum, UVec weights, IVec input) { return dot4(sum, weights, input); }
  static int32_t arrange(char*, int64_t, int64_t, int64_t, int32_t sum) { return sum; }
#endif

  static INLINE Vec exact(IVec dot, int32_t sum_of_x) { return __builtin_convertvector(dot - 128 * sum_of_x, Vec); }
};

// The common base of formats whose columns have a scale for each group.
struct InGroups {
  using Scale = Half;
  using SumOfX = float;
  static constexpr bool GROUPED = true;

  // Return sum + a group. Before scaling all numbers are below 2^24, because groups have at most 128 inputs: fp32 is
  // exact.
  static INLINE Vec scaled(Vec sum, IVec dot, Vec offset, float sum_of_x, Vec scale, float scale_of_x) {
    const Vec exact = fma(-offset, splat(sum_of_x), __builtin_convertvector(dot, Vec));
    return sum + exact * (scale * scale_of_x);
  }
};

struct Int8GroupWeights : Int8Weights, InGroups {
  using InGroups::GROUPED;
  using SumOfX = InGroups::SumOfX;
  static constexpr int RUN = 0;

  static constexpr int streamed_rows(int64_t group_steps) { return group_steps >= MOST_GROUP_STEPS ? 2 : 1; }
  static INLINE Vec offset(const uint8_t*) { return splat(128.0f); }
  static INLINE Vec offset_in_tiles(const uint8_t*) { return Vec{}; }  // tiles take signed weights
  static INLINE IVec widened(IVec sum) { return sum; }
};

struct Int4Weights : InGroups {
  static constexpr int ONE_PASS_ROWS = INTEGERS_ARE_FAST ? 1 : NEVER;
  static constexpr int PER_STEP = 8, PARTS = 2, ROW_BYTES = 8;

  static constexpr int streamed_rows(int64_t group_steps) {
    return group_steps == MOST_GROUP_STEPS ? 2 : INTEGERS_ARE_FAST ? 1 : 0;
  }

  static INLINE Vec offset(const uint8_t* zeros) { return zeros == nullptr ? splat(8.0f) : load(zeros); }
  static INLINE Vec offset_in_tiles(const uint8_t* zeros) { return offset(zeros); }
  static int32_t arrange(char*, int64_t, int64_t, int64_t, int32_t sum) { return sum; }
  template <int part> static INLINE UVec weights(const char* from) {
    const UVec words = load_as<UVec>(from);
    return (part == 0 ? words : words >> 4) & 0x0f0f0f0fu;
  }
  template <int part> static INLINE IVec input(const char* row) { return broadcast_word(row + 4 * part); }

#if TRTSPEC_SHORTS
  // A Sum holds RUN steps (0: a whole group) and is then widened to 32 bits. Here a step adds 15 * 127 * 2 twice, at
  // most. For RUN steps that makes 30,480.
  using Sum = Shorts;
  static constexpr int RUN = 4;

  static INLINE Sum multiply(Sum sum, UVec weights, IVec input) { return sum + dot2_bytes(weights, input); }
  static INLINE IVec widened(Sum sum) { return dot2(sum, Shorts{} + 1); }
#else
  using Sum = IVec;
  static constexpr int RUN = 0;

  static INLINE Sum multiply(Sum sum, UVec weights, IVec input) { return dot4(sum, weights, input); }
  static INLINE IVec widened(Sum sum) { return sum; }
#endif
};

#undef TRTSPEC_SHORTS

// Offsets of the parts of a prepared integer row.
template <class Format> struct IntRow {
  using SumOfX = typename Format::SumOfX;
  int64_t values_bytes, groups;

  explicit IntRow(const LinearArgs& args) : values_bytes(row_steps(args) * Format::ROW_BYTES), groups(args.groups) {}
  int64_t bytes() const { return values_bytes + groups * int64_t(sizeof(float) + sizeof(SumOfX)); }
  INLINE float* scales(char* row) const { return reinterpret_cast<float*>(row + values_bytes); }
  INLINE SumOfX* sums(char* row) const { return reinterpret_cast<SumOfX*>(scales(row) + groups); }
};

}  // namespace trtspec::TRTSPEC_ISA
