// rms_norm, silu_mul and rotate_heads, which trtspec/ops/norm.py and trtspec/ops/elementwise.py define.
#include <algorithm>

#include "kernels.h"
#include "ops.h"
#include "threads.h"

using namespace trtspec;

// Elements that are worth another thread: a few us.
static constexpr int64_t NORMS_PER_CHUNK = 1 << 14, ROTATIONS_PER_CHUNK = 1 << 13, SILUS_PER_CHUNK = 1 << 13;

static int64_t rows_of_a_chunk(int64_t elements, int64_t row) { return std::max<int64_t>(elements / row, 1); }

// x itself if the elements of its last dimension are adjacent, else a contiguous copy.
static Tensor with_adjacent_elements(const Tensor& x) {
  return x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) == 1 ? x : x.contiguous();
}

// x [T, heads, size], or [T, size] with one head.
static Heads heads_of(const Tensor& x) {
  return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.dim() == 3 ? x.stride(1) : 0};
}

Tensor trtspec::rms_norm(const Tensor& x_, const Tensor& weight_, double eps) {
  OP_REQUIRES((x_.dim() == 2 || x_.dim() == 3) && x_.size(x_.dim() - 1) > 0, "rms_norm: x is ", x_.sizes(),
              "; want [rows, size] or [rows, heads, size]");
  const int64_t size = x_.size(x_.dim() - 1);
  OP_REQUIRES(weight_.sizes() == Sizes({size}) && weight_.scalar_type() == x_.scalar_type(), "rms_norm: weight is ",
              weight_.sizes(), " ", weight_.scalar_type(), "; want [", size, "] of x's type, ", x_.scalar_type());
  const Tensor x = with_adjacent_elements(x_), weight = weight_.contiguous();
  Tensor out = empty(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  NormArgs args = {};
  args.element = element_of("rms_norm: x", x);
  args.size = size;
  args.heads = x.dim() == 3 ? x.size(1) : 1;
  args.eps = float(eps);
  args.x = heads_of(x);
  args.weight = weight.const_data_ptr();
  args.out = out.mutable_data_ptr();
  parallel_for(x.size(0), rows_of_a_chunk(NORMS_PER_CHUNK, args.heads * size),
               [&](int64_t begin, int64_t end) { kernels().rms_norm(args, begin, end); });
  return out;
}

Tensor trtspec::silu_mul(const Tensor& x_) {
  OP_REQUIRES(x_.dim() == 2 && x_.size(1) > 0 && x_.size(1) % 2 == 0, "silu_mul: x is ", x_.sizes(),
              "; want [rows, 2 * size]");
  const Tensor x = with_adjacent_elements(x_);
  Tensor out = empty({x.size(0), x.size(1) / 2}, x.scalar_type());
  if (out.numel() == 0) return out;
  SiluMulArgs args = {};
  args.element = element_of("silu_mul: x", x);
  args.size = x.size(1) / 2;
  args.x = x.const_data_ptr();
  args.x_step = x.stride(0);
  args.out = out.mutable_data_ptr();
  parallel_for(x.size(0), rows_of_a_chunk(SILUS_PER_CHUNK, args.size),
               [&](int64_t begin, int64_t end) { kernels().silu_mul(args, begin, end); });
  return out;
}

static RotateArgs rotation(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& out) {
  RotateArgs args = {};
  args.element = element_of("rotate_heads: q", x);
  args.size = x.size(2);
  args.heads = x.size(1);
  args.x = heads_of(x);
  args.cos = cos.const_data_ptr();
  args.sin = sin.const_data_ptr();
  args.cos_step = cos.stride(0);
  args.sin_step = sin.stride(0);
  args.out = out.mutable_data_ptr();
  return args;
}

std::tuple<Tensor, Tensor> trtspec::rotate_heads(const Tensor& q_, const Tensor& k_, const Tensor& cos_,
                                                 const Tensor& sin_) {
  OP_REQUIRES(q_.dim() == 3 && q_.size(2) > 0 && q_.size(2) % 2 == 0, "rotate_heads: q is ", q_.sizes(),
              "; want [rows, heads, size], an even size");
  const int64_t rows = q_.size(0), size = q_.size(2);
  OP_REQUIRES(k_.dim() == 3 && k_.size(0) == rows && k_.size(2) == size && k_.scalar_type() == q_.scalar_type(),
              "rotate_heads: k is ", k_.sizes(), " ", k_.scalar_type(), "; want [", rows, ", heads, ", size,
              "] of q's type, ", q_.scalar_type());
  for (const auto& [name, angles] : {std::pair("cos", &cos_), std::pair("sin", &sin_)})
    OP_REQUIRES(angles->sizes() == Sizes({rows, 1, size}) && angles->scalar_type() == q_.scalar_type(),
                "rotate_heads: ", name, " is ", angles->sizes(), " ", angles->scalar_type(), "; want [", rows, ", 1, ",
                size, "] of q's type, ", q_.scalar_type());
  const Tensor q = with_adjacent_elements(q_), k = with_adjacent_elements(k_), cos = with_adjacent_elements(cos_),
               sin = with_adjacent_elements(sin_);
  Tensor q_out = empty(q.sizes(), q.scalar_type()), k_out = empty(k.sizes(), k.scalar_type());
  const RotateArgs of_q = rotation(q, cos, sin, q_out), of_k = rotation(k, cos, sin, k_out);
  parallel_for(rows, rows_of_a_chunk(ROTATIONS_PER_CHUNK, (of_q.heads + of_k.heads) * size + 1),
               [&](int64_t begin, int64_t end) {
                 kernels().rotate_heads(of_q, begin, end);
                 kernels().rotate_heads(of_k, begin, end);
               });
  return {std::move(q_out), std::move(k_out)};
}

STABLE_TORCH_LIBRARY_IMPL(trtspec, CPU, m) {
  if (!trtspec::usable()) return;
  m.impl("rms_norm", TORCH_BOX(&trtspec::rms_norm));
  m.impl("silu_mul", TORCH_BOX(&trtspec::silu_mul));
  m.impl("rotate_heads", TORCH_BOX(&trtspec::rotate_heads));
}
