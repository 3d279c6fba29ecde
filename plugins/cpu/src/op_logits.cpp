// process_logits, which trtspec/ops/logits.py defines.
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"
#include "ops.h"
#include "threads.h"

using namespace trtspec;

// Columns that are worth another thread: tens of microseconds of top-p.
static constexpr int64_t COLUMNS_PER_CHUNK = 32768;

static Tensor checked(const char* name, const Tensor& tensor, Sizes shape, ScalarType type) {
  OP_REQUIRES(tensor.scalar_type() == type && tensor.sizes() == shape, "process_logits: ", name, " is ",
              tensor.scalar_type(), " ", tensor.sizes(), "; want ", type, " ", shape);
  return tensor.contiguous();
}

// Return a group of the contract's arguments, checked. It is undefined if it has no elements.
static Tensor group(const char* name, const Tensor& tensor, Sizes shape, ScalarType type) {
  return tensor.numel() ? checked(name, tensor, shape, type) : Tensor();
}

template <class T> static const T* data(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// Check that ids are within the vocabulary. Only the id of a ban that is over may be past it.
static void check_ids(const char* name, const Tensor& ids, int64_t V, const Tensor& until, const Tensor& positions) {
  if (!ids.defined()) return;
  const int32_t* id = ids.const_data_ptr<int32_t>();
  for (int64_t r = 0; r < ids.size(0); ++r)
    for (int64_t i = 0; i < ids.size(1); ++i, ++id) {
      if (*id < V) continue;
      const bool over = until.defined() && data<int64_t>(positions)[r] >= data<int64_t>(until)[r * ids.size(1) + i];
      OP_REQUIRES(over, "process_logits: ", name, " holds id ", *id, " of a vocabulary of ", V);
    }
}

Tensor trtspec::process_logits(const Tensor& logits_, const Tensor& positions_, const Tensor& history_,
                             const Tensor& prompt_lens_, const Tensor& penalties_, const Tensor& bias_ids_,
                             const Tensor& bias_values_, const Tensor& ban_ids_, const Tensor& ban_until_,
                             const Tensor& allow_mask_, const Tensor& temperatures_, const Tensor& top_ks_,
                             const Tensor& top_ps_, const Tensor& min_ps_) {
  OP_REQUIRES(logits_.dim() == 2, "process_logits: logits is ", logits_.sizes(), "; want [R, V]");
  const int64_t R = logits_.size(0), V = logits_.size(1);
  const auto last = [](const Tensor& tensor) { return tensor.dim() ? tensor.size(-1) : 0; };
  const int64_t L = last(history_), biases = last(bias_ids_), bans = last(ban_ids_);

  const Tensor logits = checked("logits", logits_, {R, V}, ScalarType::Float),
               positions = checked("positions", positions_, {R}, ScalarType::Long),
               penalties = group("penalties", penalties_, {R, 3}, ScalarType::Float);
  Tensor history, prompt_lens;
  if (penalties.defined()) {
    history = checked("history", history_, {R, L}, ScalarType::Int);
    prompt_lens = checked("prompt_lens", prompt_lens_.to(ScalarType::Long), {R}, ScalarType::Long);
  }
  const Tensor bias_ids = group("bias_ids", bias_ids_, {R, biases}, ScalarType::Int),
               bias_values = group("bias_values", bias_values_, {R, biases}, ScalarType::Float),
               ban_ids = group("ban_ids", ban_ids_, {R, bans}, ScalarType::Int),
               ban_until = group("ban_until", ban_until_, {R, bans}, ScalarType::Long),
               allow_mask = group("allow_mask", allow_mask_, {R, (V + 31) / 32}, ScalarType::Int),
               temperatures = group("temperatures", temperatures_, {R}, ScalarType::Float),
               top_ks = group("top_ks", top_ks_, {R}, ScalarType::Int),
               top_ps = group("top_ps", top_ps_, {R}, ScalarType::Float),
               min_ps = group("min_ps", min_ps_, {R}, ScalarType::Float);
  OP_REQUIRES(!bias_ids.defined() || bias_values.defined(), "process_logits: bias_values is missing");
  OP_REQUIRES(!ban_ids.defined() || ban_until.defined(), "process_logits: ban_until is missing");
  check_ids("history", history, V, {}, positions);
  check_ids("bias_ids", bias_ids, V, {}, positions);
  check_ids("ban_ids", ban_ids, V, ban_until, positions);

  Tensor out = empty({R, V}, ScalarType::Float);
  const trtspec::LogitsArgs args{
      .logits = logits.const_data_ptr<float>(),
      .out = out.mutable_data_ptr<float>(),
      .V = V,
      .positions = positions.const_data_ptr<int64_t>(),
      .history = data<int32_t>(history),
      .history_len = L,
      .prompt_lens = data<int64_t>(prompt_lens),
      .penalties = data<float>(penalties),
      .bias_ids = data<int32_t>(bias_ids),
      .bias_values = data<float>(bias_values),
      .num_biases = biases,
      .ban_ids = data<int32_t>(ban_ids),
      .ban_until = data<int64_t>(ban_until),
      .num_bans = bans,
      .allow_mask = data<int32_t>(allow_mask),
      .temperatures = data<float>(temperatures),
      .top_ks = data<int32_t>(top_ks),
      .top_ps = data<float>(top_ps),
      .min_ps = data<float>(min_ps),
  };
  const int64_t rows_of_a_chunk = std::max<int64_t>(1, COLUMNS_PER_CHUNK / std::max<int64_t>(1, V));
  const int64_t candidates = args.top_ks || args.top_ps ? V + trtspec::LOGITS_SLACK : 0;
  trtspec::parallel_for(R, rows_of_a_chunk, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> counts(args.penalties ? V : 0);
    const auto keys = std::make_unique_for_overwrite<uint32_t[]>(candidates);
    const auto values = std::make_unique_for_overwrite<float[]>(candidates);
    trtspec::kernels().process_logits(args, {counts.data(), keys.get(), values.get()}, begin, end);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(trtspec, CPU, m) {
  if (trtspec::usable()) m.impl("process_logits", TORCH_BOX(&trtspec::process_logits));
}
