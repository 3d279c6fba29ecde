// Attention of some rows of a request over its paged KV cache, for one KV head.
//
// A *line* is one query head of one row. The G query heads of a row that share the KV head are adjacent. Keys are cut
// in tiles of TILE from position 0. For each tile, K is transposed once for all lines, so that a lane is a key. Then a
// few lines at a time compute scores, the running softmax, and the sum of values, which are widened as they are loaded.
//
// A line's bits depend on that line alone: its operations and their order do not depend on the other lines here. A key
// that it does not see has weight 0. fma(0, finite, x) is x, except for the sign of a zero, which the last step clears.
// So it makes no difference whether keys after a line's own, or whole tiles, are added or left out.
#pragma once

#include "attention_rows.h"
#include "attention_workspace.h"
#include "kernels.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

constexpr int LINES = 6;                        // lines x columns of vectors fit in the registers
constexpr int COLUMNS = LANES == 16 ? 4 : 2;
constexpr float FLOOR = -1e30f;                 // highest score of a line that has seen no key. It is finite, so that
                                                // differences are numbers

// A dot product goes over units of 32 bits. A unit is one fp32 number, or two adjacent bf16 numbers where the machine
// multiplies bf16 directly.
struct BFloat16Pair { uint32_t bits; };

template <class T> struct UnitOf { using type = float; };
#if defined(__AVX512BF16__)
template <> struct UnitOf<BFloat16> { using type = BFloat16Pair; };
#endif

INLINE Vec multiply_add(float a, Vec b, Vec c) { return fma(splat(a), b, c); }
#if defined(__AVX512BF16__)
INLINE Vec multiply_add(BFloat16Pair a, Vec b, Vec c) {
  return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(int(a.bits)), (__m512bh)b);
}
#endif

// Number of elements in a unit.
template <class Unit> constexpr int64_t elements_per = 1;
template <> constexpr int64_t elements_per<BFloat16Pair> = 2;

// Load LANES units of a head, from unit `at` on.
template <class Unit, class T> INLINE Vec load_whole_units(const T* head, int64_t at) {
  if constexpr (elements_per<Unit> == 1) return load(head + at);
  else return load_as<Vec>(head + at * elements_per<Unit>);
}

// The same for a head of `dim` elements; 0 past its end.
template <class Unit, class T> INLINE Vec load_units(const T* head, int64_t at, int64_t dim) {
  constexpr int64_t packed = elements_per<Unit>;
  const int64_t left = dim - at * packed;
  if (left >= packed * LANES) return load_whole_units<Unit>(head, at);
  if constexpr (packed == 1) return load(head + at, int(left));
  Vec padded{};
  std::memcpy(&padded, head + at * packed, left * sizeof(T));
  return padded;
}

// -- loading a tile --------------------------------------------------------------------------------------------------

// Fill keys[unit][key], at least from key `from` on; 0 for keys that are not in the tile.
template <class T, class Unit>
void turn_keys(const Rows& rows, const Tile& tile, int from, Unit* keys, int64_t units, Ahead<T>& ahead) {
  const int64_t dim = rows.args.head_dim, whole_units = dim / elements_per<Unit> / LANES * LANES;
  const T* const cache = static_cast<const T*>(rows.args.k_cache.data);
  for (int key = from / LANES * LANES; key < tile.end; key += LANES) {
    ahead.keys(LANES);
    const int64_t* const places = tile.places + key;
    const bool whole = key >= tile.first && key + LANES <= tile.end;
    for (int64_t unit = 0; unit < units; unit += LANES) {
      Vec square[LANES];
      if (whole && unit < whole_units) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) square[i] = load_whole_units<Unit>(cache + places[i], unit);
      } else {
        for (int i = 0; i < LANES; ++i) {
          const bool within = key + i >= tile.first && key + i < tile.end;
          square[i] = within ? load_units<Unit>(cache + places[i], unit, dim) : Vec{};
        }
      }
      transpose(square);
      // keys [key, key + LANES) of units [unit, unit + LANES)
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) std::memcpy(keys + (unit + i) * TILE + key, &square[i], sizeof(Vec));
    }
  }
}

// -- a few lines against a tile --------------------------------------------------------------------------------------

// sum[l][c] = a[l][0] * b[0][c] + a[l][1] * b[1][c] + ..., in this order; c counts vectors.
template <int L, int C, class Unit, class B>
INLINE void multiply(Vec (&sum)[L][C], const Unit* a, int64_t a_step, const B* b, int64_t b_step, int64_t depth) {
#pragma GCC unroll 8
  for (int l = 0; l < L; ++l)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sum[l][c] = Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) row[c] = load_as<Vec>(b + k * b_step + c * LANES);
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[l][c] = multiply_add(a[l * a_step + k], row[c], sum[l][c]);
  }
}

template <int L> using Scores = float[L][TILE];

// scores[l][key] = scale * query l * key. Scores from `end` on, up to a whole number of vectors, are arbitrary.
template <int L, class Unit>
INLINE void score(Scores<L>& scores, const Unit* queries, const Unit* keys, int64_t units, int end, float scale) {
  for (int key = 0; key < end; key += COLUMNS * LANES) {
    Vec dots[L][COLUMNS];
    multiply(dots, queries, units, keys + key, TILE, units);
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l)
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; ++c) store(scores[l] + key + c * LANES, dots[l][c] * scale);
  }
}

inline void cap(float* scores, int64_t count, float softcap) {
  for (int64_t i = 0; i < count; i += LANES) store(scores + i, tanh(load(scores + i) / softcap) * softcap);
}

// Turn the scores of a line into weights relative to the highest score so far, which may be a new one. Return the
// factor for all earlier weights. A key that is not seen gets weight 0 without an exponential: e^-inf through subnormal
// numbers takes as long as a hundred others.
INLINE float weigh(float* line, uint64_t seen, float& top, float* total) {
  constexpr int vectors = TILE / LANES;
  constexpr uint64_t lanes = (uint64_t(1) << LANES) - 1;
  Vec score[vectors], best = splat(FLOOR);
#pragma GCC unroll 16
  for (int i = 0; i < vectors; ++i) {
    score[i] = load(line + i * LANES);
    const uint64_t bits = seen >> (i * LANES) & lanes;
    best = max(best, bits == lanes ? score[i] : lanes_of(bits) ? score[i] : splat(FLOOR));
  }
  const float before = top, now = highest(best);
  float share = 1;
  if (!(now <= before)) {
    top = now;
    share = before == FLOOR ? 0.0f : exp(splat(before - now))[0];  // no key was seen: sums are 0
  }
  Vec added{};
#pragma GCC unroll 16
  for (int i = 0; i < vectors; ++i) {
    const uint64_t bits = seen >> (i * LANES) & lanes;
    Vec weight{};
    if (bits == lanes) weight = exp(score[i] - top);
    else if (bits != 0) weight = lanes_of(bits) ? exp((lanes_of(bits) ? score[i] : splat(top)) - top) : Vec{};
    store(line + i * LANES, weight);
    added += weight;
  }
  store(total, fma(load(total), splat(share), added));
  return share;
}

// sums[l] = sums[l] * share + weights * values, for C vectors of each line, from element d on.
//
// A value that is not finite makes the sums of all lines such. A line that does not see its key adds 0 * NaN. So if the
// first line's sums are not all finite, all lines are done again, without keys that they do not see.
template <int L, int C, class T>
INLINE void add_columns(const Rows& rows, const Tile& tile, float* sums, int64_t width, const Scores<L>& weights,
                        const uint64_t* seen, const float (&shares)[L], int64_t d, Ahead<T>& ahead) {
  const auto values = [&](int key, Vec (&to)[C]) __attribute__((always_inline)) {
    const T* from = rows.cached<T>(rows.args.v_cache, tile.places[key]);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      to[c] = C > 1 ? load(from + d + c * LANES) : load_units<float>(from, d, rows.args.head_dim);
  };
  Vec value[C], added[L][C];
#pragma GCC unroll 8
  for (int l = 0; l < L; ++l)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) added[l][c] = Vec{};
  for (int key = tile.first; key < tile.end; ++key) {
    ahead.values(1);
    values(key, value);
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) added[l][c] = fma(splat(weights[l][key]), value[c], added[l][c]);
  }
  IVec unusable{};
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) unusable |= ((UVec)added[0][c] & 0x7fffffff) >= 0x7f800000;
  if (any(unusable)) [[unlikely]]
    for (int l = 0; l < L; ++l) {
      for (int c = 0; c < C; ++c) added[l][c] = Vec{};
      for (int key = tile.first; key < tile.end; ++key) {
        if (!(seen[l] >> key & 1)) continue;
        values(key, value);
        for (int c = 0; c < C; ++c) added[l][c] = fma(splat(weights[l][key]), value[c], added[l][c]);
      }
    }
#pragma GCC unroll 8
  for (int l = 0; l < L; ++l)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      float* at = sums + l * width + d + c * LANES;
      store(at, fma(load(at), splat(shares[l]), added[l][c]));
    }
}

template <int L, class T>
INLINE void add_values(const Rows& rows, const Tile& tile, float* sums, int64_t width, const Scores<L>& weights,
                       const uint64_t* seen, const float (&shares)[L], Ahead<T>& ahead) {
  int64_t d = 0;
  for (; d + COLUMNS * LANES <= rows.args.head_dim; d += COLUMNS * LANES)
    add_columns<L, COLUMNS, T>(rows, tile, sums, width, weights, seen, shares, d, ahead);
  for (; d < width; d += LANES) add_columns<L, 1, T>(rows, tile, sums, width, weights, seen, shares, d, ahead);
}

// Attend with lines [line, line + L) to the tile in the workspace.
template <int L, class T, class Unit>
void attend_lines(const Rows& rows, const Workspace<Unit>& work, const Tile& tile, int64_t line, Ahead<T>& ahead) {
  alignas(64) Scores<L> scores = {};
  float shares[L];
  const uint64_t* seen = work.seen + line;
  score<L>(scores, work.queries + line * work.units, work.keys, work.units, tile.end, rows.args.scale);
  if (rows.args.softcap > 0) cap(scores[0], L * TILE, rows.args.softcap);
  for (int l = 0; l < L; ++l)
    shares[l] = weigh(scores[l], seen[l], work.tops[line + l], work.totals + (line + l) * LANES);
  add_values<L, T>(rows, tile, work.sums + line * work.width, work.width, scores, seen, shares, ahead);
}

// Return whether one of the lines sees a key of the tile. A tile of which it sees none does not change a line.
INLINE bool sees_any(const uint64_t* seen, int64_t count) {
  uint64_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= seen[i];
  return any != 0;
}

// Attend with all lines to the tile, as many at a time as the registers hold. Lines that see none of it are left out.
template <class T, class Unit>
void attend_tile(const Rows& rows, const Workspace<Unit>& work, const Tile& tile, Ahead<T>& ahead) {
  for (int64_t line = 0, count; line < rows.lines(); line += count) {
    if (work.seen[line] == 0) {
      count = 1;
      continue;
    }
    const int64_t left = rows.lines() - line;
    count = left <= LINES ? left : left < 2 * LINES ? (left + 1) / 2 : LINES;
    while (work.seen[line + count - 1] == 0) --count;
    switch (count) {
      case 1: attend_lines<1, T>(rows, work, tile, line, ahead); break;
      case 2: attend_lines<2, T>(rows, work, tile, line, ahead); break;
      case 3: attend_lines<3, T>(rows, work, tile, line, ahead); break;
      case 4: attend_lines<4, T>(rows, work, tile, line, ahead); break;
      case 5: attend_lines<5, T>(rows, work, tile, line, ahead); break;
      default: attend_lines<LINES, T>(rows, work, tile, line, ahead);
    }
  }
}

// -- a whole piece ---------------------------------------------------------------------------------------------------

// out = sums / totals, with the sink as one more weight.
template <class T, class Unit> void finish(const Rows& rows, const Workspace<Unit>& work) {
  const int64_t dim = rows.args.head_dim, width = work.width;
  for (int64_t line = 0; line < rows.lines(); ++line) {
    float top = work.tops[line], share = 1, sink = 0;
    if (rows.args.sinks != nullptr) {
      const float logit = rows.args.sinks[rows.query_head(line)];
      if (logit > top) {
        share = exp(splat(top - logit))[0];
        top = logit;
      }
      sink = exp(splat(logit - top))[0];
    }
    const float total = sum(load(work.totals + line * LANES)) * share + sink;
    T* out = rows.line<T>(rows.args.out, line);
    for (int64_t d = 0; d < width; d += LANES) {
      const Vec value = load(work.sums + line * width + d) * share / total + 0.0f;  // + 0 clears the sign of a zero
      if (d + LANES <= dim) store(out + d, value);
      else if (d < dim) store(out + d, value, int(dim - d));
    }
  }
}

template <class T, class Unit> void begin(const Rows& rows, const Workspace<Unit>& work) {
  const int64_t lines = rows.lines();
  for (int64_t line = 0; line < lines; ++line) {
    const T* query = rows.line<const T>(rows.args.q, line);
    for (int64_t unit = 0; unit < work.units; unit += LANES) {
      const Vec loaded = load_units<Unit>(query, unit, rows.args.head_dim);
      std::memcpy(work.queries + line * work.units + unit, &loaded, sizeof loaded);
    }
    work.tops[line] = FLOOR;
  }
  std::memset(work.sums, 0, lines * work.width * sizeof(float));
  std::memset(work.totals, 0, lines * LANES * sizeof(float));
}

// Units of a head, rounded up to whole vectors.
template <class Unit> int64_t padded_units(const Rows& rows) {
  return round_up((rows.args.head_dim + elements_per<Unit> - 1) / elements_per<Unit>, LANES);
}

// The parts of attend_rows that differ: here with vector instructions.
template <class T> class InVectors {
 public:
  using Unit = typename UnitOf<T>::type;

  explicit InVectors(const Rows& rows)
      : work(workspace<Unit>(rows.lines(), padded_units<Unit>(rows), round_up(rows.args.head_dim, LANES))) {}

  void begin_queries(const Rows&) {}

  void bring_in(const Rows& rows, const Tile& tile, int from, Ahead<T>& ahead) {
    turn_keys<T>(rows, tile, from, work.keys, work.units, ahead);
  }

  void attend(const Rows& rows, const Tile& tile, Ahead<T>& ahead) const { attend_tile<T>(rows, work, tile, ahead); }

  const Workspace<Unit> work;
};

template <class T, class How>
void attend_rows(const AttentionArgs& args, const AttentionPiece& piece, const AttentionPiece* following) {
  const Rows rows(args, piece);
  How how(rows);
  const auto& work = how.work;
  const int64_t end = rows.highest + 1;
  const bool branches = rows.in_line < end;
  int64_t path_of[LINES_PER_PIECE];
  if (branches) rows.find_paths(path_of);
  const Rows others(args, following != nullptr ? *following : piece);
  Tile tile, next = rows.first_tile();
  Ahead<T>(rows, next).rest();
  begin<T>(rows, work);
  how.begin_queries(rows);
  for (int64_t start = next.start; start < end; start += TILE) {
    tile = next;
    const bool last = start + TILE >= end;
    next = last ? others.first_tile() : rows.tile(start + TILE);
    if (last && following == nullptr) next.end = next.first;
    Ahead<T> ahead(last ? others : rows, next);
    const bool by_path = branches && start + TILE > rows.in_line;
    int from = 0;  // the first key that the next path may have elsewhere
    for (int64_t path = by_path ? -1 : 0; path < (by_path ? piece.num_rows : 1); ++path) {
      if (by_path && path >= 0 && path_of[path] != path) continue;
      for (int64_t row = 0, line = 0; row < piece.num_rows; ++row) {
        const uint64_t seen = by_path && path_of[row] != path ? 0 : rows.seen(row, start);
        for (int64_t head = 0; head < rows.group; ++head) work.seen[line++] = seen;
      }
      if (by_path && !sees_any(work.seen, rows.lines())) continue;
      if (by_path && path >= 0) tile = rows.tile_of_path(start, path);
      how.bring_in(rows, tile, from, ahead);
      how.attend(rows, tile, ahead);
      from = rows.in_line > start ? int(rows.in_line - start) : 0;
    }
    ahead.rest();
  }
  finish<T>(rows, work);
}

}  // namespace trtspec::TRTSPEC_ISA
