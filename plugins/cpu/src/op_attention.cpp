// spec_attention and kv_compact, which trtspec/ops/attention.py and trtspec/ops/compact.py define.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "ops.h"
#include "threads.h"

namespace trtspec {
namespace {

// Multiply-adds of a chunk: a few us.
constexpr int64_t WORK_PER_CHUNK = 1 << 17;
constexpr int64_t ROWS_PER_APPEND = 256;

// -- checks ----------------------------------------------------------------------------------------------------------

void check_caches(const Tensor& k_cache, const Tensor& v_cache) {
  OP_REQUIRES(k_cache.dim() == 4 && k_cache.size(0) > 0 && k_cache.size(1) > 0, "k_cache is ", k_cache.sizes(),
              "; want [num_blocks, block_size, Hkv, D], with at least the scratch block");
  OP_REQUIRES(v_cache.sizes() == k_cache.sizes() && v_cache.scalar_type() == k_cache.scalar_type(), "v_cache is ",
              v_cache.sizes(), " ", v_cache.scalar_type(), ", k_cache ", k_cache.sizes(), " ", k_cache.scalar_type(),
              "; want the same");
  for (const auto& [name, cache] : {std::pair("k_cache", &k_cache), std::pair("v_cache", &v_cache)})
    OP_REQUIRES(cache->is_contiguous(), name, " has strides ", cache->strides(), "; want it contiguous");
}

void check_rows(const char* name, const Tensor& rows, int64_t num_rows, int64_t dim, const Tensor& cache) {
  OP_REQUIRES(rows.dim() == 3 && rows.size(0) == num_rows && rows.size(2) == dim, name, " is ", rows.sizes(),
              "; want [", num_rows, ", heads, ", dim, "]");
  OP_REQUIRES(rows.scalar_type() == cache.scalar_type(), name, " is ", rows.scalar_type(), ", the caches ",
              cache.scalar_type(), "; want the same");
}

void check_int32(const char* name, const Tensor& tensor, int64_t dim) {
  OP_REQUIRES(tensor.scalar_type() == ScalarType::Int, name, " is ", tensor.scalar_type(), "; want int32");
  OP_REQUIRES(tensor.dim() == dim, name, " is ", tensor.sizes(), "; want ", dim, " dimensions");
}

// Check the block ids that the first `tokens` positions of a request use.
void check_blocks(const int32_t* table, int64_t columns, int64_t block_size, int64_t tokens, int64_t num_blocks) {
  const int64_t used = std::clamp<int64_t>((tokens + block_size - 1) / block_size, 0, columns);
  bool valid = true;  // a negative id becomes a large unsigned number
  for (int64_t i = 0; i < used; ++i) valid &= uint32_t(table[i]) < uint64_t(num_blocks);
  OP_REQUIRES(valid, "block_tables has an entry that is not one of the ", num_blocks, " blocks of k_cache");
}

// Check that ancestors are rows of their request's sequence: its block ids are checked up to kv_len.
void check_trees(const AttentionArgs& args, int64_t B) {
  bool valid = true;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t base = args.tree_base[b], rows = std::max<int64_t>(args.kv_lens[b] - base, 0);
    for (int64_t row = args.cu_q_lens[b]; row < args.cu_q_lens[b + 1]; ++row) {
      int64_t nodes = 0;
      for (const int32_t* entry = args.ancestors + row * args.tree_depth; nodes < args.tree_depth; ++entry, ++nodes) {
        if (*entry < 0) break;
        valid &= base >= 0 && *entry < rows;
      }
      valid &= nodes <= rows;
    }
  }
  OP_REQUIRES(valid, "ancestors has an entry that is not a row of its request from tree_base on, or too many");
}

// -- spec_attention --------------------------------------------------------------------------------------------------

// The elements of a head must be adjacent; copy x where they are not.
Tensor with_dense_heads(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

Heads rows_of(const Tensor& x) { return {x.mutable_data_ptr(), x.stride(0), x.stride(1)}; }

Heads slots_of(const Tensor& cache) {
  // The cache is contiguous, but dimensions of size 1 may have odd strides.
  return {cache.mutable_data_ptr(), cache.size(2) * cache.size(3), cache.size(3)};
}

// Copy rows [first, last) of a batch to their slots.
void append(const AttentionArgs& args, const Heads& rows, const Heads& cache, int64_t element_size, int64_t B,
            int64_t first, int64_t last) {
  const int64_t head_bytes = args.head_dim * element_size;
  int64_t request = std::upper_bound(args.cu_q_lens, args.cu_q_lens + B + 1, first) - args.cu_q_lens - 1;
  for (int64_t row = first; row < last; ++row) {
    while (row >= args.cu_q_lens[request + 1]) ++request;
    const int64_t position = int64_t(args.kv_lens[request]) - args.cu_q_lens[request + 1] + row;
    const int64_t slot = cache_slot(args.block_tables + request * args.table_step, args.table_columns, args.block_size,
                                    position);
    for (int64_t head = 0; head < args.kv_heads; ++head)
      std::memcpy(static_cast<char*>(cache.data) + (slot * cache.row_step + head * cache.head_step) * element_size,
                  static_cast<const char*>(rows.data) + (row * rows.row_step + head * rows.head_step) * element_size,
                  head_bytes);
  }
}

// The pieces of a batch in order: request by request, and within a request from its last rows, which see most keys. The
// numbers that `at` gets must ascend.
class Pieces {
 public:
  Pieces(const AttentionArgs& args, int64_t B)
      : args_(args), B_(B), rows_(std::max<int64_t>(1, LINES_PER_PIECE / (args.q_heads / args.kv_heads))) {}

  int64_t count() const {
    int64_t total = 0;
    for (int64_t b = 0; b < B_; ++b) total += count_of(b);
    return total;
  }

  AttentionPiece at(int64_t number) {
    while (number >= first_ + count_of(request_)) first_ += count_of(request_++);
    const int64_t block = blocks_of(request_) - 1 - (number - first_) / args_.kv_heads, first_row = block * rows_;
    return {request_, first_row, std::min(rows_, rows_of(request_) - first_row), (number - first_) % args_.kv_heads};
  }

 private:
  int64_t rows_of(int64_t b) const { return args_.cu_q_lens[b + 1] - args_.cu_q_lens[b]; }
  int64_t blocks_of(int64_t b) const { return (rows_of(b) + rows_ - 1) / rows_; }
  int64_t count_of(int64_t b) const { return blocks_of(b) * args_.kv_heads; }

  const AttentionArgs& args_;
  const int64_t B_, rows_;
  int64_t request_ = 0, first_ = 0;  // a request, and the number of its first piece
};

void attend_all(const AttentionArgs& args, int64_t B) {
  const Pieces pieces(args, B);
  const int64_t count = pieces.count();
  int64_t work = 1;
  for (int64_t b = 0; b < B; ++b)
    work += int64_t(args.cu_q_lens[b + 1] - args.cu_q_lens[b]) * std::max<int64_t>(args.kv_lens[b], 0);
  work *= 2 * args.q_heads * args.head_dim;
  trtspec::parallel_for(count, 1 + count * WORK_PER_CHUNK / work, [&](int64_t begin, int64_t end) {
    Pieces mine = pieces;
    AttentionPiece piece = mine.at(begin), following;
    for (int64_t number = begin; number < end; ++number, piece = following) {
      const bool last = number + 1 == count;  // after its chunk, a thread mostly takes the next one
      if (!last) following = mine.at(number + 1);
      kernels().attend(args, piece, last ? nullptr : &following);
    }
  });
}

}  // namespace

Tensor spec_attention_(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& k_cache,
                       const Tensor& v_cache, const Tensor& cu_q_lens_, const Tensor& kv_lens_,
                       const Tensor& block_tables_, const Tensor& tree_mask_, const Tensor& sinks_, double scale,
                       int64_t window, double softcap, const std::optional<Tensor>& tree_base_,
                       const std::optional<Tensor>& ancestors_) {
  check_caches(k_cache, v_cache);
  const int64_t Hkv = k_cache.size(2), D = k_cache.size(3), T = q_.dim() == 3 ? q_.size(0) : 0;
  check_rows("q", q_, T, D, k_cache);
  check_rows("k", k_, T, D, k_cache);
  check_rows("v", v_, T, D, k_cache);
  OP_REQUIRES(k_.size(1) == Hkv, "k has ", k_.size(1), " heads, k_cache ", Hkv, "; want as many");
  OP_REQUIRES(v_.size(1) == Hkv, "v has ", v_.size(1), " heads, v_cache ", Hkv, "; want as many");
  const int64_t Hq = q_.size(1);
  OP_REQUIRES(Hkv > 0 && Hq > 0 && Hq % Hkv == 0, "q has ", Hq, " heads; want a multiple of k_cache's ", Hkv);
  check_int32("cu_q_lens", cu_q_lens_, 1);
  check_int32("kv_lens", kv_lens_, 1);
  check_int32("block_tables", block_tables_, 2);
  const int64_t B = kv_lens_.size(0);
  OP_REQUIRES(cu_q_lens_.size(0) == B + 1, "cu_q_lens is ", cu_q_lens_.sizes(), "; want [", B + 1,
              "], one more than kv_lens");
  OP_REQUIRES(block_tables_.size(0) == B && block_tables_.size(1) > 0, "block_tables is ", block_tables_.sizes(),
              "; want [", B, ", M], one row for each of kv_lens and a column at least");
  const bool tree = tree_mask_.numel() > 0, sinking = sinks_.numel() > 0;
  const bool branching = ancestors_ && ancestors_->numel() > 0;
  OP_REQUIRES(!branching || tree_base_, "ancestors is given, and tree_base is not");
  if (tree) {
    check_int32("tree_mask", tree_mask_, 2);
    OP_REQUIRES(tree_mask_.size(0) == T, "tree_mask is ", tree_mask_.sizes(), "; want [", T, ", W], as many rows as q");
  }
  if (branching) {
    OP_REQUIRES(!tree, "tree_mask and ancestors are both given; want one of them");
    check_int32("tree_base", *tree_base_, 1);
    OP_REQUIRES(tree_base_->size(0) == B, "tree_base is ", tree_base_->sizes(), "; want [", B, "], as many as kv_lens");
    check_int32("ancestors", *ancestors_, 2);
    OP_REQUIRES(ancestors_->size(0) == T, "ancestors is ", ancestors_->sizes(), "; want [", T, ", D], as many rows as q");
  }
  OP_REQUIRES(!sinking || sinks_.numel() == Hq, "sinks is ", sinks_.sizes(), "; want [", Hq, "], one per head of q");

  const Tensor q = with_dense_heads(q_), k = with_dense_heads(k_), v = with_dense_heads(v_),
               cu_q_lens = cu_q_lens_.contiguous(), kv_lens = kv_lens_.contiguous(),
               block_tables = with_dense_heads(block_tables_),
               sinks = sinking ? sinks_.to(ScalarType::Float).contiguous() : sinks_,
               tree_mask = tree ? with_dense_heads(tree_mask_) : tree_mask_,
               tree_base = branching ? tree_base_->contiguous() : kv_lens,
               ancestors = branching ? ancestors_->contiguous() : kv_lens;
  Tensor result = empty_like(q_);
  const Tensor out = with_dense_heads(result);
  const AttentionArgs args{
      .element = element_of("k_cache", k_cache),
      .q_heads = Hq,
      .kv_heads = Hkv,
      .head_dim = D,
      .q = rows_of(q),
      .out = rows_of(out),
      .k_cache = slots_of(k_cache),
      .v_cache = slots_of(v_cache),
      .block_size = k_cache.size(1),
      .cu_q_lens = cu_q_lens.const_data_ptr<int32_t>(),
      .kv_lens = kv_lens.const_data_ptr<int32_t>(),
      .block_tables = block_tables.const_data_ptr<int32_t>(),
      .table_columns = block_tables.size(1),
      .table_step = block_tables.stride(0),
      .tree_mask = tree ? tree_mask.const_data_ptr<int32_t>() : nullptr,
      .tree_words = tree ? tree_mask.size(1) : 0,
      .tree_step = tree ? tree_mask.stride(0) : 0,
      .tree_base = branching ? tree_base.const_data_ptr<int32_t>() : nullptr,
      .ancestors = branching ? ancestors.const_data_ptr<int32_t>() : nullptr,
      .tree_depth = branching ? ancestors.size(1) : 0,
      .sinks = sinking ? sinks.const_data_ptr<float>() : nullptr,
      .scale = float(scale),
      .softcap = float(softcap),
      .window = std::min<int64_t>(window, int64_t(1) << 32),
      .prefetches_to_l2 = machine_reads_ahead(),
  };
  const int32_t* bounds = args.cu_q_lens;
  OP_REQUIRES(bounds[0] == 0 && bounds[B] == T && std::is_sorted(bounds, bounds + B + 1),
              "cu_q_lens does not ascend from 0 to the ", T, " rows of q");
  for (int64_t b = 0; b < B; ++b)
    check_blocks(args.block_tables + b * args.table_step, args.table_columns, args.block_size, args.kv_lens[b],
                 k_cache.size(0));
  if (branching) check_trees(args, B);
  trtspec::parallel_for(T, ROWS_PER_APPEND, [&](int64_t first, int64_t last) {
    append(args, rows_of(k), args.k_cache, k.element_size(), B, first, last);
    append(args, rows_of(v), args.v_cache, v.element_size(), B, first, last);
  });
  attend_all(args, B);
  if (out.const_data_ptr() != result.const_data_ptr()) check(aoti_torch_copy_(result.handle(), out.handle(), 0));
  return result;
}

namespace {

std::tuple<Tensor, Tensor, Tensor> spec_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& k_cache, const Tensor& v_cache,
                                                  const Tensor& cu_q_lens, const Tensor& kv_lens,
                                                  const Tensor& block_tables, const Tensor& tree_mask,
                                                  const Tensor& sinks, double scale, int64_t window, double softcap,
                                                  const std::optional<Tensor>& tree_base,
                                                  const std::optional<Tensor>& ancestors) {
  Tensor new_k = k_cache.clone(), new_v = v_cache.clone();
  Tensor out = spec_attention_(q, k, v, new_k, new_v, cu_q_lens, kv_lens, block_tables, tree_mask, sinks, scale, window,
                               softcap, tree_base, ancestors);
  return {out, new_k, new_v};
}

// -- kv_compact ------------------------------------------------------------------------------------------------------

struct Move { int64_t source, target; };  // slots

}  // namespace

void kv_compact_(const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables_, const Tensor& starts_,
                 const Tensor& path_) {
  check_caches(k_cache, v_cache);
  check_int32("block_tables", block_tables_, 2);
  check_int32("starts", starts_, 1);
  const int64_t B = starts_.size(0);
  OP_REQUIRES(path_.scalar_type() == ScalarType::Long && path_.dim() == 2 && path_.size(0) == B, "path is ",
              path_.sizes(), " ", path_.scalar_type(), "; want [", B, ", L] int64, one row for each of starts");
  OP_REQUIRES(block_tables_.size(0) == B && block_tables_.size(1) > 0, "block_tables is ", block_tables_.sizes(),
              "; want [", B, ", M], one row for each of starts and a column at least");
  const Tensor block_tables = with_dense_heads(block_tables_), starts = starts_.contiguous(),
               path = path_.contiguous();
  const int64_t L = path.size(1), columns = block_tables.size(1), block_size = k_cache.size(1);
  const int32_t* start = starts.const_data_ptr<int32_t>();
  const int64_t* rows = path.const_data_ptr<int64_t>();
  std::vector<Move> moves;
  for (int64_t b = 0; b < B; ++b, rows += L) {
    const int32_t* table = block_tables.const_data_ptr<int32_t>() + b * block_tables.stride(0);
    int64_t end = 0;  // end of the positions that are touched
    for (int64_t i = 0; i < L; ++i) {
      if (rows[i] < 0 || rows[i] == i) continue;
      const int64_t from = start[b] + std::min<int64_t>(rows[i], int64_t(1) << 32), to = start[b] + i;
      end = std::max({end, from + 1, to + 1});
      moves.push_back({cache_slot(table, columns, block_size, from), cache_slot(table, columns, block_size, to)});
    }
    check_blocks(table, columns, block_size, end, k_cache.size(0));
  }
  if (moves.empty()) return;
  // Gather everything before anything is scattered: sources and targets overlap.
  const int64_t row_bytes = k_cache.size(2) * k_cache.size(3) * k_cache.element_size();
  const auto held = std::make_unique_for_overwrite<char[]>(moves.size() * row_bytes);
  for (const Tensor* cache : {&k_cache, &v_cache}) {
    char* const slots = static_cast<char*>(cache->mutable_data_ptr());
    for (size_t i = 0; i < moves.size(); ++i)
      std::memcpy(held.get() + i * row_bytes, slots + moves[i].source * row_bytes, row_bytes);
    for (size_t i = 0; i < moves.size(); ++i)
      std::memcpy(slots + moves[i].target * row_bytes, held.get() + i * row_bytes, row_bytes);
  }
}

namespace {

std::tuple<Tensor, Tensor> kv_compact(const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                                      const Tensor& starts, const Tensor& path) {
  Tensor new_k = k_cache.clone(), new_v = v_cache.clone();
  kv_compact_(new_k, new_v, block_tables, starts, path);
  return {new_k, new_v};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(trtspec, CPU, m) {
  if (!usable()) return;
  m.impl("spec_attention_", TORCH_BOX(&spec_attention_));
  m.impl("spec_attention", TORCH_BOX(&spec_attention));
  m.impl("kv_compact_", TORCH_BOX(&kv_compact_));
  m.impl("kv_compact", TORCH_BOX(&kv_compact));
}

}  // namespace trtspec
