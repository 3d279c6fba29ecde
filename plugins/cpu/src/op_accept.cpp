// spec_accept, which trtspec/ops/accept.py defines.
#include <algorithm>

#include "kernels.h"
#include "ops.h"

using namespace trtspec;

std::tuple<Tensor, Tensor> trtspec::spec_accept(const Tensor& sampled_, const Tensor& drafts_,
                                                const Tensor& draft_lens_, const Tensor& forced_,
                                                const Tensor& emits_) {
  const auto sampled = sampled_.contiguous(), drafts = drafts_.contiguous(), draft_lens = draft_lens_.contiguous(),
             forced = forced_.contiguous(), emits = emits_.contiguous();
  OP_REQUIRES(sampled.dim() == 2 && drafts.dim() == 2 && sampled.size(1) == drafts.size(1) + 1 &&
                  sampled.size(0) == drafts.size(0),
              "spec_accept: sampled is ", sampled.sizes(), ", draft_tokens ", drafts.sizes(),
              "; want [B, K+1] and [B, K]");
  const int64_t B = sampled.size(0), K = drafts.size(1);
  for (const auto& [name, vector] : {std::pair("draft_lens", &draft_lens), std::pair("forced_accept", &forced),
                                     std::pair("emits", &emits)})
    OP_REQUIRES(vector->dim() == 1 && vector->size(0) == B, "spec_accept: ", name, " is ", vector->sizes(),
                "; want [", B, "]");
  Tensor tokens = empty({B, K + 1}, ScalarType::Long), counts = empty({B}, ScalarType::Long);
  const int64_t *own = sampled.const_data_ptr<int64_t>(), *guess = drafts.const_data_ptr<int64_t>();
  const int32_t *lens = draft_lens.const_data_ptr<int32_t>(), *force = forced.const_data_ptr<int32_t>();
  const bool* emit = emits.const_data_ptr<bool>();
  int64_t *out = tokens.mutable_data_ptr<int64_t>(), *count = counts.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < B; ++b, own += K + 1, guess += K, out += K + 1) {
    const int64_t offered = std::clamp<int64_t>(lens[b], 0, K);
    int64_t agreed = 0;
    while (agreed < offered && guess[agreed] == own[agreed]) ++agreed;
    if (force[b] >= 0) agreed = std::min<int64_t>(force[b], offered);
    count[b] = emit[b] ? agreed + 1 : 0;
    for (int64_t i = 0; i <= K; ++i) out[i] = i < count[b] ? own[i] : -1;
  }
  return {tokens, counts};
}

STABLE_TORCH_LIBRARY_IMPL(trtspec, CPU, m) {
  if (trtspec::usable()) m.impl("spec_accept", TORCH_BOX(&trtspec::spec_accept));
}
