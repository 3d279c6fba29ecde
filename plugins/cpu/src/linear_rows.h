// Prepares rows of x for the tiles of packed_linear: widens or quantises them, and pads them.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels.h"
#if defined(__AMX_INT8__)
#include "linear_amx.h"
#endif
#include "linear_formats.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

template <class T> INLINE Vec load_up_to(const T* from, int64_t n) {
  return n < LANES ? load(from, int(n)) : load(from);
}

// Widen x [K] to Input, unless it has this type already, and pad it with zeros to whole words.
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

// Magnitudes |x| as integers of the same order: infinities and NaNs are above every finite number.
INLINE IVec magnitude_bits(Vec v) { return (IVec)v & 0x7fffffff; }

// Return the largest |x| of a group; NaN if the group has one.
template <class T> INLINE float largest_magnitude(const T* x, int64_t count) {
  IVec top = {};
  for (int64_t k = 0; k < count; k += LANES) {
    const IVec bits = magnitude_bits(load_up_to(x + k, count - k));
    top = bits > top ? bits : top;
  }
  const int32_t best = highest(top);
  return load_as<float>(&best);
}

// Round a group to integers of magnitude at most 127 and return their sum. A group of (nearly) nothing becomes zeros.
// So does a group with an infinity or a NaN, and its scale makes its results NaN.
template <class T> INLINE int32_t quantize_group(const T* x, int64_t count, float largest, int8_t* to) {
  constexpr float TINY = 1e-30f;               // as in trtspec/ops/linear.py
  constexpr float ROUND = 12582912.0f;         // 1.5 * 2^23: when it is added, the low bits are the nearest integer
  if (!(largest >= TINY && largest <= 3.402823466e38f)) {
    std::memset(to, 0, count);
    return 0;
  }
  const float inverse = 127.0f / largest;
  IVec total = {};
  for (int64_t k = 0; k < count; k += LANES) {
    const int64_t n = count - k < LANES ? count - k : LANES;
    const IVec integers = (IVec)(load_up_to(x + k, n) * inverse + ROUND) - load_as<int32_t>(&ROUND);
    if (n < LANES) {
      int8_t padded[LANES];
      store(padded, integers);
      std::memcpy(to + k, padded, n);
    } else {
      store(to + k, integers);
    }
    total += integers;
  }
  return sum(total);
}

template <class Format, class T> void quantize_row(const LinearArgs& args, const T* x, char* to) {
  const IntRow<Format> layout(args);
  auto* values = reinterpret_cast<int8_t*>(to) + args.steps * (Format::ROW_BYTES - Format::PER_STEP);
  std::memset(values + args.depth, 0, row_steps(args) * Format::PER_STEP - args.depth);
  const int64_t group_size = args.depth / args.groups, group_steps = args.steps / args.groups;
  for (int64_t g = 0; g < args.groups; ++g) {
    const T* group = x + g * group_size;
    const float largest = largest_magnitude(group, group_size);
    layout.scales(to)[g] = largest / 127.0f;
    const int32_t total = quantize_group(group, group_size, largest, values + g * group_size);
    layout.sums(to)[g] = typename Format::SumOfX(Format::arrange(to, args.steps, g * group_steps, group_steps, total));
  }
}

// Round to the nearest e4m3 number, ties to even, of magnitude at most 448; NaN stays NaN.
INLINE Vec round_e4m3(Vec v) {
  const Vec held = min(splat(448.0f), max(splat(-448.0f), v));
  const UVec exponent = (UVec)held >> 23 & 0xff, least = UVec{} + 121;  // of 2^-6, the smallest normal number
  // 1.5 * 2^20 * 2^exponent: when it is added, three bits after the leading one are left
  const Vec round = (Vec)(((exponent > least ? exponent : least) + 20) << 23 | 0x400000u);
  return held + round - round;
}

INLINE void round_row_e4m3(float* x, int64_t count, float scale) {
  for (int64_t k = 0; k < count; k += LANES) {
    const int n = count - k < LANES ? int(count - k) : LANES;
    const Vec rounded = round_e4m3(load_up_to(x + k, n) / splat(scale));
    if (n < LANES) store(x + k, rounded, n);
    else store(x + k, rounded);
  }
}

template <class T> void prepare_row(const LinearArgs& args, int64_t row, char* to) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_step;
  const auto widen = [&]<class Format>(Format) {
    using Input = typename Format::Input;
    widen_row(x, args.depth, row_steps(args) * Format::PER_STEP, reinterpret_cast<Input*>(to));
  };
  if (args.format == WeightFormat::int8) return quantize_row<Int8Weights>(args, x, to);
  if (args.format == WeightFormat::int8_groups) return quantize_row<Int8GroupWeights>(args, x, to);
  if (args.format == WeightFormat::int4) return quantize_row<Int4Weights>(args, x, to);
  if (args.format == WeightFormat::fp8) {
    widen(Fp8Weights{});
    if (args.x_scale != 0) round_row_e4m3(reinterpret_cast<float*>(to), args.depth, args.x_scale);
    return;
  }
  if constexpr (std::is_same_v<T, float>) widen(Fp32Weights{});
#if defined(__AMX_INT8__)
  else if (std::is_same_v<T, BFloat16> && !in_tiles<Bf16Weights>(args)) widen(WideWeights<2>{});
#endif
  else if constexpr (std::is_same_v<T, BFloat16>) widen(Bf16Weights{});
  else widen(Fp16Weights{});
}

}  // namespace trtspec::TRTSPEC_ISA
