// Reads memory as fast as it can and does nothing with it: what the other kernels are measured against.
#pragma once

#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

// An exclusive or of all whole 256-byte pieces, so that the reads are not optimised away.
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

}  // namespace trtspec::TRTSPEC_ISA
