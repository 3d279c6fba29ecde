// packed_linear for packed weights: x [T, K] times panels of 32 output columns.
//
// One pass over the weights serves up to TILE_ROWS rows of x: a step of a panel (32 columns x one 32-bit word) is
// loaded once, and each row's word is broadcast and multiplied with it. An output is one accumulator that takes the
// steps in order, whatever the number of rows; that is why a row's bits do not depend on its neighbours. With one row
// the kernel runs at the speed of memory, and up to about TILE_ROWS rows hide behind the same reads.
//
// Many rows are blocks of BLOCK_ROWS, and within a block the same tiles go over a slice of the panel while it is in L1.
// Between slices the accumulators lie in memory as they are, so the order of additions stays the same.
#pragma once

#include <array>
#include <utility>

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

// -- rows to tiles ----------------------------------------------------------------------------------------------------

template <class Format, int... N> constexpr auto float_tiles(std::integer_sequence<int, N...>) {
  return std::array{&float_tile<Format, N + 1>...};
}
template <class Format, int... N> constexpr auto int_tiles(std::integer_sequence<int, N...>) {
  return std::array{&int_tile<Format, N + 1>...};
}
using UpToTileRows = std::make_integer_sequence<int, TILE_ROWS>;

// body(row, count) for tiles of at most TILE_ROWS rows, as even as can be: 13 rows are 7 and 6, as a tile of one row
// would cost nearly as much as one of six.
template <class Body> INLINE void for_tiles(int64_t rows, Body body) {
  for (int64_t row = 0, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles > 0; --tiles) {
    const int64_t count = (rows - row + tiles - 1) / tiles;
    body(row, count);
    row += count;
  }
}

template <class Format>
void float_panel(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes, Accumulators* sums) {
  static constexpr auto tiles = float_tiles<Format>(UpToTileRows{});
  const bool once = rows <= TILE_ROWS;
  const char* weight = static_cast<const char*>(args.weight) + panel * args.steps * STEP_BYTES;
  for (int64_t step = 0; step < args.steps; step += SLICE_STEPS) {
    const int64_t steps = args.steps - step < SLICE_STEPS ? args.steps - step : SLICE_STEPS;
    const char* slice = x + step * Format::PER_STEP * int64_t(sizeof(typename Format::Input));
    for_tiles(rows, [&](int64_t row, int64_t count) {
      tiles[count - 1](weight + step * STEP_BYTES, steps, slice + row * row_bytes, row_bytes, once, sums + row);
    });
  }
}

// Integer panels are not sliced: a whole one fits in L2.
template <class Format>
void int_panel(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes, Accumulators* sums) {
  static constexpr auto tiles = int_tiles<Format>(UpToTileRows{});
  const bool once = rows <= TILE_ROWS;
  for_tiles(rows, [&](int64_t row, int64_t count) {
    tiles[count - 1](args, panel, x + row * row_bytes, row_bytes, once, sums + row);
  });
}

// -- results ----------------------------------------------------------------------------------------------------------

// out = sums + bias, rounded once, for the columns of a panel that exist.
template <class Bias, class Out>
void write_rows(const LinearArgs& args, int64_t panel, int64_t row, int64_t rows, const Accumulators* sums) {
  const auto* bias = static_cast<const Bias*>(args.bias);
  for (int64_t column = panel * PANEL, lane = 0; lane < PANEL && column < args.out_features;
       column += LANES, lane += LANES) {
    const int n = args.out_features - column < LANES ? int(args.out_features - column) : LANES;
    const Vec add = bias == nullptr ? Vec{} : n < LANES ? load(bias + column, n) : load(bias + column);
    Out* out = static_cast<Out*>(args.out) + row * args.out_features + column;
    for (int64_t r = 0; r < rows; ++r, out += args.out_features) {
      const Vec value = bias == nullptr ? load(sums[r] + lane) : load(sums[r] + lane) + add;
      if (n < LANES) store(out, value, n);
      else store(out, value);
    }
  }
}

INLINE auto row_writer(const LinearArgs& args) {
  switch (args.element) {
    case Element::fp32: return &write_rows<float, float>;
    case Element::bf16: return args.float_out ? &write_rows<BFloat16, float> : &write_rows<BFloat16, BFloat16>;
    default: return args.float_out ? &write_rows<Half, float> : &write_rows<Half, Half>;
  }
}

// -- rows of x, as the tiles want them --------------------------------------------------------------------------------

// x [K] widened to Input, if it is not that already, and padded with zeros to whole words.
template <class Input, class T> void widen_row(const T* x, int64_t depth, int64_t padded, Input* to) {
  int64_t k = 0;
  if constexpr (std::is_same_v<Input, T>) {
    std::memcpy(to, x, depth * sizeof(T));
    k = depth;
  } else {
    for (; k + LANES <= depth; k += LANES) store(to + k, load(x + k));
    for (; k < depth; ++k) to[k] = to_float(x[k]);
  }
  for (; k < padded; ++k) to[k] = Input{};
}

// |x| as integers that compare like it: infinities and NaNs are above every finite number.
INLINE IVec magnitude_bits(Vec v) { return (IVec)v & 0x7fffffff; }

template <class T> INLINE Vec load_up_to(const T* from, int64_t n) {
  return n < LANES ? load(from, int(n)) : load(from);
}

// The largest |x| of a group; NaN if there is one.
template <class T> INLINE float largest_magnitude(const T* x, int64_t count) {
  IVec top = {};
  for (int64_t k = 0; k < count; k += LANES) {
    const IVec bits = magnitude_bits(load_up_to(x + k, count - k));
    top = bits > top ? bits : top;
  }
  int32_t best = 0;
  for (int i = 0; i < LANES; ++i) best = top[i] > best ? top[i] : best;
  return load_as<float>(&best);
}

// Round a group to integers of at most 127; returns their sum. A group of (nearly) nothing is zeros; so is one with an
// infinity or a NaN, whose scale makes NaN of its results.
template <class T> INLINE int32_t quantize_group(const T* x, int64_t count, float largest, int8_t* to) {
  constexpr float TINY = 1e-30f;               // as in trtspec/ops/linear.py
  constexpr float ROUND = 12582912.0f;         // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  if (!(largest >= TINY && largest <= 3.402823466e38f)) {
    std::memset(to, 0, count);
    return 0;
  }
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  const float inverse = 127.0f / largest;
  IVec total = {};
  for (int64_t k = 0; k < count; k += LANES) {
    const int64_t n = count - k < LANES ? count - k : LANES;
    const IVec integers = (IVec)(load_up_to(x + k, n) * inverse + ROUND) - load_as<int32_t>(&ROUND);
    const Bytes bytes = __builtin_convertvector(integers, Bytes);
    std::memcpy(to + k, &bytes, n);
    total += integers;
  }
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += total[i];
  return sum;
}

template <class T> void quantize_row(const LinearArgs& args, const T* x, int per_step, char* to) {
  const IntRow layout(args, per_step);
  auto* values = reinterpret_cast<int8_t*>(to);
  std::memset(values + args.depth, 0, layout.values_bytes - args.depth);
  const int64_t group_size = args.depth / args.groups;
  for (int64_t g = 0; g < args.groups; ++g) {
    const T* group = x + g * group_size;
    const float largest = largest_magnitude(group, group_size);
    layout.scales(to)[g] = largest / 127.0f;
    layout.sums(to)[g] = quantize_group(group, group_size, largest, values + g * group_size);
  }
}

template <class T> void prepare_row(const LinearArgs& args, int64_t row, char* to) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_step;
  const auto widen = [&]<class Format>(Format) {
    using Input = typename Format::Input;
    widen_row(x, args.depth, args.steps * Format::PER_STEP, reinterpret_cast<Input*>(to));
  };
  if (args.format == WeightFormat::int8) return quantize_row(args, x, Int8Weights::PER_STEP, to);
  if (args.format == WeightFormat::int4) return quantize_row(args, x, Int4Weights::PER_STEP, to);
  if constexpr (std::is_same_v<T, float>) widen(Fp32Weights{});
  else if constexpr (std::is_same_v<T, BFloat16>) widen(Bf16Weights{});
  else widen(Fp16Weights{});
}

// -- the table's entries ----------------------------------------------------------------------------------------------

template <class Format> int64_t float_row_bytes(const LinearArgs& args) {
  return args.steps * Format::PER_STEP * int64_t(sizeof(typename Format::Input));
}

int64_t linear_row_bytes(const LinearArgs& args) {
  switch (args.format) {
    case WeightFormat::fp32: return float_row_bytes<Fp32Weights>(args);
    case WeightFormat::bf16: return float_row_bytes<Bf16Weights>(args);
    case WeightFormat::fp16: return float_row_bytes<Fp16Weights>(args);
    case WeightFormat::int8: return IntRow(args, Int8Weights::PER_STEP).bytes();
    default: return IntRow(args, Int4Weights::PER_STEP).bytes();
  }
}

void linear_prepare(const LinearArgs& args, int64_t row_begin, int64_t row_end) {
  const auto prepare = args.element == Element::fp32   ? &prepare_row<float>
                       : args.element == Element::bf16 ? &prepare_row<BFloat16>
                                               : &prepare_row<Half>;
  const int64_t row_bytes = linear_row_bytes(args);
  for (int64_t row = row_begin; row < row_end; ++row) prepare(args, row, args.prepared + row * row_bytes);
}

INLINE auto panel_kernel(const LinearArgs& args) {
  switch (args.format) {
    case WeightFormat::fp32: return &float_panel<Fp32Weights>;
    case WeightFormat::bf16: return &float_panel<Bf16Weights>;
    case WeightFormat::fp16: return &float_panel<Fp16Weights>;
    case WeightFormat::int8: return &int_panel<Int8Weights>;
    default: return &int_panel<Int4Weights>;
  }
}

void linear_block(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  alignas(64) Accumulators sums[BLOCK_ROWS];
  const int64_t rows = row_end - row_begin, row_bytes = linear_row_bytes(args);
  char* x = args.prepared + row_begin * row_bytes;
  const auto panel_sums = panel_kernel(args);
  const auto write = row_writer(args);
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    std::memset(sums, 0, rows * sizeof(Accumulators));
    panel_sums(args, panel, rows, x, row_bytes, sums);
    write(args, panel, row_begin, rows, sums);
  }
}

}  // namespace trtspec::TRTSPEC_ISA
