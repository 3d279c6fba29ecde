// Multiplies a tile of rows with a panel of weights, in each format.
#pragma once

#include "kernels.h"
#include "linear_formats.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

constexpr int VECTORS = PANEL / LANES;  // registers of a step

// A tile passes over some vectors of a panel at a time. Registers hold its sums (rows times vectors), the weights of
// these vectors and a word of a row. For grouped formats they also hold the dot products, if there are many registers.
// Even these suffice for at most 6 rows; tiles of more rows took 5 % longer.
//
// One or two rows pass over a panel once, if there are registers for it. So do ONE_PASS_ROWS or more: they multiply long
// enough to hide memory, and they read inputs less often. Others pass over it twice at least. The first pass reads the
// panel into L1, and both passes have time to prefetch what comes next. (One pass of 4 rows of bf16 took 10.4 ms where
// two took 8.0. With 6 to 24 rows one pass took 3 to 13 % less time than two on Zen 4. On a Xeon with AVX-512 and
// without bf16 instructions, widened weights took 10 to 45 % less, with KEEP_ORDER.)
template <class Format> constexpr int TILE_ROWS = LANES == 16 && !Format::GROUPED ? 12 : 6;
constexpr int REGISTERS = LANES == 16 ? 32 : 16;

template <class Format> constexpr int vectors_at_once(int rows, bool in_one_pass = false) {
  int vectors = rows <= 2 || rows >= Format::ONE_PASS_ROWS || in_one_pass ? VECTORS : VECTORS / 2;
  const int others = Format::GROUPED && REGISTERS == 32 ? rows + 3 : 1;  // in addition to the sums of a vector
  while ((rows + others) * vectors + 1 > REGISTERS) vectors /= 2;
  return vectors;
}

// Steps of a slice of a panel, which stay in L1 while the tiles of a block pass over them. They are 16 KB of weights,
// or 8 KB where L1 may be no more than 32 KB.
constexpr int64_t SLICE_STEPS = LANES == 16 ? 128 : 64;

// Memory that a tile prefetches while it works. Each step prefetches `bytes` bytes from `next` on into L2. It prefetches
// what is `near` bytes after it into L1, unless that is NOT_NEAR. The hardware prefetches by itself, but not far enough
// while multiplications fill its window. (The prefetches do not bypass the caches: with prefetchnta, which fills only L1
// on some machines, one row of bf16 took three times as long.)
struct Prefetch {
  const char* next;
  int64_t bytes, near;
};

// Prefetch distances in bytes.
constexpr int64_t NOT_NEAR = -1, NEAR = 1024, A_LITTLE_AHEAD = 2048, A_PAGE_AHEAD = 4096, TWO_PAGES_AHEAD = 8192,
                  A_SLICE_AHEAD = SLICE_STEPS * STEP_BYTES;

template <int N, bool near> INLINE void fetch(Prefetch& ahead, const char* words) {
  constexpr int LINES = N == VECTORS ? 2 : 1;
  for (int i = 0; i < LINES; ++i) {
    __builtin_prefetch(ahead.next + i * 64, 0, 2);
    if constexpr (near) __builtin_prefetch(words + ahead.near + i * 64, 0, 3);
  }
  ahead.next += ahead.bytes;
}

typedef float Accumulators[PANEL];  // of one row and one panel

INLINE void begin_sums(Accumulators* sums, int64_t rows) { std::memset(sums, 0, rows * sizeof(Accumulators)); }

// A piece of work: some steps of a panel, and the prepared rows of a tile.
struct Piece {
  int64_t panel, step, steps;
  char* x;
  int64_t row_bytes;
};

// Whether the compiler must keep the order of the multiplications. Else it unpacks the weights of all parts first, and
// sums have to leave the registers: 12 rows of bf16 weights took 35 ms where they take 24. With few registers, where no
// tile has many rows, the order costs up to 20 %.
template <class Format>
constexpr bool KEEP_ORDER = !std::is_same_v<typename Format::Sum, Vec> || (Format::PARTS > 1 && REGISTERS == 32);

// sums += rows of x * some vectors of a panel, over some steps. All loops over rows are unrolled: if one is not, GCC
// keeps the sums in memory.
template <class Format, int ROWS, int N, bool near>
INLINE void multiply_steps(const char* words, int64_t steps, const char* x, int64_t row_bytes, Prefetch& ahead,
                           typename Format::Sum (&sums)[ROWS][N]) {
  Prefetch here = ahead;  // a copy in registers
  for (int64_t s = 0; s < steps; ++s, words += STEP_BYTES, x += Format::ROW_BYTES) {
    fetch<N, near>(here, words);
    const auto multiply_part = [&](auto part) __attribute__((always_inline)) {
      decltype(Format::template weights<part>(words)) weights[N];
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) weights[v] = Format::template weights<part>(words + v * sizeof(Vec));
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        const auto input = Format::template input<part>(x + r * row_bytes);
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) {
          sums[r][v] = Format::multiply(sums[r][v], weights[v], input);
          if constexpr (KEEP_ORDER<Format>) pin(sums[r][v]);
        }
      }
    };
    [&]<int... part>(std::integer_sequence<int, part...>) __attribute__((always_inline)) {
      (multiply_part(std::integral_constant<int, part>()), ...);
    }
    (std::make_integer_sequence<int, Format::PARTS>());
  }
  ahead = here;
}

template <class Format, int ROWS, int N>
INLINE void multiply_steps(const char* words, int64_t steps, const char* x, int64_t row_bytes, Prefetch& ahead,
                           typename Format::Sum (&sums)[ROWS][N]) {
  if (ahead.near == NOT_NEAR) multiply_steps<Format, ROWS, N, false>(words, steps, x, row_bytes, ahead, sums);
  else multiply_steps<Format, ROWS, N, true>(words, steps, x, row_bytes, ahead, sums);
}

INLINE const char* words_at(const LinearArgs& args, int64_t panel, int64_t step) {
  return static_cast<const char*>(args.weight) + (panel * args.steps + step) * STEP_BYTES;
}

// sums += x * piece, for ROWS rows and N vectors at a time. The sums are integers if the format's Sum is.
template <class Format, int ROWS, int N>
void column_tile(const LinearArgs& args, const Piece& piece, Prefetch& ahead, Accumulators* sums) {
  using Sum = typename Format::Sum;
  for (int first = 0; first < VECTORS; first += N) {
    Sum sum[ROWS][N];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sum[r][v] = load_as<Sum>(sums[r] + (first + v) * LANES);
    multiply_steps<Format>(words_at(args, piece.panel, piece.step) + first * sizeof(Vec), piece.steps,
                           piece.x + piece.step * Format::ROW_BYTES, piece.row_bytes, ahead, sum);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) std::memcpy(sums[r] + (first + v) * LANES, &sum[r][v], sizeof(Sum));
  }
}

// dots = x * some vectors of a panel, in integers.
template <class Format, int ROWS, int N>
INLINE void dot_steps(const char* words, int64_t steps, const char* x, int64_t row_bytes, Prefetch& ahead,
                      IVec (&dots)[ROWS][N]) {
  const int64_t run = Format::RUN == 0 ? steps : Format::RUN;
  const auto multiply_run = [&](int64_t s, auto take) __attribute__((always_inline)) {
    typename Format::Sum sums[ROWS][N];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sums[r][v] = typename Format::Sum{};
    multiply_steps<Format>(words + s * STEP_BYTES, run, x + s * Format::ROW_BYTES, row_bytes, ahead, sums);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) take(dots[r][v], Format::widened(sums[r][v]));
  };
  multiply_run(0, [](IVec& dot, IVec sum) __attribute__((always_inline)) { dot = sum; });
  if constexpr (Format::RUN > 0)
    for (int64_t s = run; s < steps; s += run)
      multiply_run(s, [](IVec& dot, IVec sum) __attribute__((always_inline)) { dot += sum; });
}

// sums += x * piece, for whole groups. Each group is scaled with its own scales of x and of the weights.
template <class Format, int ROWS, int N>
void group_tile(const LinearArgs& args, const Piece& piece, Prefetch& ahead, Accumulators* sums) {
  using Scale = typename Format::Scale;
  const IntRow<Format> layout(args);
  const int64_t group_steps = args.steps / args.groups, row_bytes = piece.row_bytes;
  char* const x = piece.x;
  for (int first = 0; first < VECTORS; first += N) {
    Vec sum[ROWS][N];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sum[r][v] = load(sums[r] + (first + v) * LANES);
    for (int64_t step = piece.step; step < piece.step + piece.steps; step += group_steps) {
      const int64_t g = step / group_steps;
      IVec dots[ROWS][N];
      dot_steps<Format>(words_at(args, piece.panel, step) + first * sizeof(Vec), group_steps,
                        x + step * Format::ROW_BYTES, row_bytes, ahead, dots);
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        const int64_t at = (piece.panel * args.groups + g) * PANEL + (first + v) * LANES;
        const Vec scale = load(static_cast<const Scale*>(args.scales) + at);
        const Vec offset = Format::offset(args.zeros == nullptr ? nullptr : args.zeros + at);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
          char* row = x + r * row_bytes;
          const float sum_of_x = layout.sums(row)[g], scale_of_x = layout.scales(row)[g];
          sum[r][v] = Format::scaled(sum[r][v], dots[r][v], offset, sum_of_x, scale, scale_of_x);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) store(sums[r] + (first + v) * LANES, sum[r][v]);
  }
}

}  // namespace trtspec::TRTSPEC_ISA
