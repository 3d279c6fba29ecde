// Attention of bf16 with AMX: 16 lines at a time against a tile of keys (attention.h explains lines and tiles).
// `attend` selects the implementation for each element type.
//
// With many lines the tile unit needs transposed keys. With up to 16 lines it takes keys as they are in memory, and the
// queries are transposed: that is less to transpose. Values are stored in pairs of keys. Each weight is split into two
// bf16 numbers, which together have 16 bits. The sums of values are as exact as that.
#pragma once

#include "attention.h"
#if defined(__AMX_INT8__)
#include "linear_amx.h"
#endif

namespace trtspec::TRTSPEC_ISA {

#if defined(__AMX_INT8__)

constexpr int PAIRS = TILE / 2;

// Return whether a head has a number that is not finite.
inline bool has_unusable(const BFloat16* head, int64_t dim) {
  UVec largest{};  // magnitudes as bits
  for (int64_t d = 0; d < dim; d += LANES) {
    const UVec magnitude = (UVec)load_units<float>(head, d, dim) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return any((IVec)(largest >= 0x7f800000));
}

// Load the first bf16 numbers of a head, at most 32.
INLINE __m512i load_halves(const BFloat16* from, int64_t count) {
  return _mm512_maskz_loadu_epi16(count >= 2 * LANES ? ~__mmask32(0) : (__mmask32(1) << count) - 1, from);
}

// Store values as pairs of keys. Zeros replace keys that are not in the tile, and keys with numbers that are not
// finite. Return the bits of the latter.
inline uint64_t pair_values(const Rows& rows, const Tile& tile, BFloat16Pair* pairs, int64_t width,
                            Ahead<BFloat16>& ahead) {
  const int64_t dim = rows.args.head_dim;
  const auto value = [&](int key) {
    const bool within = key >= tile.first && key < tile.end;
    return within ? rows.cached<BFloat16>(rows.args.v_cache, tile.places[key]) : nullptr;
  };
  alignas(64) uint16_t from[2][2 * LANES];  // indices for pairs: of the lower 16 elements of two keys, then the upper
  for (int i = 0; i < 2 * LANES; ++i) from[0][i] = i / 2 + i % 2 * 32, from[1][i] = from[0][i] + LANES;
  const __m512i low = _mm512_load_si512(from[0]), high = _mm512_load_si512(from[1]);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest = _mm512_setzero_si512();  // magnitudes as bits
  for (int pair = 0; pair < PAIRS; ++pair) {
    ahead.values(2);
    const BFloat16 *const first = value(2 * pair), *const second = value(2 * pair + 1);
    for (int64_t d = 0; d < width; d += 2 * LANES) {
      const __m512i one = first == nullptr ? _mm512_setzero_si512() : load_halves(first + d, dim - d);
      const __m512i other = second == nullptr ? _mm512_setzero_si512() : load_halves(second + d, dim - d);
      largest = _mm512_max_epu16(largest, _mm512_max_epu16(one & magnitude, other & magnitude));
      _mm512_store_si512(pairs + pair * width + d, _mm512_permutex2var_epi16(one, low, other));
      if (d + LANES < width)
        _mm512_store_si512(pairs + pair * width + d + LANES, _mm512_permutex2var_epi16(one, high, other));
    }
  }
  if (_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0) return 0;
  uint64_t unusable = 0;
  for (int key = tile.first; key < tile.end; ++key) {
    if (!has_unusable(value(key), dim)) continue;
    unusable |= uint64_t(1) << key;
    for (int64_t d = 0; d < width; ++d) pairs[key / 2 * width + d].bits &= key % 2 == 0 ? 0xffff0000 : 0x0000ffff;
  }
  return unusable;
}

// Split each weight of a line into two bf16 numbers: the nearest one, and the rest.
INLINE void split_weights(const float* weights, BFloat16Pair* high, BFloat16Pair* low) {
  for (int key = 0; key < TILE; key += 2 * LANES) {
    const Vec first = load(weights + key), second = load(weights + key + LANES);
    const __m512bh near = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    std::memcpy(high + key / 2, &near, sizeof near);
    const Vec rest[] = {first - load(reinterpret_cast<const BFloat16*>(high) + key),
                        second - load(reinterpret_cast<const BFloat16*>(high) + key + LANES)};
    const __m512bh left = _mm512_cvtne2ps_pbh((__m512)rest[1], (__m512)rest[0]);
    std::memcpy(low + key / 2, &left, sizeof left);
  }
}

// added[line][element] = weights * values, for `blocks` blocks of 16 elements: at most 64 elements.
INLINE void multiply_values(const BFloat16Pair (&high)[SIDE][PAIRS], const BFloat16Pair (&low)[SIDE][PAIRS],
                            const BFloat16Pair* pairs, int64_t width, int64_t blocks, float (&added)[SIDE][TILE]) {
  constexpr int64_t row_bytes = sizeof high[0], sums_bytes = sizeof added[0];
  const int64_t pairs_bytes = width * int64_t(sizeof(BFloat16Pair));
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
#define BLOCK(number, tile)                                \
  if (blocks > number) {                                   \
    TILE_LOAD(tile, from + number * SIDE, pairs_bytes);    \
    TILE_MULTIPLY("tdpbf16ps", number, 4, tile);           \
    TILE_MULTIPLY("tdpbf16ps", number, 5, tile);           \
  }
  for (int pair = 0; pair < PAIRS; pair += SIDE) {
    const BFloat16Pair* const from = pairs + pair * width;
    TILE_LOAD(4, high[0] + pair, row_bytes);
    TILE_LOAD(5, low[0] + pair, row_bytes);
    BLOCK(0, 6)
    BLOCK(1, 7)
    BLOCK(2, 6)
    BLOCK(3, 7)
  }
#undef BLOCK
  TILE_STORE(0, added[0], sums_bytes);
  TILE_STORE(1, added[0] + SIDE, sums_bytes);
  TILE_STORE(2, added[0] + 2 * SIDE, sums_bytes);
  TILE_STORE(3, added[0] + 3 * SIDE, sums_bytes);
}

// scores[line][key] = query * key, with transposed keys.
INLINE void multiply_keys(const BFloat16Pair* queries, const BFloat16Pair* keys, int64_t units,
                          float (&scores)[SIDE][TILE]) {
  constexpr int64_t keys_bytes = TILE * sizeof(BFloat16Pair), scores_bytes = sizeof scores[0];
  const int64_t queries_bytes = units * int64_t(sizeof(BFloat16Pair));
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t unit = 0; unit < units; unit += SIDE) {
    const BFloat16Pair* const from = keys + unit * TILE;
    TILE_LOAD(4, queries + unit, queries_bytes);
    TILE_LOAD(6, from, keys_bytes);
    TILE_MULTIPLY("tdpbf16ps", 0, 4, 6);
    TILE_LOAD(7, from + SIDE, keys_bytes);
    TILE_MULTIPLY("tdpbf16ps", 1, 4, 7);
    TILE_LOAD(6, from + 2 * SIDE, keys_bytes);
    TILE_MULTIPLY("tdpbf16ps", 2, 4, 6);
    TILE_LOAD(7, from + 3 * SIDE, keys_bytes);
    TILE_MULTIPLY("tdpbf16ps", 3, 4, 7);
  }
  TILE_STORE(0, scores[0], scores_bytes);
  TILE_STORE(1, scores[0] + SIDE, scores_bytes);
  TILE_STORE(2, scores[0] + 2 * SIDE, scores_bytes);
  TILE_STORE(3, scores[0] + 3 * SIDE, scores_bytes);
}

// SIDE keys as they are in memory.
struct KeysOfSide {
  const void* first;
  int64_t step;  // bytes from one key to the next
};

// The same with transposed queries of `count` lines, and with keys as they are in memory. Each product is the same, and
// so is the order of the additions.
INLINE void multiply_lying_keys(const BFloat16Pair* queries, const KeysOfSide (&keys)[TILE / SIDE], int64_t units,
                                int64_t count, float (&scores)[SIDE][TILE]) {
  alignas(64) float turned[TILE][SIDE];
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t unit = 0; unit < units; unit += SIDE) {
    const auto key = [&](int side) {
      return static_cast<const char*>(keys[side].first) + unit * int64_t(sizeof(BFloat16Pair));
    };
    TILE_LOAD(6, queries + unit * SIDE, SIDE * sizeof(BFloat16Pair));
    TILE_LOAD(4, key(0), keys[0].step);
    TILE_MULTIPLY("tdpbf16ps", 0, 4, 6);
    TILE_LOAD(5, key(1), keys[1].step);
    TILE_MULTIPLY("tdpbf16ps", 1, 5, 6);
    TILE_LOAD(4, key(2), keys[2].step);
    TILE_MULTIPLY("tdpbf16ps", 2, 4, 6);
    TILE_LOAD(5, key(3), keys[3].step);
    TILE_MULTIPLY("tdpbf16ps", 3, 5, 6);
  }
  TILE_STORE(0, turned[0], sizeof turned[0]);
  TILE_STORE(1, turned[SIDE], sizeof turned[0]);
  TILE_STORE(2, turned[2 * SIDE], sizeof turned[0]);
  TILE_STORE(3, turned[3 * SIDE], sizeof turned[0]);
  for (int64_t side = 0; side < TILE / SIDE; ++side) {
    Vec square[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) square[i] = load(turned[side * SIDE + i]);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
      if (i < count) store(scores[i] + side * SIDE, square[i]);
  }
}

// The parts of attend_rows that differ: here with AMX tiles.
class InTiles {
 public:
  explicit InTiles(const Rows& rows)
      : work(workspace<BFloat16Pair>(round_up(rows.lines(), SIDE), padded_units<BFloat16Pair>(rows),
                                     round_up(rows.args.head_dim, LANES))),
        pairs_(reinterpret_cast<BFloat16Pair*>(work.values)),
        keys_lie_(rows.lines() <= SIDE),
        tiles_(keys_lie_ ? SIDE : rows.lines(), 64) {}

  void begin_queries(const Rows& rows) {
    if (!keys_lie_) return;
    for (int64_t unit = 0; unit < work.units; unit += LANES) {
      Vec square[LANES] = {};
      for (int64_t line = 0; line < rows.lines(); ++line)
        square[line] = load_units<BFloat16Pair>(rows.line<const BFloat16>(rows.args.q, line), unit, rows.args.head_dim);
      transpose(square);
      std::memcpy(work.queries + unit * SIDE, square, sizeof square);
    }
  }

  void bring_in(const Rows& rows, const Tile& tile, int from, Ahead<BFloat16>& ahead) {
    if (keys_lie_) find_keys(rows, tile, ahead);
    else turn_keys<BFloat16>(rows, tile, from, work.keys, work.units, ahead);
    unusable_ = pair_values(rows, tile, pairs_, work.width, ahead);
  }

  void attend(const Rows& rows, const Tile& tile, Ahead<BFloat16>& ahead) const {
    ahead.rest();
    for (int64_t line = 0; line < rows.lines(); line += SIDE) {
      const int64_t count = rows.lines() - line < SIDE ? rows.lines() - line : SIDE;
      if (sees_any(work.seen + line, count)) attend_side(rows, tile, line, count);
    }
  }

  const Workspace<BFloat16Pair> work;

 private:
  // Find the keys of each side of the tile. They are in the cache if a side is in one block and its heads fill whole
  // tiles. Else they are copied to one place. Keys that are not in the tile may have any content, because no line sees
  // them.
  void find_keys(const Rows& rows, const Tile& tile, Ahead<BFloat16>& ahead) {
    const AttentionArgs& args = rows.args;
    const bool as_they_lie = args.block_size % SIDE == 0 && args.head_dim % (2 * SIDE) == 0 &&
                             !tile.scattered;
    for (int side = 0; side < TILE / SIDE; ++side) {
      ahead.keys(SIDE);
      const int begin = side * SIDE, first = begin > tile.first ? begin : tile.first;
      BFloat16Pair* const copies = work.keys + begin * work.units;
      keys_[side] = {copies, work.units * int64_t(sizeof(BFloat16Pair))};
      if (first >= begin + SIDE || first >= tile.end) continue;
      if (as_they_lie) {
        keys_[side] = {rows.cached<BFloat16>(args.k_cache, tile.places[first] - (first - begin) * args.k_cache.row_step),
                       args.k_cache.row_step * int64_t(sizeof(BFloat16))};
        continue;
      }
      for (int key = first; key < begin + SIDE && key < tile.end; ++key)
        for (int64_t unit = 0; unit < work.units; unit += LANES) {
          const BFloat16* const head = rows.cached<BFloat16>(args.k_cache, tile.places[key]);
          const Vec loaded = load_units<BFloat16Pair>(head, unit, args.head_dim);
          std::memcpy(copies + (key - begin) * work.units + unit, &loaded, sizeof loaded);
        }
    }
  }

  // Attend with lines [line, line + count), at most 16, to the tile in the workspace.
  void attend_side(const Rows& rows, const Tile& tile, int64_t line, int64_t count) const {
    const AttentionArgs& args = rows.args;
    alignas(64) float scores[SIDE][TILE], added[SIDE][TILE];
    alignas(64) BFloat16Pair high[SIDE][PAIRS], low[SIDE][PAIRS];
    float shares[SIDE];
    if (keys_lie_) multiply_lying_keys(work.queries, keys_, work.units, count, scores);
    else multiply_keys(work.queries + line * work.units, work.keys, work.units, scores);
    for (int64_t l = 0; l < count; ++l) {
      float* const own = scores[l];
      for (int key = 0; key < TILE; key += LANES) store(own + key, load(own + key) * args.scale);
      if (args.softcap > 0) cap(own, TILE, args.softcap);
      shares[l] = weigh(own, work.seen[line + l], work.tops[line + l], work.totals + (line + l) * LANES);
      split_weights(own, high[l], low[l]);
    }
    for (int64_t d = 0; d < work.width; d += TILE) {
      const int64_t blocks = work.width - d < TILE ? (work.width - d) / SIDE : TILE / SIDE;
      multiply_values(high, low, pairs_ + d, work.width, blocks, added);
      for (int64_t l = 0; l < count; ++l)
        for (int64_t i = 0; i < blocks * SIDE; i += LANES) {
          float* const at = work.sums + (line + l) * work.width + d + i;
          store(at, fma(load(at), splat(shares[l]), load(added[l] + i)));
        }
    }
    for (int64_t l = 0; l < count; ++l)
      for (uint64_t left = unusable_ & work.seen[line + l]; left != 0; left &= left - 1)
        add_value(rows, tile, __builtin_ctzll(left), scores[l], work.sums + (line + l) * work.width);
  }

  // sums += weight * value, for a key whose numbers are not all finite.
  void add_value(const Rows& rows, const Tile& tile, int key, const float* weights, float* sums) const {
    const BFloat16* const from = rows.cached<BFloat16>(rows.args.v_cache, tile.places[key]);
    for (int64_t d = 0; d < work.width; d += LANES)
      store(sums + d, fma(splat(weights[key]), load_units<float>(from, d, rows.args.head_dim), load(sums + d)));
  }

  BFloat16Pair* const pairs_;  // [PAIRS][width], each element of two adjacent keys
  const bool keys_lie_;  // few lines: queries are transposed instead of keys
  const Tiles tiles_;
  KeysOfSide keys_[TILE / SIDE];
  uint64_t unusable_ = 0;
};

#endif

inline void attend(const AttentionArgs& args, const AttentionPiece& piece, const AttentionPiece* following) {
  switch (args.element) {
    case Element::fp32: return attend_rows<float, InVectors<float>>(args, piece, following);
    case Element::fp16: return attend_rows<Half, InVectors<Half>>(args, piece, following);
#if defined(__AMX_INT8__)
    case Element::bf16: return attend_rows<BFloat16, InTiles>(args, piece, following);
#else
    case Element::bf16: return attend_rows<BFloat16, InVectors<BFloat16>>(args, piece, following);
#endif
  }
}

}  // namespace trtspec::TRTSPEC_ISA
