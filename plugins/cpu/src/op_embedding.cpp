// packed_embedding, which trtspec/ops/embedding.py defines. trtspec/ops/packing.py explains the layouts.
#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels.h"
#include "ops.h"

using namespace trtspec;

namespace {

// Expansions of the words of a column: each word becomes `bytes` bytes of the row.
struct FloatWords {
  static void expand(uint32_t word, int64_t, char* to) { std::memcpy(to, &word, sizeof word); }
  static constexpr int64_t bytes = sizeof(uint32_t);
};

template <class Value> struct ByteWords {
  const float scale;

  static constexpr int64_t bytes = 4 * sizeof(float);
  void expand(uint32_t word, int64_t, char* to) const {
    float values[4];
    for (int i = 0; i < 4; ++i) values[i] = float(std::bit_cast<Value>(uint8_t(word >> (8 * i)))) * scale;
    std::memcpy(to, values, sizeof values);
  }
};

struct Int8GroupWords {
  const c10::Half* scales;  // a group's scale is PANEL elements after that of the group before
  const int64_t words_of_a_group;

  static constexpr int64_t bytes = 4 * sizeof(float);
  void expand(uint32_t word, int64_t step, char* to) const {
    ByteWords<int8_t>{scales[step / words_of_a_group * PANEL]}.expand(word, step, to);
  }
};

struct Int4Words {
  const c10::Half* scales;  // a group's scale is PANEL elements after that of the group before
  const uint8_t* zeros;    // null: 8 everywhere
  const int64_t words_of_a_group;

  static constexpr int64_t bytes = 8 * sizeof(float);
  void expand(uint32_t word, int64_t step, char* to) const {
    const int64_t at = step / words_of_a_group * PANEL;
    const float scale = scales[at], zero = zeros == nullptr ? 8.0f : float(zeros[at]);
    float values[8];
    for (int i = 0; i < 4; ++i) {
      const uint32_t byte = word >> (8 * i);
      values[i] = (float(byte & 15) - zero) * scale;
      values[4 + i] = (float(byte >> 4 & 15) - zero) * scale;
    }
    std::memcpy(to, values, sizeof values);
  }
};

// Expand a column. Its words are STEP_BYTES apart: each is in a cache line of its own, and all are requested at once.
template <class Words>
void expand_column(const char* column, int64_t steps, const Words& words, char* to, int64_t bytes) {
  int64_t step = 0;
  uint32_t word;
  for (; (step + 1) * Words::bytes <= bytes; ++step) {
    std::memcpy(&word, column + step * STEP_BYTES, sizeof word);
    words.expand(word, step, to + step * Words::bytes);
  }
  if (step == steps) return;
  char last[Words::bytes];  // partly padding
  std::memcpy(&word, column + step * STEP_BYTES, sizeof word);
  words.expand(word, step, last);
  std::memcpy(to + step * Words::bytes, last, bytes - step * Words::bytes);
}

// Check scales and zeros, and return the number of groups.
int64_t check_scales(const Tensor& weight, const Tensor& scales, const Tensor& zeros) {
  const bool int4 = weight.scalar_type() == ScalarType::Byte;
  const bool grouped = int4 || (weight.scalar_type() == ScalarType::Char && scales.dim() == 3);
  const int64_t panels = weight.size(0), groups = grouped && scales.dim() == 3 ? scales.size(1) : 1;
  OP_REQUIRES(scales.is_contiguous() && groups > 0 &&
                  scales.scalar_type() == (grouped ? ScalarType::Half : ScalarType::Float) &&
                  scales.dim() == (grouped ? 3 : 2) && scales.numel() == panels * groups * PANEL &&
                  weight.size(1) % groups == 0,
              "packed_embedding: scales is ", scales.sizes(), " ", scales.scalar_type(), " for ", weight.sizes(), " ",
              weight.scalar_type(), "; see trtspec.ops.packing");
  OP_REQUIRES(!zeros.numel() || (int4 && zeros.is_contiguous() && zeros.scalar_type() == ScalarType::Byte &&
                                 zeros.numel() == scales.numel()),
              "packed_embedding: zeros is ", zeros.sizes(), " ", zeros.scalar_type(), "; see trtspec.ops.packing");
  return groups;
}

}  // namespace

Tensor trtspec::packed_embedding(const Tensor& ids_, const Tensor& weight_, const Tensor& scales, const Tensor& zeros,
                                 int64_t in_features) {
  OP_REQUIRES(ids_.dim() == 1 && ids_.scalar_type() == ScalarType::Long, "packed_embedding: ids is ", ids_.sizes(), " ",
              ids_.scalar_type(), "; want [n] int64");
  if (weight_.dim() == 2) {
    const NoGradients none;
    return call("aten::index_select", "", weight_, int64_t(0), ids_);
  }
  const Tensor ids = ids_.contiguous(), weight = weight_.contiguous();
  const bool int4 = weight.scalar_type() == ScalarType::Byte, fp8 = weight.scalar_type() == ScalarType::Float8_e4m3fn;
  const bool floating = !int4 && !fp8 && weight.scalar_type() != ScalarType::Char;
  const int64_t panels = weight.size(0), steps = weight.dim() > 1 ? weight.size(1) : 0;
  OP_REQUIRES(weight.dim() >= 3 && weight.size(2) == PANEL && int64_t(weight.nbytes()) == panels * steps * STEP_BYTES,
              "packed_embedding: weight is ", weight.sizes(), " ", weight.scalar_type(), "; want panels");
  const int64_t per_step = floating ? 4 / weight.element_size() : int4 ? 8 : 4;
  OP_REQUIRES(in_features > (steps - 1) * per_step && in_features <= steps * per_step, "packed_embedding: ",
              in_features, " inputs for weight ", weight.sizes(), "; want up to ", steps * per_step);
  const int64_t groups = floating ? 1 : check_scales(weight, scales, zeros);

  const auto out_type = floating ? weight.scalar_type() : ScalarType::Float;
  const Tensor out = empty({ids.size(0), in_features}, out_type);
  const int64_t row_bytes = in_features * out.element_size();
  for (int64_t i = 0; i < ids.size(0); ++i) {
    const int64_t id = ids.const_data_ptr<int64_t>()[i];
    OP_REQUIRES(id >= 0 && id < panels * PANEL, "packed_embedding: id ", id, " of ", panels * PANEL, " rows");
    const int64_t panel = id / PANEL, column = id % PANEL;
    const char* words = static_cast<const char*>(weight.const_data_ptr()) + panel * steps * STEP_BYTES + column * 4;
    char* row = static_cast<char*>(out.mutable_data_ptr()) + i * row_bytes;
    const int64_t first_scale = panel * groups * PANEL + column;
    if (floating) {
      expand_column(words, steps, FloatWords{}, row, row_bytes);
    } else if (int4) {
      const uint8_t* zero = zeros.numel() ? zeros.const_data_ptr<uint8_t>() + first_scale : nullptr;
      const Int4Words expanded{scales.const_data_ptr<c10::Half>() + first_scale, zero, steps / groups};
      expand_column(words, steps, expanded, row, row_bytes);
    } else if (scales.dim() == 3) {
      const Int8GroupWords expanded{scales.const_data_ptr<c10::Half>() + first_scale, steps / groups};
      expand_column(words, steps, expanded, row, row_bytes);
    } else if (const float scale = scales.const_data_ptr<float>()[first_scale]; fp8) {
      expand_column(words, steps, ByteWords<c10::Float8_e4m3fn>{scale}, row, row_bytes);
    } else {
      expand_column(words, steps, ByteWords<int8_t>{scale}, row, row_bytes);
    }
  }
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(trtspec, CPU, m) {
  if (trtspec::usable()) m.impl("packed_embedding", TORCH_BOX(&trtspec::packed_embedding));
}
