// packed_linear with AMX: 16 rows of x at a time against a panel, in tiles.
//
// A tile of weights is 16 steps of half a panel, as they are in memory. A tile of x holds the matching words of 16
// rows. The tile unit adds up the products of each row in one order, whatever the other rows are. It is much faster
// than memory delivers weights: 16 rows of bf16 or int8 take about the time of one.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "linear_formats.h"
#include "linear_tiles.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

// The compiler's own intrinsics do not tell the compiler that they read memory, hence these macros. Tiles 0 to 3 are
// sums, tiles 4 and 5 are rows of x, tiles 6 and 7 are weights.
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, row_bytes) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(int64_t(row_bytes)) : "memory")
#define TILE_STORE(tile, to, row_bytes) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(int64_t(row_bytes)) : "memory")
#define TILE_MULTIPLY(instruction, sums, x, weights) \
  asm volatile(instruction " %%tmm" #weights ", %%tmm" #x ", %%tmm" #sums ::)

constexpr int SIDE = 16;                          // rows of a tile; words in a row of a tile
constexpr int64_t TILE_PAIR = SIDE * STEP_BYTES;  // bytes of the steps of a panel that two tiles hold

// The thread's tile configuration while the object lives: for up to 16 rows, and for x with `bytes` bytes in a row of a
// tile. 0 bytes: no tiles are needed.
class Tiles {
 public:
  Tiles(int64_t rows, int64_t bytes) : wanted_(bytes > 0) {
    if (!wanted_) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? bytes : 64);
      shapes.rows[tile] = uint8_t(tile < 6 ? (rows < SIDE ? rows : SIDE) : bytes / 4);
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~Tiles() {
    if (wanted_) asm volatile("tilerelease" ::);
  }
  Tiles(const Tiles&) = delete;

 private:
  const bool wanted_;
};

// -- few rows ---------------------------------------------------------------------------------------------------------

// Bytes of a group in a prepared row.
template <class Format> int64_t bytes_of_group(const LinearArgs& args) {
  return args.steps / args.groups * Format::ROW_BYTES;
}

// Largest number of rows that are multiplied without tiles. For so few rows, tiles would be a little slower. The bits
// are the same: integers are exact, and few_rows_of_panel does what the tile unit does.
template <class Format> int64_t few_rows(const LinearArgs& args) {
  if (std::is_same_v<Format, Bf16Weights>) return 2;
  if (!Format::GROUPED) return 5;
  const int64_t group_bytes = bytes_of_group<Format>(args);  // smaller groups give the tile unit less work
  return group_bytes <= 32 ? 8 : group_bytes <= 64 ? 6 : 4;
}
constexpr int64_t WIDE_STEP = 2 * sizeof(float);  // bytes of a step of a prepared row of bf16, without tiles

template <class Format> bool in_tiles(const LinearArgs& args) { return args.rows > few_rows<Format>(args); }

// While the object lives, subnormal numbers are 0 in this thread, as they are in the tile unit.
class FlushToZero {
 public:
  FlushToZero() { set(before_ | _MM_FLUSH_ZERO_ON | DENORMALS_ARE_ZEROS); }
  ~FlushToZero() { set(before_); }
  FlushToZero(const FlushToZero&) = delete;

 private:
  static constexpr unsigned DENORMALS_ARE_ZEROS = 0x0040;
  static void set(unsigned control) { asm volatile("ldmxcsr %0" ::"m"(control) : "memory"); }
  const unsigned before_ = _mm_getcsr();
};

// sums += x * panel, in the order of the tile unit. For every 16 steps it adds up the products of even and of odd
// inputs, each in order. Then it adds both to the sum.
template <int ROWS>
void few_rows_of_panel(const LinearArgs& args, int64_t panel, const char* x, int64_t row_bytes, Accumulators* sums) {
  const FlushToZero as_tiles_do;
  Vec sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(sums[r] + v * LANES);
  const char* words = words_at(args, panel, 0);
  const auto add = [&](int64_t steps) __attribute__((always_inline)) {
    Vec parts[2][ROWS][VECTORS] = {};
#pragma GCC unroll 16
    for (int64_t s = 0; s < steps; ++s, words += STEP_BYTES, x += WIDE_STEP) {
      for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(words + A_LITTLE_AHEAD + v * sizeof(Vec), 0, 2);
      for (int v = 0; v < VECTORS; ++v) {
        const UVec both = load_as<UVec>(words + v * sizeof(Vec));
        const Vec weights[] = {(Vec)(both << 16), (Vec)(both & 0xffff0000u)};
        for (int part = 0; part < 2; ++part)
          for (int r = 0; r < ROWS; ++r) {
            const Vec input = splat(load_as<float>(x + r * row_bytes + part * sizeof(float)));
            parts[part][r][v] = fma(input, weights[part], parts[part][r][v]);
          }
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) sum[r][v] += parts[0][r][v] + parts[1][r][v];
  };
  int64_t steps = args.steps;
  for (; steps >= SIDE; steps -= SIDE) add(SIDE);
  if (steps > 0) add(steps);
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) {
      pin(sum[r][v]);  // else the compiler may add later, when subnormal numbers are no longer 0
      store(sums[r] + v * LANES, sum[r][v]);
    }
}

inline void few_bf16_rows(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes,
                          Accumulators* sums) {
  begin_sums(sums, rows);
  return rows == 1 ? few_rows_of_panel<1>(args, panel, x, row_bytes, sums)
                   : few_rows_of_panel<2>(args, panel, x, row_bytes, sums);
}

// -- tiles ------------------------------------------------------------------------------------------------------------

// Multiply the loaded tiles: one tile of rows, or two.
template <class Format, bool TWO> INLINE void multiply_loaded() {
  if constexpr (std::is_same_v<Format, Bf16Weights>) {
    TILE_MULTIPLY("tdpbf16ps", 0, 4, 6);
    TILE_MULTIPLY("tdpbf16ps", 1, 4, 7);
    if constexpr (TWO) {
      TILE_MULTIPLY("tdpbf16ps", 2, 5, 6);
      TILE_MULTIPLY("tdpbf16ps", 3, 5, 7);
    }
  } else {
    TILE_MULTIPLY("tdpbssd", 0, 4, 6);
    TILE_MULTIPLY("tdpbssd", 1, 4, 7);
    if constexpr (TWO) {
      TILE_MULTIPLY("tdpbssd", 2, 5, 6);
      TILE_MULTIPLY("tdpbssd", 3, 5, 7);
    }
  }
}

// sums += x * panel, over some steps, for one tile of rows or two. first: sums = x * panel. ahead: distance in bytes at
// which weights are prefetched; 0: not at all.
template <class Format, bool TWO>
INLINE void multiply_tiles(const char* words, int64_t steps, int64_t ahead, const char* x, const char* x2,
                           int64_t row_bytes, bool first, float* sums, float* sums2) {
  const auto multiply = [&](const char* words) __attribute__((always_inline)) {
    TILE_LOAD(6, words, STEP_BYTES);
    TILE_LOAD(4, x, row_bytes);
    TILE_LOAD(7, words + 64, STEP_BYTES);
    if constexpr (TWO) TILE_LOAD(5, x2, row_bytes);
    multiply_loaded<Format, TWO>();
  };
  if (first) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  } else {
    TILE_LOAD(0, sums, sizeof(Accumulators));
    TILE_LOAD(1, sums + SIDE, sizeof(Accumulators));
    if constexpr (TWO) {
      TILE_LOAD(2, sums2, sizeof(Accumulators));
      TILE_LOAD(3, sums2 + SIDE, sizeof(Accumulators));
    }
  }
  for (; steps >= SIDE; steps -= SIDE, words += TILE_PAIR, x += 64) {
    if (ahead > 0)
      for (int64_t line = 0; line < TILE_PAIR; line += 64) __builtin_prefetch(words + ahead + line);
    multiply(words);
    if constexpr (TWO) x2 += 64;
  }
  if (steps > 0) {  // x has zeros there, and the weights need zeros too
    alignas(64) char last[TILE_PAIR] = {};
    std::memcpy(last, words, steps * STEP_BYTES);
    multiply(last);
  }
  TILE_STORE(0, sums, sizeof(Accumulators));
  TILE_STORE(1, sums + SIDE, sizeof(Accumulators));
  if constexpr (TWO) {
    TILE_STORE(2, sums2, sizeof(Accumulators));
    TILE_STORE(3, sums2 + SIDE, sizeof(Accumulators));
  }
}

// Steps of a slice of a panel: 36 KB, which stay in L1 while tiles of rows pass over them. A slice is this large
// because every pass loads and stores the sums. The rows of a block stay in L2.
constexpr int64_t TILE_SLICE_STEPS = 288, BLOCK_BYTES = 768 * 1024, MOST_BLOCK_ROWS = 384;

// sums = x * panel: in one pass for one or two tiles of rows, slice by slice for more.
template <class Format>
void tiles_of_panel(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes,
                    Accumulators* sums) {
  const int64_t slice = rows <= 2 * SIDE ? args.steps : TILE_SLICE_STEPS;
  for (int64_t step = 0; step < args.steps; step += slice) {
    const char* const words = words_at(args, panel, step);
    const int64_t steps = args.steps - step < slice ? args.steps - step : slice;
    for (int64_t row = 0; row < rows; row += 2 * SIDE) {
      const int64_t ahead = rows <= 2 * SIDE ? NEAR : 0;
      const char* const inputs = x + row * row_bytes + step * Format::ROW_BYTES;
      if (row + SIDE < rows)
        multiply_tiles<Format, true>(words, steps, ahead, inputs, inputs + SIDE * row_bytes, row_bytes, step == 0,
                                     sums[row], sums[row + SIDE]);
      else multiply_tiles<Format, false>(words, steps, ahead, inputs, nullptr, row_bytes, step == 0, sums[row], nullptr);
    }
  }
}

// Scales and offsets of the columns of a panel, for one group.
template <class Format> struct GroupScales {
  Vec scale[VECTORS], offset[VECTORS];

  GroupScales() = default;
  GroupScales(const LinearArgs& args, int64_t panel, int64_t g) {
    const int64_t at = (panel * args.groups + g) * PANEL;
    for (int v = 0; v < VECTORS; ++v) {
      scale[v] = load(static_cast<const typename Format::Scale*>(args.scales) + at + v * LANES);
      offset[v] = Format::offset_in_tiles(args.zeros == nullptr ? nullptr : args.zeros + at + v * LANES);
    }
  }

  // sums += a group's dot products, for row r of a tile.
  INLINE void add(float* sums, const IVec (&dots)[VECTORS][SIDE], int64_t r, float sum_of_x, float scale_of_x) const {
    for (int v = 0; v < VECTORS; ++v, sums += LANES)
      store(sums, Format::scaled(load(sums), dots[v][r], offset[v], sum_of_x, scale[v], scale_of_x));
  }
};

// sums = x * panel, group after group. Each group is computed in integers and then scaled. The integers of one tile are
// scaled while those of the next tile are computed.
template <class Format>
void group_tiles_of_panel(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes,
                          Accumulators* sums) {
  constexpr bool AS_THEY_LIE = Format::PARTS == 1;  // weights as they are in memory; else words are unpacked first
  begin_sums(sums, rows);
  const IntRow<Format> layout(args);
  const int64_t group_steps = args.steps / args.groups, group_bytes = bytes_of_group<Format>(args);
  const char* words = words_at(args, panel, 0);
  alignas(64) UVec weights[2][VECTORS][AS_THEY_LIE ? 1 : 2 * MOST_GROUP_STEPS];  // a group of half a panel
  alignas(64) IVec dots[2][VECTORS][SIDE];
  GroupScales<Format> scales[2];
  int now = 0;
  const auto scale = [&](int64_t g, int64_t row, const IVec (&dots)[VECTORS][SIDE]) {
    for (int64_t r = row; r < rows && r < row + SIDE; ++r) {
      char* const of_row = x + r * row_bytes;
      scales[g % 2].add(sums[r], dots, r - row, layout.sums(of_row)[g], layout.scales(of_row)[g]);
    }
  };
  int64_t last_g = -1, last_row = 0;
  for (int64_t g = 0; g < args.groups; ++g) {
    auto& unpacked = weights[g % 2];
    const char* const first = AS_THEY_LIE ? words : reinterpret_cast<const char*>(unpacked[0]);
    const char* const second = AS_THEY_LIE ? words + sizeof(UVec) : reinterpret_cast<const char*>(unpacked[1]);
    constexpr int64_t word_bytes = AS_THEY_LIE ? STEP_BYTES : sizeof(UVec);  // from one word of a column to the next
    for (int64_t s = 0; s < group_steps; ++s, words += STEP_BYTES)
      for (int v = 0; v < VECTORS; ++v) {
        __builtin_prefetch(words + A_PAGE_AHEAD + v * sizeof(Vec), 0, 2);
        __builtin_prefetch(words + NEAR + v * sizeof(Vec), 0, 3);
        if constexpr (!AS_THEY_LIE) {
          unpacked[v][2 * s] = Format::template weights<0>(words + v * sizeof(Vec));
          unpacked[v][2 * s + 1] = Format::template weights<1>(words + v * sizeof(Vec));
        }
      }
    for (int64_t row = 0; row < rows; row += SIDE) {
      const char* const inputs = x + row * row_bytes + g * group_bytes;
      TILE_ZERO(0);
      TILE_ZERO(1);
      for (int64_t k = 0; k < group_bytes; k += 64) {
        TILE_LOAD(4, inputs + k, row_bytes);
        TILE_LOAD(6, first + k / 4 * word_bytes, word_bytes);
        TILE_LOAD(7, second + k / 4 * word_bytes, word_bytes);
        TILE_MULTIPLY("tdpbssd", 0, 4, 6);
        TILE_MULTIPLY("tdpbssd", 1, 4, 7);
      }
      TILE_STORE(0, dots[now][0], sizeof(IVec));
      TILE_STORE(1, dots[now][1], sizeof(IVec));
      if (last_g >= 0) scale(last_g, last_row, dots[1 - now]);
      if (row == 0) scales[g % 2] = GroupScales<Format>(args, panel, g);
      last_g = g, last_row = row, now = 1 - now;
    }
  }
  scale(last_g, last_row, dots[1 - now]);
}

// Do the multiplications of `steps` steps of bf16 or int8 in tiles, and return their number. multiply_in_registers does
// the same without tiles.
template <class Format> int64_t multiply_in_tiles(int64_t steps) {
  const Tiles tiles(SIDE, 64);
  alignas(64) char zeros[SIDE * 64] = {};
  TILE_LOAD(4, zeros, 64);
  TILE_LOAD(5, zeros, 64);
  TILE_LOAD(6, zeros, 64);
  TILE_LOAD(7, zeros, 64);
  for (int64_t s = 0; s < steps / SIDE; ++s) multiply_loaded<Format, true>();
  return steps / SIDE * SIDE * Format::PER_STEP * 4 * SIDE * SIDE;
}

// The same for groups of int4 or int8.
template <class Format> int64_t multiply_groups_in_tiles(int64_t groups, int64_t group_steps) {
  const int64_t bytes = group_steps * Format::ROW_BYTES;
  const Tiles tiles(SIDE, bytes < 64 ? bytes : 64);
  alignas(64) char zeros[SIDE * 64] = {};
  alignas(64) IVec dots[VECTORS][SIDE] = {};
  alignas(64) Accumulators sums[SIDE] = {};
  GroupScales<Format> scales = {};
  TILE_LOAD(4, zeros, 64);
  TILE_LOAD(6, zeros, 64);
  TILE_LOAD(7, zeros, 64);
  for (int64_t g = 0; g < groups; ++g) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int64_t k = 0; k < bytes; k += 64) {
      TILE_MULTIPLY("tdpbssd", 0, 4, 6);
      TILE_MULTIPLY("tdpbssd", 1, 4, 7);
    }
    TILE_STORE(0, dots[0], sizeof(IVec));
    TILE_STORE(1, dots[1], sizeof(IVec));
    for (int r = 0; r < SIDE; ++r) scales.add(sums[r], dots, r, 0, 0);
  }
  return groups * group_steps * Format::PER_STEP * SIDE * PANEL;
}

// Bytes in a row of a tile of x; 0 if no tiles are used.
inline int64_t tile_bytes(const LinearArgs& args) {
  if (args.format == WeightFormat::bf16 && in_tiles<Bf16Weights>(args)) return 64;
  if (args.format == WeightFormat::int8 && in_tiles<Int8Weights>(args)) return 64;
  int64_t of_group = 0;
  if (args.format == WeightFormat::int8_groups && in_tiles<Int8GroupWeights>(args))
    of_group = bytes_of_group<Int8GroupWeights>(args);
  if (args.format == WeightFormat::int4 && in_tiles<Int4Weights>(args)) of_group = bytes_of_group<Int4Weights>(args);
  return of_group < 64 ? of_group : 64;
}

}  // namespace trtspec::TRTSPEC_ISA
