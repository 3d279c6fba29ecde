// Kernels that read memory as fast as they can, or multiply values in registers, and discard the results. The other
// kernels are measured against them.
#pragma once

#include "kernels.h"
#if defined(__AMX_INT8__)
#include "linear_amx.h"
#endif
#include "linear_tiles.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

// Exclusive or of all whole 256-byte pieces, so that the compiler cannot remove the reads.
int32_t read_memory(const char* from, int64_t bytes) {
  constexpr int REGISTERS = 256 / sizeof(IVec);
  IVec seen[REGISTERS] = {};
  for (const char* end = from + bytes / 256 * 256; from < end; from += 256)
#pragma GCC unroll 16
    for (int i = 0; i < REGISTERS; ++i) seen[i] ^= load_as<IVec>(from + i * sizeof(IVec));
  int32_t all = 0;
  for (int i = 0; i < REGISTERS; ++i)
    for (int lane = 0; lane < LANES; ++lane) all ^= seen[i][lane];
  return all;
}

// Do all arithmetic of a tile and nothing else, for `groups` groups of `group_steps` steps. Return the number of
// multiplications of weights. If the format is grouped, each group is also widened and scaled.
template <class Format> int64_t multiply_in_registers(int64_t groups, int64_t group_steps) {
  // the registers hold all of this
  constexpr int N = Format::GROUPED ? 1 : 2, ROWS = LANES == 16 ? 12 : Format::GROUPED ? 4 : 6;
  constexpr char zeros[2 * sizeof(Vec)] = {};
  using Sum = typename Format::Sum;
  Sum sums[ROWS][N] = {};
  Vec scaled[ROWS][N] = {}, scale = {}, offset = {};
  float scale_of_x = 0, sum_of_x = 0;
  auto input = Format::template input<0>(zeros);
  decltype(Format::template weights<0>(zeros)) weights[N];
  for (auto& one : weights) one = Format::template weights<0>(zeros);
  for (int64_t g = 0; g < groups; ++g) {
    const auto some_steps = [&](int64_t steps) __attribute__((always_inline)) {
      for (int64_t s = 0; s < steps * Format::PARTS; ++s) {
        for (int v = 0; v < N; ++v) pin(weights[v]);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
          pin(input);
#pragma GCC unroll 2
          for (int v = 0; v < N; ++v) sums[r][v] = Format::multiply(sums[r][v], weights[v], input);
        }
      }
    };
    if constexpr (!Format::GROUPED) {
      some_steps(group_steps);
    } else {
      IVec dots[ROWS][N] = {};
      const int64_t run = Format::RUN == 0 ? group_steps : Format::RUN;
      for (int64_t s = 0; s < group_steps; s += run) {
        some_steps(run);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
          for (int v = 0; v < N; ++v) dots[r][v] += Format::widened(std::exchange(sums[r][v], Sum{}));
      }
      pin(scale), pin(offset);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < N; ++v)
          scaled[r][v] = Format::scaled(scaled[r][v], dots[r][v], offset, sum_of_x, scale, scale_of_x);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) pin(sums[r][v]), pin(scaled[r][v]);
  return groups * group_steps * Format::PER_STEP * ROWS * N * LANES;
}

int64_t multiply(WeightFormat format, int64_t groups, int64_t group_steps) {
  switch (format) {
    case WeightFormat::fp32: return multiply_in_registers<Fp32Weights>(groups, group_steps);
    case WeightFormat::fp16: return multiply_in_registers<Fp16Weights>(groups, group_steps);
    case WeightFormat::fp8: return multiply_in_registers<Fp8Weights>(groups, group_steps);
#if defined(__AMX_INT8__)
    case WeightFormat::bf16: return multiply_in_tiles<Bf16Weights>(groups * group_steps);
    case WeightFormat::int8: return multiply_in_tiles<Int8Weights>(groups * group_steps);
    case WeightFormat::int8_groups: return multiply_groups_in_tiles<Int8GroupWeights>(groups, group_steps);
    default: return multiply_groups_in_tiles<Int4Weights>(groups, group_steps);
#else
    case WeightFormat::bf16: return multiply_in_registers<Bf16Weights>(groups, group_steps);
    case WeightFormat::int8: return multiply_in_registers<Int8Weights>(groups, group_steps);
    case WeightFormat::int8_groups: return multiply_in_registers<Int8GroupWeights>(groups, group_steps);
    default: return multiply_in_registers<Int4Weights>(groups, group_steps);
#endif
  }
}

}  // namespace trtspec::TRTSPEC_ISA
