// The ops as C++ functions; trtspec/ops holds their contracts. Each op is registered with torch's dispatcher in the
// file that defines it. Compiled graphs call it directly (graph_calls.cpp).
#pragma once

#include <optional>
#include <tuple>

#include "kernels.h"
#include "tensor.h"

namespace trtspec {

// Element of a tensor that kernels read. `name`: of the op and the tensor, for the error.
inline Element element_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Element::fp32;
    case ScalarType::BFloat16: return Element::bf16;
    case ScalarType::Half: return Element::fp16;
    default: fail(name, " is ", tensor.scalar_type(), "; want float32, bfloat16 or float16");
  }
}

Tensor spec_attention_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                           const Tensor& v_cache, const Tensor& cu_q_lens, const Tensor& kv_lens,
                           const Tensor& block_tables, const Tensor& tree_mask, const Tensor& sinks,
                           double scale, int64_t window, double softcap, const std::optional<Tensor>& tree_base,
                           const std::optional<Tensor>& ancestors);

void kv_compact_(const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables, const Tensor& starts,
                     const Tensor& path);

Tensor packed_linear(const Tensor& x, const Tensor& weight, const Tensor& scales,
                         const Tensor& zeros, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& x_scale, int64_t out_features, bool float_out);

Tensor packed_swiglu(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor& zeros,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& x_scale,
                         int64_t out_features);

Tensor packed_embedding(const Tensor& ids, const Tensor& weight, const Tensor& scales,
                            const Tensor& zeros, int64_t in_features);

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);

Tensor silu_mul(const Tensor& x);

std::tuple<Tensor, Tensor> rotate_heads(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin);

Tensor process_logits(const Tensor& logits, const Tensor& positions, const Tensor& history,
                          const Tensor& prompt_lens, const Tensor& penalties, const Tensor& bias_ids,
                          const Tensor& bias_values, const Tensor& ban_ids, const Tensor& ban_until,
                          const Tensor& allow_mask, const Tensor& temperatures, const Tensor& top_ks,
                          const Tensor& top_ps, const Tensor& min_ps);

Tensor spec_sample(const Tensor& logits, const Tensor& greedy, const Tensor& seeds,
                       const Tensor& positions, const Tensor& vocab_ids);

std::tuple<Tensor, Tensor> spec_accept(const Tensor& sampled, const Tensor& draft_tokens,
                                               const Tensor& draft_lens, const Tensor& forced_accept,
                                               const Tensor& emits);

}  // namespace trtspec
