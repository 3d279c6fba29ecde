// Attention of some rows of a request over its paged KV cache, for one KV head.
//
// A *line* is one query head of one row; the G query heads of a row that share the KV head are neighbours. Keys are cut
// in tiles of TILE from position 0. Of each tile, K is turned on its side, so that a lane is a key, and V is widened to
// fp32, once for all lines. Then, a few lines at a time, scores, the running softmax, and the sum of values.
//
// A line's bits are its own: it does the same operations in the same order whatever other lines are here. A key that it
// does not see has weight 0, and fma(0, finite, x) is x, but for the sign of a zero, which the last step clears; so it
// makes no difference whether the keys behind a line, or whole tiles, are added or left out.
#pragma once

#include <cstdlib>
#include <new>

#include "attention_rows.h"
#include "kernels.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

constexpr int LINES = 6;                        // lines x columns of vectors: what the registers hold
constexpr int COLUMNS = LANES == 16 ? 4 : 2;
constexpr float FLOOR = -1e30f;                 // highest score of a line that has seen nothing: finite, so that
                                                // differences are numbers

// A dot product goes over units of 32 bits: one fp32 number, or two neighbouring bf16 numbers where the machine
// multiplies those as they are.
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

// Elements in a unit.
template <class Unit> constexpr int64_t elements_per = 1;
template <> constexpr int64_t elements_per<BFloat16Pair> = 2;

INLINE int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// LANES units of a head of `dim` elements, from unit `at` on; 0 past its end.
template <class Unit, class T> INLINE Vec load_units(const T* head, int64_t at, int64_t dim) {
  constexpr int64_t packed = elements_per<Unit>;
  const T* from = head + at * packed;
  const int64_t left = dim - at * packed;
  if constexpr (packed == 1) return left >= LANES ? load(from) : load(from, int(left));
  if (left >= packed * LANES) return load_as<Vec>(from);
  Vec padded{};
  std::memcpy(&padded, from, left * sizeof(T));
  return padded;
}

// What a piece is worked out with. `units` and `width` are D in units and in fp32 numbers, up to whole vectors.
template <class Unit> struct Workspace {
  int64_t units, width;
  Unit* queries;    // [lines][units]
  Unit* keys;       // [units][TILE]
  float* values;    // [TILE][width]
  float* sums;      // [lines][width], values so far, by weights relative to e^top
  float* totals;    // [lines][LANES], weights so far, by lane
  float* tops;      // [lines], highest score so far
  uint64_t* seen;   // [lines], which keys of the tile
};

// -- bringing a tile in ----------------------------------------------------------------------------------------------

// keys[unit][key]; 0 for keys that are not of the tile.
template <class T, class Unit>
void turn_keys(const Rows& rows, const Tile& tile, Unit* keys, int64_t units, Ahead<T>& ahead) {
  const auto units_at = [&](int key, int64_t unit) {
    return load_units<Unit>(rows.cached<T>(rows.args.k_cache, tile.slots[key]), unit, rows.args.head_dim);
  };
  for (int key = 0; key < tile.end; key += LANES) {
    ahead.keys(LANES);
    for (int64_t unit = 0; unit < units; unit += LANES) {
      Vec square[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        const bool within = key + i >= tile.first && key + i < tile.end;
        square[i] = within ? units_at(key + i, unit) : Vec{};
      }
      transpose(square);
      // keys [key, key + LANES) of units [unit, unit + LANES)
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) std::memcpy(keys + (unit + i) * TILE + key, &square[i], sizeof(Vec));
    }
  }
}

// values[key][element] in fp32. Whether all of them are finite.
template <class T>
bool widen_values(const Rows& rows, const Tile& tile, float* values, int64_t width, Ahead<T>& ahead) {
  UVec largest{};  // magnitudes as bits
  for (int key = tile.first; key < tile.end; ++key) {
    ahead.values(1);
    const T* from = rows.cached<T>(rows.args.v_cache, tile.slots[key]);
    float* to = values + key * width;
    for (int64_t d = 0; d < width; d += LANES) {
      const Vec value = load_units<float>(from, d, rows.args.head_dim);
      const UVec magnitude = (UVec)value & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
      store(to + d, value);
    }
  }
  bool finite = true;
  for (int i = 0; i < LANES; ++i) finite &= largest[i] < 0x7f800000;
  return finite;
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

// scores[l][key] = scale * query l * key. Past `end`, up to a whole number of vectors, there is junk.
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

// Lanes of `bits` whose bit is set, all ones.
INLINE IVec lanes_of(uint64_t bits) {
  IVec place;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) place[i] = 1 << i;
  return ((IVec{} + int32_t(bits & 0xffff)) & place) != 0;
}

// Scores of a line become weights relative to the highest score so far, which may be a new one. Returns what all
// earlier weights are to be multiplied with. What is not seen gets 0 and is not worked out: e^-inf by way of numbers
// below the normal ones takes as long as a hundred others.
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
    share = before == FLOOR ? 0.0f : exp(splat(before - now))[0];  // sums are 0 where nothing was seen
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

// sums = sums * share + weights * values, of C vectors of each line.
template <int L, int C>
INLINE void add_columns(float* sums, const Scores<L>& weights, const float (&shares)[L], const float* values,
                        int64_t width, const Tile& tile) {
  Vec added[L][C];
  multiply(added, weights[0] + tile.first, TILE, values + tile.first * width, width, tile.end - tile.first);
#pragma GCC unroll 8
  for (int l = 0; l < L; ++l)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      float* at = sums + l * width + c * LANES;
      store(at, fma(load(at), splat(shares[l]), added[l][c]));
    }
}

template <int L>
INLINE void add_values(float* sums, const Scores<L>& weights, const float (&shares)[L], const float* values,
                       int64_t width, const Tile& tile) {
  int64_t d = 0;
  for (; d + COLUMNS * LANES <= width; d += COLUMNS * LANES)
    add_columns<L, COLUMNS>(sums + d, weights, shares, values + d, width, tile);
  for (; d < width; d += LANES) add_columns<L, 1>(sums + d, weights, shares, values + d, width, tile);
}

// The same for one line and values that are not all finite: 0 * NaN is NaN, so what the line does not see is left out.
inline void add_seen_values(float* sums, const float* weights, uint64_t seen, float share, const float* values,
                            int64_t width, const Tile& tile) {
  for (int64_t d = 0; d < width; d += LANES) {
    Vec added{};
    for (int key = tile.first; key < tile.end; ++key)
      if (seen >> key & 1) added = fma(splat(weights[key]), load(values + key * width + d), added);
    store(sums + d, fma(load(sums + d), splat(share), added));
  }
}

// Lines [line, line + L) against the tile that is in the workspace.
template <int L, class Unit>
void attend_lines(const AttentionArgs& args, const Workspace<Unit>& work, const Tile& tile, bool finite, int64_t line) {
  alignas(64) Scores<L> scores = {};
  float shares[L];
  const uint64_t* seen = work.seen + line;
  score<L>(scores, work.queries + line * work.units, work.keys, work.units, tile.end, args.scale);
  if (args.softcap > 0) cap(scores[0], L * TILE, args.softcap);
  for (int l = 0; l < L; ++l)
    shares[l] = weigh(scores[l], seen[l], work.tops[line + l], work.totals + (line + l) * LANES);
  float* sums = work.sums + line * work.width;
  if (finite) return add_values<L>(sums, scores, shares, work.values, work.width, tile);
  for (int l = 0; l < L; ++l)
    add_seen_values(sums + l * work.width, scores[l], seen[l], shares[l], work.values, work.width, tile);
}

// All lines against it, as many at a time as registers hold.
template <class Unit>
void attend_tile(const Rows& rows, const Workspace<Unit>& work, const Tile& tile, bool finite) {
  for (int64_t line = 0, count; line < rows.lines(); line += count) {
    const int64_t left = rows.lines() - line;
    count = left <= LINES ? left : left < 2 * LINES ? (left + 1) / 2 : LINES;
    switch (count) {
      case 1: attend_lines<1>(rows.args, work, tile, finite, line); break;
      case 2: attend_lines<2>(rows.args, work, tile, finite, line); break;
      case 3: attend_lines<3>(rows.args, work, tile, finite, line); break;
      case 4: attend_lines<4>(rows.args, work, tile, finite, line); break;
      case 5: attend_lines<5>(rows.args, work, tile, finite, line); break;
      default: attend_lines<LINES>(rows.args, work, tile, finite, line);
    }
  }
}

// -- all of it -------------------------------------------------------------------------------------------------------

// sums / totals, with the sink as one more weight.
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
      const Vec value = load(work.sums + line * width + d) * share / total + 0.0f;  // + 0: a zero has one sign
      if (d + LANES <= dim) store(out + d, value);
      else if (d < dim) store(out + d, value, int(dim - d));
    }
  }
}

// At least `size` fp32 numbers of memory of this thread, kept for its next call.
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
  constexpr int64_t line = 64 / sizeof(float);  // each part begins a cache line
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

// Units of a head, up to whole vectors.
template <class Unit> int64_t padded_units(const Rows& rows) {
  return round_up((rows.args.head_dim + elements_per<Unit> - 1) / elements_per<Unit>, LANES);
}

// What attend_rows does with vectors of numbers.
template <class T> class InVectors {
 public:
  using Unit = typename UnitOf<T>::type;

  explicit InVectors(const Rows& rows)
      : work(workspace<Unit>(rows.lines(), padded_units<Unit>(rows), round_up(rows.args.head_dim, LANES))) {}

  void begin_queries(const Rows&) {}

  void bring_in(const Rows& rows, const Tile& tile, Ahead<T>& ahead) {
    turn_keys<T>(rows, tile, work.keys, work.units, ahead);
    finite_ = widen_values<T>(rows, tile, work.values, work.width, ahead);
  }

  void attend(const Rows& rows, const Tile& tile) const { attend_tile(rows, work, tile, finite_); }

  const Workspace<Unit> work;

 private:
  bool finite_ = true;
};

template <class T, class How>
void attend_rows(const AttentionArgs& args, const AttentionPiece& piece, const AttentionPiece* following) {
  const Rows rows(args, piece);
  How how(rows);
  const auto& work = how.work;
  const int64_t end = rows.end_of_keys(piece.num_rows - 1);
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
    for (int64_t row = 0, line = 0; row < piece.num_rows; ++row) {
      const uint64_t seen = rows.seen(row, start);
      for (int64_t head = 0; head < rows.group; ++head) work.seen[line++] = seen;
    }
    how.bring_in(rows, tile, ahead);
    ahead.rest();
    how.attend(rows, tile);
  }
  finish<T>(rows, work);
}

}  // namespace trtspec::TRTSPEC_ISA
