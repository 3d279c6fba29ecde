// packed_linear for packed weights: x [T, K] times panels of 32 output columns.
//
// The weights are read once for all rows of x, slice by slice. The kernel loads a step of a panel (32 columns x one
// 32-bit word), broadcasts each row's word and multiplies it with the step. An output has one accumulator, which takes
// the steps in order, whatever the number of rows. So a row's bits do not depend on the other rows. With one row the
// kernel runs at the speed of memory. With more rows it does so too, until their multiplications take longer.
//
// linear_block cuts many rows into even blocks of at most SUMS_ROWS. Within a block, all tiles pass over a slice of the
// panel while it is in L1. Between slices the accumulators are kept in memory as they are, so the order of the additions
// is the same.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "elementwise.h"
#include "kernels.h"
#if defined(__AMX_INT8__)
#include "linear_amx.h"
#endif
#include "linear_rows.h"
#include "linear_tiles.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

// -- rows to tiles ----------------------------------------------------------------------------------------------------

template <class Format, int ROWS, bool in_one_pass>
void tile(const LinearArgs& args, const Piece& piece, Prefetch& ahead, Accumulators* sums) {
  constexpr int N = vectors_at_once<Format>(ROWS, in_one_pass);
  if constexpr (Format::GROUPED) group_tile<Format, ROWS, N>(args, piece, ahead, sums);
  else column_tile<Format, ROWS, N>(args, piece, ahead, sums);
}

// Functions for tiles of 1, 2, ... rows.
template <class Format, bool in_one_pass, int... N> constexpr auto tiles_of(std::integer_sequence<int, N...>) {
  return std::array{&tile<Format, N + 1, in_one_pass>...};
}

// Call body(row, count) for tiles of at most TILE_ROWS rows, as even as possible. 13 rows become 7 and 6, because a
// tile of one row would cost nearly as much as one of six. Where tiles of two rows pass over a panel once and others
// twice, the last tile may have two rows.
template <class Format, class Body> INLINE void for_tiles(int64_t rows, Body body) {
  constexpr int MOST = TILE_ROWS<Format>;
  constexpr bool pairs_are_cheap = vectors_at_once<Format>(2) > vectors_at_once<Format>(MOST);
  const int64_t pair = pairs_are_cheap && rows > MOST && (rows - 1) % MOST < 2 ? 2 : 0;
  const int64_t even = rows - pair;
  int64_t row = 0;
  for (int64_t tiles = (even + MOST - 1) / MOST; tiles > 0; --tiles) {
    const int64_t count = (even - row + tiles - 1) / tiles;
    body(row, count);
    row += count;
  }
  if (pair > 0) body(row, pair);
}

// Call body(step, steps) for every slice of a panel: steps [step, step + steps).
template <class Body> INLINE void for_slices(const LinearArgs& args, Body body) {
  for (int64_t step = 0; step < args.steps; step += SLICE_STEPS)
    body(step, args.steps - step < SLICE_STEPS ? args.steps - step : SLICE_STEPS);
}

// sums = x * panel by one tile, which passes over the panel once. It prefetches stream_ahead bytes ahead: near the end of
// the panel, what comes after it in memory.
INLINE void stream_once(const LinearArgs& args, const auto& tile, int64_t panel, char* x, int64_t row_bytes,
                        Accumulators* sums) {
  Prefetch ahead = {words_at(args, panel, 0) + args.stream_ahead, STEP_BYTES, NOT_NEAR};
  tile(args, {panel, 0, args.steps, x, row_bytes}, ahead, sums);
}

// sums = x * panel, for so few rows that a machine that reads ahead keeps up with them, in as few passes as the
// registers allow. Without stream_ahead, tiles prefetch only what they are about to load, which is a little faster than
// no prefetch.
template <class Format>
void stream_panel(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes, Accumulators* sums) {
  constexpr int MOST = Format::streamed_rows(MOST_GROUP_STEPS);
  static constexpr auto tiles = tiles_of<Format, true>(std::make_integer_sequence<int, MOST>());
  if (args.stream_ahead > 0 && vectors_at_once<Format>(int(rows), true) == VECTORS)
    return stream_once(args, tiles[rows - 1], panel, x, row_bytes, sums);
  for_slices(args, [&](int64_t step, int64_t steps) {
    Prefetch ahead = {words_at(args, panel, step) + args.stream_ahead, STEP_BYTES, 0};
    tiles[rows - 1](args, {panel, step, steps, x, row_bytes}, ahead, sums);
  });
}

// Distance, in bytes, at which tiles prefetch memory. It is the same in each slice, so that no bytes are left out.
INLINE int64_t look_ahead(const LinearArgs& args, int64_t rows, int64_t passes) {
  if (passes > 1 && (args.reads_ahead || rows > 2)) return A_SLICE_AHEAD;
  return args.reads_ahead ? TWO_PAGES_AHEAD : rows <= 2 ? A_LITTLE_AHEAD : A_PAGE_AHEAD;
}

// sums = x * panel, slice by slice. While tiles compute a slice, they prefetch what comes after it, each pass its
// share. So memory accesses and arithmetic overlap.
template <class Format>
void panel_sums(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes, Accumulators* sums) {
  begin_sums(sums, rows);
  if (args.reads_ahead && rows <= Format::streamed_rows(args.steps / args.groups))
    return stream_panel<Format>(args, panel, rows, x, row_bytes, sums);
  using Counts = std::make_integer_sequence<int, TILE_ROWS<Format>>;
  static constexpr auto tiles = tiles_of<Format, false>(Counts());
  int64_t passes = 0;
  for_tiles<Format>(rows, [&](int64_t, int64_t count) { passes += VECTORS / vectors_at_once<Format>(count); });
  if (passes == 1 && args.stream_ahead > 0) return stream_once(args, tiles[rows - 1], panel, x, row_bytes, sums);
  const int64_t distance = look_ahead(args, rows, passes), near = args.reads_ahead ? 0 : NEAR;
  for_slices(args, [&](int64_t step, int64_t steps) {
    Prefetch ahead = {words_at(args, panel, step) + distance, (STEP_BYTES + passes - 1) / passes, near};
    for_tiles<Format>(rows, [&](int64_t row, int64_t count) {
      tiles[count - 1](args, {panel, step, steps, x + row * row_bytes, row_bytes}, ahead, sums + row);
    });
  });
}

void fp8_panel(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes, Accumulators* sums) {
  panel_sums<Fp8Weights>(args, panel, rows, x, row_bytes, sums);
  const float unit = (args.x_scale != 0 ? args.x_scale : 1.0f) * Fp8Weights::UNIT;
  const float* scales = static_cast<const float*>(args.scales) + panel * PANEL;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t lane = 0; lane < PANEL; lane += LANES)
      store(sums[r] + lane, load(sums[r] + lane) * (load(scales + lane) * unit));
}

// A function that computes the sums of a panel in one format, for all given rows.
typedef void PanelKernel(const LinearArgs&, int64_t panel, int64_t rows, char* x, int64_t row_bytes, Accumulators*);

#if defined(__AMX_INT8__)
template <class Format> PanelKernel* sums_of_panel(const LinearArgs& args) {
  if (in_tiles<Format>(args)) {
    if constexpr (Format::GROUPED) return &group_tiles_of_panel<Format>;
    else return &tiles_of_panel<Format>;
  }
  return std::is_same_v<Format, Bf16Weights> ? &few_bf16_rows : &panel_sums<Format>;
}
#else
template <class Format> bool in_tiles(const LinearArgs&) { return false; }
template <class Format> PanelKernel* sums_of_panel(const LinearArgs&) { return &panel_sums<Format>; }
#endif

void int8_panel(const LinearArgs& args, int64_t panel, int64_t rows, char* x, int64_t row_bytes, Accumulators* sums) {
  sums_of_panel<Int8Weights>(args)(args, panel, rows, x, row_bytes, sums);
  const IntRow<Int8Weights> layout(args);
  const float* scales = static_cast<const float*>(args.scales) + panel * PANEL;
  for (int64_t r = 0; r < rows; ++r, x += row_bytes)
    for (int64_t lane = 0; lane < PANEL; lane += LANES) {
      const int32_t sum_of_x = in_tiles<Int8Weights>(args) ? 0 : layout.sums(x)[0];  // tiles take signed weights
      const Vec exact = Int8Weights::exact(load_as<IVec>(sums[r] + lane), sum_of_x);
      store(sums[r] + lane, exact * (load(scales + lane) * layout.scales(x)[0]));
    }
}

// -- results ----------------------------------------------------------------------------------------------------------

// out = sums + bias, rounded once, for the columns of a panel that exist.
template <class Bias, class Out>
void write_rows(const LinearArgs& args, int64_t panel, int64_t row, int64_t rows, const Accumulators* sums) {
  const auto* bias = static_cast<const Bias*>(args.bias);
  const int64_t column = panel * PANEL, columns = args.out_features - column;
  Vec add[VECTORS] = {};
  for (int64_t v = 0; bias != nullptr && v < VECTORS && v * LANES < columns; ++v)
    add[v] = load_up_to(bias + column + v * LANES, columns - v * LANES);
  Out* out = static_cast<Out*>(args.out) + row * args.out_features + column;
  for (int64_t r = 0; r < rows; ++r, out += args.out_features)
    for (int64_t v = 0; v < VECTORS; ++v) {
      const int64_t left = columns - v * LANES;
      const Vec sum = load(sums[r] + v * LANES), value = bias == nullptr ? sum : sum + add[v];
      if (left >= LANES) store(out + v * LANES, value);
      else if (left > 0) store(out + v * LANES, value, int(left));
    }
}

// out = silu(gate) * up, for two panels of columns that all exist. Gates and ups are rounded to T, as silu_mul gets them.
template <class T>
void write_swiglu(const LinearArgs& args, int64_t panel, int64_t row, int64_t rows, const Accumulators* gates,
                  const Accumulators* ups) {
  const int64_t column = panel * PANEL, width = args.out_features / 2;
  const auto* bias = static_cast<const T*>(args.bias);
  T* out = static_cast<T*>(args.out) + row * width + column;
  for (int64_t r = 0; r < rows; ++r, out += width)
    for (int64_t lane = 0; lane < PANEL; lane += LANES) {
      Vec gate = load(gates[r] + lane), up = load(ups[r] + lane);
      if (bias != nullptr) gate += load(bias + column + lane), up += load(bias + width + column + lane);
      store(out + lane, gated<T>(rounded<T>(gate), rounded<T>(up)));
    }
}

INLINE auto swiglu_writer(const LinearArgs& args) {
  switch (args.element) {
    case Element::fp32: return &write_swiglu<float>;
    case Element::bf16: return &write_swiglu<BFloat16>;
    default: return &write_swiglu<Half>;
  }
}

INLINE auto row_writer(const LinearArgs& args) {
  switch (args.element) {
    case Element::fp32: return &write_rows<float, float>;
    case Element::bf16: return args.float_out ? &write_rows<BFloat16, float> : &write_rows<BFloat16, BFloat16>;
    default: return args.float_out ? &write_rows<Half, float> : &write_rows<Half, Half>;
  }
}

// -- entries of the kernel table --------------------------------------------------------------------------------------

INLINE int64_t prepared_bytes(const LinearArgs& args) {
  const int64_t steps = row_steps(args);
  switch (args.format) {
    case WeightFormat::fp32: return steps * Fp32Weights::ROW_BYTES;
#if defined(__AMX_INT8__)
    case WeightFormat::bf16: return steps * (in_tiles<Bf16Weights>(args) ? Bf16Weights::ROW_BYTES : WIDE_STEP);
#else
    case WeightFormat::bf16: return steps * Bf16Weights::ROW_BYTES;
#endif
    case WeightFormat::fp16: return steps * Fp16Weights::ROW_BYTES;
    case WeightFormat::fp8: return steps * Fp8Weights::ROW_BYTES;
    case WeightFormat::int8: return IntRow<Int8Weights>(args).bytes();
    case WeightFormat::int8_groups: return IntRow<Int8GroupWeights>(args).bytes();
    default: return IntRow<Int4Weights>(args).bytes();
  }
}

// Bytes of a prepared row, an odd number of cache lines. A tile reads the same offset of all its rows at once. Rows
// 4 KB apart would be in one set of L1.
int64_t linear_row_bytes(const LinearArgs& args) { return ((prepared_bytes(args) + 63) / 64 | 1) * 64; }

// Formats whose prepared rows are the bytes of x take x itself, unless its rows are so far apart that many are in one
// set of L1. (Tiles of AMX read padded rows, and whole tiles of them.)
bool linear_takes_x(const LinearArgs& args) {
#if defined(__AMX_INT8__)
  return false;
#else
  constexpr int64_t SETS_OF_BYTES = 2048;
  const int64_t bytes = bytes_of(args.element);
  const bool same = (args.format == WeightFormat::fp32 && args.element == Element::fp32) ||
                    (args.format == WeightFormat::bf16 && std::is_same_v<Bf16Weights::Input, BFloat16>);
  return same && args.depth * bytes == prepared_bytes(args) && args.x_step * bytes % SETS_OF_BYTES != 0;
#endif
}

void linear_prepare(const LinearArgs& args, int64_t row_begin, int64_t row_end) {
  const auto prepare = args.element == Element::fp32   ? &prepare_row<float>
                       : args.element == Element::bf16 ? &prepare_row<BFloat16>
                                               : &prepare_row<Half>;
  for (int64_t row = row_begin; row < row_end; ++row) prepare(args, row, args.prepared + row * args.row_bytes);
}

INLINE auto panel_kernel(const LinearArgs& args) {
  switch (args.format) {
    case WeightFormat::fp32: return &panel_sums<Fp32Weights>;
    case WeightFormat::bf16: return sums_of_panel<Bf16Weights>(args);
    case WeightFormat::fp16: return &panel_sums<Fp16Weights>;
    case WeightFormat::fp8: return &fp8_panel;
    case WeightFormat::int8: return &int8_panel;
    case WeightFormat::int8_groups: return sums_of_panel<Int8GroupWeights>(args);
    default: return sums_of_panel<Int4Weights>(args);
  }
}

constexpr int64_t SUMS_ROWS = 96;    // their sums stay in L1, together with a slice of a panel
constexpr int64_t WHOLE_TILES = 12;  // rows of one or two tiles, in every format

int64_t linear_block_rows(const LinearArgs& args) {
#if defined(__AMX_INT8__)
  if (tile_bytes(args) > 0) {
    const int64_t rows = BLOCK_BYTES / linear_row_bytes(args) / SUMS_ROWS * SUMS_ROWS;
    return rows < SUMS_ROWS ? SUMS_ROWS : rows < MOST_BLOCK_ROWS ? rows : MOST_BLOCK_ROWS;
  }
#endif
  // Blocks are as even as possible: one of few rows would take as long as memory does.
  const int64_t blocks = (args.rows + SUMS_ROWS - 1) / SUMS_ROWS, tiles = (args.rows + WHOLE_TILES - 1) / WHOLE_TILES;
  return blocks <= 1 ? SUMS_ROWS : (tiles + blocks - 1) / blocks * WHOLE_TILES;
}

int64_t linear_chunk_bytes(const LinearArgs& args) {
  const int64_t block_rows = linear_block_rows(args), rows = args.rows < block_rows ? args.rows : block_rows;
#if defined(__AMX_INT8__)  // tile setup takes a twentieth of a microsecond
  if (tile_bytes(args) > 0) {
    constexpr int64_t PANELS_OF_MANY_ROWS = 4;  // their results of a row are adjacent in memory
    if (args.rows > block_rows) return PANELS_OF_MANY_ROWS * args.steps * STEP_BYTES;
    return 32 * 1024 / ((rows + 2 * SIDE - 1) / (2 * SIDE));
  }
#endif
  constexpr int64_t ROWS_FOR_ONE = 4;  // rows that take as long as one
  return 32 * 1024 / ((rows + ROWS_FOR_ONE - 1) / ROWS_FOR_ONE);
}

void linear_block(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  alignas(64) Accumulators sums[SUMS_ROWS], ups[SUMS_ROWS];
  const int64_t row_bytes = args.row_bytes;
#if defined(__AMX_INT8__)
  const Tiles tiles(row_end - row_begin, tile_bytes(args));
#endif
  const auto multiply_panel = panel_kernel(args);
  const auto write = row_writer(args);
  const int64_t up_panels = args.out_features / 2 / PANEL;
  for (int64_t row = row_begin; row < row_end; row += SUMS_ROWS)
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const int64_t rows = row_end - row < SUMS_ROWS ? row_end - row : SUMS_ROWS;
      multiply_panel(args, panel, rows, args.prepared + row * row_bytes, row_bytes, sums);
      if (args.swiglu) {
        multiply_panel(args, panel + up_panels, rows, args.prepared + row * row_bytes, row_bytes, ups);
        swiglu_writer(args)(args, panel, row, rows, sums, ups);
      } else {
        write(args, panel, row, rows, sums);
      }
    }
}

}  // namespace trtspec::TRTSPEC_ISA
