// spec_sample, which trtspec/ops/sample.py defines.
#include <algorithm>

#include "kernels.h"
#include "ops.h"
#include "threads.h"

using namespace trtspec;

// Columns that are worth another thread: about 20 us of noise.
static constexpr int64_t COLUMNS_PER_CHUNK = 32768;

static void check_vector(const char* name, const Tensor& tensor, int64_t length, ScalarType type, bool optional) {
  OP_REQUIRES(tensor.scalar_type() == type, "spec_sample: ", name, " is ", tensor.scalar_type(), "; want ", type);
  OP_REQUIRES((optional && tensor.numel() == 0) || (tensor.dim() == 1 && tensor.size(0) == length), "spec_sample: ",
              name, " is ", tensor.sizes(), "; want [", length, "]", optional ? " or nothing" : "");
}

Tensor trtspec::spec_sample(const Tensor& logits_, const Tensor& greedy_, const Tensor& seeds_, const Tensor& positions_,
                          const Tensor& vocab_ids_) {
  OP_REQUIRES(logits_.dim() == 2 && logits_.scalar_type() == ScalarType::Float, "spec_sample: logits is ",
              logits_.scalar_type(), " ", logits_.sizes(), "; want fp32 [R, V]");
  const int64_t R = logits_.size(0), V = logits_.size(1);
  check_vector("greedy", greedy_, R, ScalarType::Bool, false);
  check_vector("seeds", seeds_, R, ScalarType::Long, true);
  check_vector("positions", positions_, R, ScalarType::Long, false);
  check_vector("vocab_ids", vocab_ids_, V, ScalarType::Long, true);
  const Tensor logits = logits_.contiguous(), greedy = greedy_.contiguous(),
             seeds = seeds_.contiguous(), positions = positions_.contiguous(),
             vocab_ids = vocab_ids_.contiguous();
  Tensor tokens = empty({R}, ScalarType::Long);
  const trtspec::SampleArgs args{
      .logits = logits.const_data_ptr<float>(),
      .greedy = greedy.const_data_ptr<bool>(),
      .seeds = seeds.numel() ? seeds.const_data_ptr<int64_t>() : nullptr,
      .positions = positions.const_data_ptr<int64_t>(),
      .vocab_ids = vocab_ids.numel() ? vocab_ids.const_data_ptr<int64_t>() : nullptr,
      .tokens = tokens.mutable_data_ptr<int64_t>(),
      .V = V,
  };
  const int64_t rows_of_a_chunk = std::max<int64_t>(1, COLUMNS_PER_CHUNK / std::max<int64_t>(1, V));
  trtspec::parallel_for(R, rows_of_a_chunk, [&](int64_t begin, int64_t end) {
    trtspec::kernels().spec_sample(args, begin, end);
  });
  return tokens;
}

STABLE_TORCH_LIBRARY_IMPL(trtspec, CPU, m) {
  if (trtspec::usable()) m.impl("spec_sample", TORCH_BOX(&trtspec::spec_sample));
}
