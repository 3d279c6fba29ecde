// Which keys the rows of a piece of attention see, where these keys are in the cache, and how they are prefetched.
#pragma once

#include <cstring>

#include "kernels.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

constexpr int TILE = 64;  // number of keys. A row's bits follow from it; masks of a tile are 64 bits

// A tile that starts at position `start`. Some line may see its keys [first, end).
struct Tile {
  int64_t start;
  int first, end;
  int64_t places[TILE];  // of the keys' heads: elements from the start of the cache, of K as of V
  bool scattered;  // keys may be at any place, even within a block
};

// Mask of 64 bits in which bits [low, high) are set, for any low and high.
INLINE uint64_t bits_between(int64_t low, int64_t high) {
  low = low < 0 ? 0 : low;
  high = high > 64 ? 64 : high;
  if (low >= high) return 0;
  return (~uint64_t(0) >> (64 - (high - low))) << low;
}

// Bits [from, from + 64) of a row's tree mask. The bits before bit 0 belong to committed keys: they are ones. Words
// past the mask repeat its last word, as in the reference; no code uses them.
INLINE uint64_t tree_bits(const int32_t* mask, int64_t words, int64_t from) {
  if (from <= -64) return ~uint64_t(0);
  const auto word = [&](int64_t i) { return uint64_t(uint32_t(mask[i < words ? i : words - 1])); };
  if (from < 0) return bits_between(0, -from) | ((word(0) | word(1) << 32) << -from);
  const int64_t first = from / 32, shift = from % 32;
  const uint64_t low = (word(first) | word(first + 1) << 32) >> shift;
  return shift == 0 ? low : low | word(first + 2) << (64 - shift);
}

// A piece, and the positions of its rows in their sequence.
struct Rows {
  const AttentionArgs& args;
  const AttentionPiece& piece;
  int64_t packed;      // packed row of the piece's first row
  int64_t committed;   // tokens of the request before this step's rows
  int64_t kv_len;      // tokens of the request together with these rows
  int64_t group;       // G, query heads per KV head
  int64_t lowest, highest;  // positions of the first key that some row may see, and of the last
  int64_t in_line;     // keys before it are at the row of their position; those after it depend on the row

  INLINE Rows(const AttentionArgs& args, const AttentionPiece& piece) : args(args), piece(piece) {
    const int64_t begin = args.cu_q_lens[piece.request], end = args.cu_q_lens[piece.request + 1];
    kv_len = args.kv_lens[piece.request];
    committed = kv_len - (end - begin);
    packed = begin + piece.first_row;
    group = args.q_heads / args.kv_heads;
    lowest = lowest_key(0), highest = end_of_keys(piece.num_rows - 1) - 1, in_line = highest + 1;
    for (int64_t row = 0; args.ancestors != nullptr && row < piece.num_rows; ++row) {
      if (depth(row) > 0) in_line = args.tree_base[piece.request] < in_line ? args.tree_base[piece.request] : in_line;
      lowest = lowest_key(row) < lowest ? lowest_key(row) : lowest;
      highest = position(row) > highest ? position(row) : highest;
    }
  }

  INLINE int64_t lines() const { return piece.num_rows * group; }

  // A row's ancestors in its draft tree, itself the last one: rows of the sequence, counted from tree_base.
  INLINE const int32_t* ancestors(int64_t row) const { return args.ancestors + (packed + row) * args.tree_depth; }
  INLINE int64_t depth(int64_t row) const {
    int64_t count = 0;
    if (args.ancestors != nullptr)
      while (count < args.tree_depth && ancestors(row)[count] >= 0) ++count;
    return count;
  }
  INLINE int64_t position(int64_t row) const {
    const int64_t nodes = depth(row);
    return nodes > 0 ? args.tree_base[piece.request] + nodes - 1 : committed + piece.first_row + row;
  }

  // Row `row` of the piece sees keys in [lowest_key, end_of_keys). With a tree mask it does not see all of them.
  INLINE int64_t lowest_key(int64_t row) const {
    const int64_t lowest = args.window > 0 ? position(row) - args.window + 1 : 0;
    return lowest > 0 ? lowest : 0;
  }
  INLINE int64_t end_of_keys(int64_t row) const { return args.tree_mask != nullptr ? kv_len : position(row) + 1; }

  // Bit i tells whether the row sees key start + i.
  INLINE uint64_t seen(int64_t row, int64_t start) const {
    uint64_t bits = bits_between(lowest_key(row) - start, end_of_keys(row) - start);
    if (args.tree_mask != nullptr)
      bits &= tree_bits(args.tree_mask + (packed + row) * args.tree_step, args.tree_words, start - committed);
    return bits;
  }

  // Return the tile at `start`: the keys [first, end) that some row may see, and their places.
  INLINE Tile tile(int64_t start) const {
    Tile tile = bounds(start, highest + 1);
    const int32_t* table = args.block_tables + piece.request * args.table_step;
    int64_t column = (start + tile.first) / args.block_size, within = start + tile.first - column * args.block_size;
    for (int i = tile.first; i < tile.end; ++column, within = 0) {
      // the rest of a block, up to the end of the tile
      const int64_t block = column < args.table_columns ? table[column] : 0, left = args.block_size - within;
      const int end = left < tile.end - i ? i + int(left) : tile.end;
      for (int64_t at = place(block * args.block_size + within); i < end; ++i, at += args.k_cache.row_step)
        tile.places[i] = at;
    }
    return tile;
  }

  // The same for the keys of a node's path.
  INLINE Tile tile_of_path(int64_t start, int64_t row) const {
    Tile tile = bounds(start, position(row) + 1);
    tile.scattered = true;
    const int32_t* table = args.block_tables + piece.request * args.table_step;
    const int64_t base = args.tree_base[piece.request];
    for (int i = tile.first; i < tile.end; ++i) {
      const int64_t key = start + i, at = key < base ? key : base + ancestors(row)[key - base];
      tile.places[i] = place(cache_slot(table, args.table_columns, args.block_size, at));
    }
    return tile;
  }

  // For each row, the node whose path it is on, a row too. As few nodes as rows need. A row of no tree that sees only
  // keys in line may be on any path; -1 for other rows of no tree.
  INLINE void find_paths(int64_t (&path_of)[LINES_PER_PIECE]) const {
    for (int64_t row = 0; row < piece.num_rows; ++row) path_of[row] = -1;
    for (int64_t node = piece.num_rows - 1; node >= 0; --node) {
      if (path_of[node] >= 0) continue;
      const int64_t nodes = depth(node);
      for (int64_t i = 0; i < nodes; ++i) {
        const int64_t row = args.tree_base[piece.request] + ancestors(node)[i] - committed - piece.first_row;
        const bool on_path = row >= 0 && row < piece.num_rows && path_of[row] < 0 && depth(row) == i + 1 &&
                             std::memcmp(ancestors(row), ancestors(node), (i + 1) * sizeof(int32_t)) == 0;
        if (on_path) path_of[row] = node;
      }
      if (nodes > 0) path_of[node] = node;
    }
    int64_t any = piece.num_rows - 1;
    while (any >= 0 && path_of[any] < 0) --any;
    for (int64_t row = 0; any >= 0 && row < piece.num_rows; ++row)
      if (path_of[row] < 0 && end_of_keys(row) <= in_line) path_of[row] = path_of[any];
  }

  INLINE Tile first_tile() const { return tile(lowest / TILE * TILE); }

  // A tile at `start` without slots: the keys from `lowest` on and before position `stop`.
  INLINE Tile bounds(int64_t start, int64_t stop) const {
    Tile tile;
    const int64_t first = lowest - start, end = stop - start;
    tile.start = start;
    tile.first = first > 0 ? int(first < TILE ? first : TILE) : 0;
    tile.end = end <= 0 ? 0 : end < TILE ? int(end) : TILE;
    tile.scattered = false;
    return tile;
  }

  // Place of this piece's head in a slot. Both caches have one layout.
  INLINE int64_t place(int64_t slot) const {
    return slot * args.k_cache.row_step + piece.kv_head * args.k_cache.head_step;
  }
  template <class T> INLINE const T* cached(const Heads& cache, int64_t place) const {
    return static_cast<const T*>(cache.data) + place;
  }
  // line = row * G + index of the line's query head in the group
  INLINE int64_t query_head(int64_t line) const { return piece.kv_head * group + line % group; }
  template <class T> INLINE T* line(const Heads& rows, int64_t line) const {
    const int64_t row = packed + line / group;
    return static_cast<T*>(rows.data) + row * rows.row_step + query_head(line) * rows.head_step;
  }
};

// Prefetches keys and values of the next tile. Between steps the weights pass through the caches, so keys and values
// are not there. While a tile is computed, the next tile is fetched, even if it belongs to the following piece. Only a
// few heads are asked for at a time, because a core stalls when too many cache lines are in flight. On Zen 4 it stalls
// much sooner for lines that go to L1 than for those that go to L2: attention took up to 1.8 times as long.
template <class T> class Ahead {
 public:
  INLINE Ahead(const Rows& rows, const Tile& tile) : rows_(rows), tile_(tile), key_(tile.first), value_(tile.first) {}
  INLINE void keys(int count) { ask(rows_.args.k_cache, key_, count); }
  INLINE void values(int count) { ask(rows_.args.v_cache, value_, count); }
  INLINE void rest() { keys(TILE), values(TILE); }

 private:
  INLINE void ask(const Heads& cache, int& next, int count) {
    if (rows_.args.prefetches_to_l2) ask_for<2>(cache, next, count);
    else ask_for<3>(cache, next, count);
  }

  template <int locality> INLINE void ask_for(const Heads& cache, int& next, int count) {
    const auto* const data = static_cast<const T*>(cache.data);
    const int64_t bytes = rows_.args.head_dim * int64_t(sizeof(T));
    const int stop = tile_.end - next < count ? tile_.end : next + count;
    for (; next < stop; ++next) {
      const char* const head = reinterpret_cast<const char*>(data + tile_.places[next]);
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(head + at, 0, locality);
    }
  }

  const Rows& rows_;
  const Tile& tile_;
  int key_, value_;
};

}  // namespace trtspec::TRTSPEC_ISA
