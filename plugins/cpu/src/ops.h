// The ops as C++ functions; contracts in trtspec/ops. Registered with torch's dispatcher where they are defined, and
// called directly by compiled graphs (graph_calls.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace trtspec {

at::Tensor spec_attention_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_cache,
                           const at::Tensor& v_cache, const at::Tensor& cu_q_lens, const at::Tensor& kv_lens,
                           const at::Tensor& block_tables, const at::Tensor& tree_mask, const at::Tensor& sinks,
                           double scale, int64_t window, double softcap);

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                         const at::Tensor& zeros, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& x_scale, int64_t out_features, bool float_out);

at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& weight, const at::Tensor& scales,
                            const at::Tensor& zeros, int64_t in_features);

at::Tensor process_logits(const at::Tensor& logits, const at::Tensor& positions, const at::Tensor& history,
                          const at::Tensor& prompt_lens, const at::Tensor& penalties, const at::Tensor& bias_ids,
                          const at::Tensor& bias_values, const at::Tensor& ban_ids, const at::Tensor& ban_until,
                          const at::Tensor& allow_mask, const at::Tensor& temperatures, const at::Tensor& top_ks,
                          const at::Tensor& top_ps, const at::Tensor& min_ps);

at::Tensor spec_sample(const at::Tensor& logits, const at::Tensor& greedy, const at::Tensor& seeds,
                       const at::Tensor& positions, const at::Tensor& vocab_ids);

std::tuple<at::Tensor, at::Tensor> spec_accept(const at::Tensor& sampled, const at::Tensor& draft_tokens,
                                               const at::Tensor& draft_lens, const at::Tensor& forced_accept,
                                               const at::Tensor& emits);

}  // namespace trtspec
