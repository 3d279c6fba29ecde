// Scratch memory in which a piece of attention is computed.
#pragma once

#include <cstdlib>
#include <new>

#include "attention_rows.h"

namespace trtspec::TRTSPEC_ISA {

INLINE int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Scratch memory of a piece. `units` and `width` are D in units and in fp32 numbers, rounded up to whole vectors.
template <class Unit> struct Workspace {
  int64_t units, width;
  Unit* queries;    // [lines][units]
  Unit* keys;       // [units][TILE]
  float* values;    // [TILE][width], for AMX (attention_tiles.h)
  float* sums;      // [lines][width], sums of values so far, with weights relative to e^top
  float* totals;    // [lines][LANES], sums of weights so far, by lane
  float* tops;      // [lines], highest score so far
  uint64_t* seen;   // [lines], bits of the tile's keys that the line sees
};

// Scratch memory of this thread for at least `size` fp32 numbers, kept for the thread's next call.
inline float* scratch(int64_t size) {
  static thread_local struct Kept {
    float* data = nullptr;
    int64_t size = 0;
    ~Kept() { std::free(data); }
  } kept;
  if (kept.size < size) {
    std::free(kept.data);
    kept.size = 0;
    const int64_t rounded = round_up(size, 16384);
    kept.data = static_cast<float*>(std::aligned_alloc(64, rounded * sizeof(float)));
    if (kept.data == nullptr) throw std::bad_alloc();
    kept.size = rounded;
  }
  return kept.data;
}

template <class Unit> Workspace<Unit> workspace(int64_t lines, int64_t units, int64_t width) {
  constexpr int64_t line = 64 / sizeof(float);  // each part begins at a cache line
  const int64_t per_tile = TILE * (units + width), per_line = units + width + LANES + 1 + 2;
  float* at = scratch(per_tile + lines * per_line + 7 * line);
  const auto take = [&](int64_t size) {
    float* const part = at;
    at += round_up(size, line);
    return part;
  };
  Workspace<Unit> work{.units = units, .width = width};
  work.keys = reinterpret_cast<Unit*>(take(TILE * units));
  work.values = take(TILE * width);
  work.queries = reinterpret_cast<Unit*>(take(lines * units));
  work.sums = take(lines * width);
  work.totals = take(lines * LANES);
  work.tops = take(lines);
  work.seen = reinterpret_cast<uint64_t*>(take(2 * lines));
  return work;
}

}  // namespace trtspec::TRTSPEC_ISA
