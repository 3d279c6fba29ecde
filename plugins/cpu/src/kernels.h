// The interface between the bindings (which use torch) and the kernels (which do not): plain arguments and one table
// per instruction set. A kernel works on a range of independent pieces of its op, so the binding can share the pieces
// out among threads. No result depends on how they are shared out.
#pragma once

#include <cstdint>

namespace trtspec {

enum class Element { fp32, fp16, bf16 };
constexpr int64_t bytes_of(Element element) { return element == Element::fp32 ? 4 : 2; }

// Rows of heads of D elements. The elements of a head are adjacent; row and head steps are in elements.
struct Heads {
  void* data;
  int64_t row_step, head_step;
};

// Arguments of attention; trtspec/ops/attention.py defines the op. The new rows are in the cache already. Block ids are
// in range. Other integers need not be valid: a position that the block table does not cover is in scratch block 0.
struct AttentionArgs {
  Element element;
  int64_t q_heads, kv_heads, head_dim;
  Heads q, out;                            // each row is a packed row
  Heads k_cache, v_cache;                  // each row is a slot: block * block_size + offset in the block
  int64_t block_size;
  const int32_t* cu_q_lens;                // [B+1]
  const int32_t* kv_lens;                  // [B]
  const int32_t* block_tables;             // [B, table_columns]
  int64_t table_columns, table_step;
  const int32_t* tree_mask;                // [T, tree_words], or null: causal
  int64_t tree_words, tree_step;
  const int32_t* tree_base;                // [B], or null: no draft trees
  const int32_t* ancestors;                // [T, tree_depth], or null
  int64_t tree_depth;
  const float* sinks;                      // [q_heads], or null
  float scale, softcap;
  int64_t window;
  bool prefetches_to_l2;                   // attention_rows.h explains it
};

// Most rows of a piece of attention: as many lines (query heads of rows) pay for loading K and V, and fit the L2 cache.
constexpr int64_t LINES_PER_PIECE = 96;

// A piece of attention: rows [first_row, first_row + num_rows) of a request, for the query heads of one KV head.
struct AttentionPiece {
  int64_t request, first_row, num_rows, kv_head;
};

// Slot of a position of the sequence with block table `table`. The function is static: every instruction set has its
// own copy.
static inline int64_t cache_slot(const int32_t* table, int64_t columns, int64_t block_size, int64_t position) {
  if (position < 0) return 0;
  const int64_t column = position / block_size;
  return (column < columns ? table[column] : 0) * block_size + position % block_size;
}

struct SampleArgs {
  const float* logits;       // [R, V]
  const bool* greedy;        // [R]
  const int64_t* seeds;      // [R]; null: no row has noise
  const int64_t* positions;  // [R]
  const int64_t* vocab_ids;  // [V]; null: the columns are the ids
  int64_t* tokens;           // [R], written
  int64_t V;
};

// Arguments of process_logits. A null pointer means that no row uses this group of arguments.
struct LogitsArgs {
  const float* logits;         // [R, V]
  float* out;                  // [R, V], written
  int64_t V;
  const int64_t* positions;    // [R]
  const int32_t* history;      // [R, history_len]
  int64_t history_len;
  const int64_t* prompt_lens;  // [R]
  const float* penalties;      // [R, 3]
  const int32_t* bias_ids;     // [R, num_biases]
  const float* bias_values;
  int64_t num_biases;
  const int32_t* ban_ids;      // [R, num_bans]
  const int64_t* ban_until;
  int64_t num_bans;
  const int32_t* allow_mask;   // [R, ceil(V / 32)]
  const float* temperatures;   // [R]
  const int32_t* top_ks;       // [R]
  const float* top_ps;         // [R]
  const float* min_ps;         // [R]
};

// Scratch memory of one thread. An array has no elements if no row uses it.
struct LogitsScratch {
  int32_t* counts;  // [V] zeros: for penalties
  uint32_t* keys;   // [V + LOGITS_SLACK]: for top-k and top-p
  float* values;    // [V + LOGITS_SLACK]
};
constexpr int64_t LOGITS_SLACK = 16;  // kernels write whole vectors

// Arguments of rms_norm. Each head of a row is normed for itself; trtspec/ops/norm.py defines the op.
struct NormArgs {
  Element element;     // of all arrays
  int64_t size, heads;
  float eps;
  Heads x;
  const void* weight;  // [size]
  void* out;           // [T, heads, size], written
};

// Arguments of silu_mul, which trtspec/ops/elementwise.py defines.
struct SiluMulArgs {
  Element element;  // of all arrays
  int64_t size;
  const void* x;    // [T, 2 * size]
  int64_t x_step;   // elements from one row to the next
  void* out;        // [T, size], written
};

// Arguments of one half of rotate_heads, q or k.
struct RotateArgs {
  Element element;             // of all arrays
  int64_t size, heads;
  Heads x;
  const void *cos, *sin;       // [T, size]
  int64_t cos_step, sin_step;  // elements from one row to the next
  void* out;                   // [T, heads, size], written
};

// Formats of packed_linear's weights; trtspec/ops/packing.py explains their layouts.
enum class WeightFormat { fp32, bf16, fp16, int8, int8_groups, int4, fp8 };

constexpr int64_t PANEL = 32;                   // number of adjacent output columns
constexpr int64_t STEP_BYTES = 4 * PANEL;       // one 32-bit word of each column of a panel
constexpr int64_t ROWS_AT_ONCE = 16;            // kernels may read prepared rows up to a multiple of this; any content

struct LinearArgs {
  WeightFormat format;
  Element element;                              // of x and bias, and of out unless float_out
  bool float_out;
  int64_t rows, depth, out_features;            // T, K, N
  bool swiglu;                                  // out is [T, N/2]: silu of the first N/2 columns times the others
  const void* x;                                // [T, K]
  int64_t x_step;                               // elements from one row to the next
  const void* weight;
  int64_t steps;                                // words of a column
  int64_t groups;                               // scales of a column: K/g for int4 and int8_groups, else 1
  const void* scales;
  const uint8_t* zeros;                         // for int4; null: 8 everywhere
  float x_scale;                                // for fp8: scale with which x is quantised; 0: x stays as it is
  const void* bias;                             // null: none
  void* out;                                    // [T, N]
  bool reads_ahead;                             // hardware prefetches suffice: few rows are fastest without our own
  int64_t stream_ahead;                         // then: distance in bytes at which few rows prefetch; 0: they do not
  char* prepared;                               // rows for linear_block: x itself, or those that linear_prepare writes
  int64_t row_bytes;                            // from one prepared row to the next
};

struct Kernels {
  const char* name;
  // `following`: the piece that the caller does next, or null.
  void (*attend)(const AttentionArgs&, const AttentionPiece&, const AttentionPiece* following);
  void (*spec_sample)(const SampleArgs&, int64_t begin, int64_t end);  // a range of rows
  void (*process_logits)(const LogitsArgs&, const LogitsScratch&, int64_t begin, int64_t end);  // a range of rows
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);          // a range of rows, as in the next two
  void (*silu_mul)(const SiluMulArgs&, int64_t begin, int64_t end);
  void (*rotate_heads)(const RotateArgs&, int64_t begin, int64_t end);
  // Bytes of a row of x in the form that linear_block needs: widened or quantised, and padded.
  int64_t (*linear_row_bytes)(const LinearArgs&);
  bool (*linear_takes_x)(const LinearArgs&);  // whether linear_block reads rows of x as fast as prepared ones
  void (*linear_prepare)(const LinearArgs&, int64_t row_begin, int64_t row_end);
  // Largest number of rows that linear_block does at a time.
  int64_t (*linear_block_rows)(const LinearArgs&);
  // Bytes of weights that linear_block multiplies in a few microseconds. With more, threads would wait for the last
  // one.
  int64_t (*linear_chunk_bytes)(const LinearArgs&);
  // Compute out[row_begin..row_end) for the columns of some panels, with swiglu panels of out. The rows are at most one
  // block.
  void (*linear_block)(const LinearArgs&, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);

  // For benchmarks: read memory, or multiply in registers, as fast as possible (probe.h).
  int32_t (*read_memory)(const char* from, int64_t bytes);
  int64_t (*multiply)(WeightFormat format, int64_t groups, int64_t group_steps);
};

// Return the table of the best instruction set that this machine has, or of the one that TRTSPEC_CPU_ISA names.
const Kernels& kernels();

// The value for LinearArgs::reads_ahead and AttentionArgs::prefetches_to_l2. Tests may set it; the setter returns the
// previous value.
bool machine_reads_ahead();
bool set_machine_reads_ahead(bool);

// The value for LinearArgs::stream_ahead.
int64_t machine_stream_ahead();

// Return whether kernels() has a table. Without one no op of this library is registered, and the reference ops serve.
bool usable() noexcept;

}  // namespace trtspec
