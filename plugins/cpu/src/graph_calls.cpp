// Functions that AOTInductor's graphs call instead of torch's dispatcher. A graph reaches the dispatcher through its
// proxy executor, which costs several microseconds an op. AOTInductor fixes names and signatures, and it gets the
// declarations exactly as they are here. A graph's own loops come here too (trtspec/backends/aoti/loops.py). So nothing
// in a graph runs on other threads than ours.
#include "ops.h"
#include "threads.h"

using trtspec::Tensor;

static Tensor tensor(AtenTensorHandle handle) { return Tensor::borrowed(handle); }

static std::optional<Tensor> optional_tensor(AtenTensorHandle* handle) {
  return handle == nullptr ? std::nullopt : std::optional(tensor(*handle));
}

// Run body and return whether it failed. A graph does not get the reason.
template <class Body> static AOTITorchError guarded(const Body& body) noexcept {
  try {
    body();
    return AOTI_TORCH_SUCCESS;
  } catch (...) {
    return AOTI_TORCH_FAILURE;
  }
}

extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle weight,
                                                              AtenTensorHandle scales, AtenTensorHandle zeros,
                                                              AtenTensorHandle* bias, AtenTensorHandle* x_scale,
                                                              int64_t out_features, int32_t float_out,
                                                              AtenTensorHandle* out) {
  return guarded([&] {
    const trtspec::OwnThreads own_threads;
    *out = trtspec::packed_linear(tensor(x), tensor(weight), tensor(scales), tensor(zeros), optional_tensor(bias),
                                  optional_tensor(x_scale), out_features, float_out != 0)
               .release();
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_packed_swiglu(AtenTensorHandle x, AtenTensorHandle weight,
                                                              AtenTensorHandle scales, AtenTensorHandle zeros,
                                                              AtenTensorHandle* bias, AtenTensorHandle* x_scale,
                                                              int64_t out_features, AtenTensorHandle* out) {
  return guarded([&] {
    const trtspec::OwnThreads own_threads;
    *out = trtspec::packed_swiglu(tensor(x), tensor(weight), tensor(scales), tensor(zeros), optional_tensor(bias),
                                  optional_tensor(x_scale), out_features)
               .release();
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_packed_embedding(AtenTensorHandle ids, AtenTensorHandle weight,
                                                                 AtenTensorHandle scales, AtenTensorHandle zeros,
                                                                 int64_t in_features, AtenTensorHandle* out) {
  return guarded([&] {
    *out = trtspec::packed_embedding(tensor(ids), tensor(weight), tensor(scales), tensor(zeros), in_features).release();
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_spec_attention_(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle k_cache, AtenTensorHandle v_cache,
    AtenTensorHandle cu_q_lens, AtenTensorHandle kv_lens, AtenTensorHandle block_tables, AtenTensorHandle tree_mask,
    AtenTensorHandle sinks, double scale, int64_t window, double softcap, AtenTensorHandle* tree_base,
    AtenTensorHandle* ancestors, AtenTensorHandle* out) {
  return guarded([&] {
    const trtspec::OwnThreads own_threads;
    *out = trtspec::spec_attention_(tensor(q), tensor(k), tensor(v), tensor(k_cache), tensor(v_cache),
                                    tensor(cu_q_lens), tensor(kv_lens), tensor(block_tables), tensor(tree_mask),
                                    tensor(sinks), scale, window, softcap, optional_tensor(tree_base),
                                    optional_tensor(ancestors))
               .release();
  });
}

// The last argument, nullptr, is AOTInductor's for an op that returns nothing.
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_kv_compact_(AtenTensorHandle k_cache, AtenTensorHandle v_cache,
                                                            AtenTensorHandle block_tables, AtenTensorHandle starts,
                                                            AtenTensorHandle path, AtenTensorHandle* nothing) {
  return guarded([&] {
    trtspec::kv_compact_(tensor(k_cache), tensor(v_cache), tensor(block_tables), tensor(starts), tensor(path));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_rms_norm(AtenTensorHandle x, AtenTensorHandle weight, double eps,
                                                         AtenTensorHandle* out) {
  return guarded([&] {
    const trtspec::OwnThreads own_threads;
    *out = trtspec::rms_norm(tensor(x), tensor(weight), eps).release();
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_rotate_heads(AtenTensorHandle q, AtenTensorHandle k,
                                                             AtenTensorHandle cos, AtenTensorHandle sin,
                                                             AtenTensorHandle* q_out, AtenTensorHandle* k_out) {
  return guarded([&] {
    const trtspec::OwnThreads own_threads;
    auto [rotated_q, rotated_k] = trtspec::rotate_heads(tensor(q), tensor(k), tensor(cos), tensor(sin));
    *q_out = std::move(rotated_q).release();
    *k_out = std::move(rotated_k).release();
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_process_logits(
    AtenTensorHandle logits, AtenTensorHandle positions, AtenTensorHandle history, AtenTensorHandle prompt_lens,
    AtenTensorHandle penalties, AtenTensorHandle bias_ids, AtenTensorHandle bias_values, AtenTensorHandle ban_ids,
    AtenTensorHandle ban_until, AtenTensorHandle allow_mask, AtenTensorHandle temperatures, AtenTensorHandle top_ks,
    AtenTensorHandle top_ps, AtenTensorHandle min_ps, AtenTensorHandle* out) {
  return guarded([&] {
    const trtspec::OwnThreads own_threads;
    *out = trtspec::process_logits(tensor(logits), tensor(positions), tensor(history), tensor(prompt_lens),
                                   tensor(penalties), tensor(bias_ids), tensor(bias_values), tensor(ban_ids),
                                   tensor(ban_until), tensor(allow_mask), tensor(temperatures), tensor(top_ks),
                                   tensor(top_ps), tensor(min_ps))
               .release();
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_spec_sample(AtenTensorHandle logits, AtenTensorHandle greedy,
                                                            AtenTensorHandle seeds, AtenTensorHandle positions,
                                                            AtenTensorHandle vocab_ids, AtenTensorHandle* out) {
  return guarded([&] {
    const trtspec::OwnThreads own_threads;
    *out = trtspec::spec_sample(tensor(logits), tensor(greedy), tensor(seeds), tensor(positions), tensor(vocab_ids))
               .release();
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_spec_accept(AtenTensorHandle sampled, AtenTensorHandle draft_tokens,
                                                            AtenTensorHandle draft_lens,
                                                            AtenTensorHandle forced_accept, AtenTensorHandle emits,
                                                            AtenTensorHandle* tokens, AtenTensorHandle* num_tokens) {
  return guarded([&] {
    auto [kept, counts] = trtspec::spec_accept(tensor(sampled), tensor(draft_tokens), tensor(draft_lens),
                                               tensor(forced_accept), tensor(emits));
    *tokens = std::move(kept).release();
    *num_tokens = std::move(counts).release();
  });
}

AOTI_TORCH_EXPORT void trtspec_share_loop(int64_t count, int64_t chunk, trtspec::Chunk call, const void* body) {
  const trtspec::OwnThreads own_threads;
  trtspec::share_out(count, chunk, call, body);
}

}  // extern "C"
