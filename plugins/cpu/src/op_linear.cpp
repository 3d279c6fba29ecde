// packed_linear, which trtspec/ops/linear.py defines. trtspec/ops/packing.py explains the layouts.
#include <algorithm>
#include <cstdlib>
#include <new>
#include <optional>
#include <unordered_map>
#include <vector>

#include "kernels.h"
#include "ops.h"
#include "threads.h"

using namespace trtspec;

// torch has this function if it has oneDNN.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle x, AtenTensorHandle y, AtenTensorHandle* bias, const char* attribute, const double** scalars,
    int64_t num_scalars, const char** algorithm, AtenTensorHandle* out);

// x [M, K], y [N, K] fp32 -> x @ y^T, for M and K that are whole multiples. trtspec/ops/products.py explains these
// multiples, and the use of oneDNN's inner product.
static Tensor whole_product(const Tensor& x, const Tensor& y) {
  if (aoti_torch_cpu__linear_pointwise == nullptr || x.size(0) == 0)
    return call("aten::linear", "", x, y, std::optional<Tensor>());
  AtenTensorHandle out;
  const char* algorithm = "";
  check(aoti_torch_cpu__linear_pointwise(x.handle(), y.handle(), nullptr, "none", nullptr, 0, &algorithm, &out));
  return Tensor::owned(out);
}

// Append zeros to x [M, K]: `rows` rows and `columns` columns.
static Tensor padded(const Tensor& x, int64_t rows, int64_t columns) {
  if (rows == 0 && columns == 0) return x;
  return call("aten::pad", "", x, std::vector<int64_t>{0, columns, 0, rows}, std::string("constant"), std::nullopt);
}

// out [M, N] += bias [N], both fp32 and contiguous.
static void add_to_rows(const Tensor& out, const Tensor& bias) {
  const int64_t rows = out.size(0), columns = out.size(1);
  OP_REQUIRES(bias.numel() == columns, "packed_linear: bias is ", bias.sizes(), "; want [", columns, "]");
  float* to = out.mutable_data_ptr<float>();
  const float* added = bias.const_data_ptr<float>();
  for (int64_t r = 0; r < rows; ++r, to += columns)
    for (int64_t i = 0; i < columns; ++i) to[i] += added[i];
}

// A linear with a plain weight [N, K], computed exactly as the reference does it.
static Tensor plain_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool float_out) {
  constexpr int64_t ROW_MULTIPLE = 4, DEPTH_MULTIPLE = 16;  // trtspec/ops/products.py explains both
  const NoGradients none;
  const auto missing = [](int64_t n, int64_t multiple) { return (multiple - n % multiple) % multiple; };
  const int64_t rows = x.size(0), depth = missing(x.size(1), DEPTH_MULTIPLE);
  const Tensor xs = padded(x.to(ScalarType::Float), missing(rows, ROW_MULTIPLE), depth).contiguous();
  const Tensor weights = padded(weight.to(ScalarType::Float), 0, depth).contiguous();
  const Tensor out = call("aten::narrow", "", whole_product(xs, weights), int64_t(0), int64_t(0), rows);
  if (bias) add_to_rows(out, bias->to(ScalarType::Float).contiguous());
  return out.to(float_out ? ScalarType::Float : x.scalar_type());
}

static WeightFormat weight_format(const Tensor& x, const Tensor& weight, const Tensor& scales) {
  if (weight.scalar_type() == ScalarType::Char)
    return scales.dim() == 3 ? WeightFormat::int8_groups : WeightFormat::int8;
  if (weight.scalar_type() == ScalarType::Byte) return WeightFormat::int4;
  if (weight.scalar_type() == ScalarType::Float8_e4m3fn) return WeightFormat::fp8;
  OP_REQUIRES(weight.scalar_type() == x.scalar_type(), "packed_linear: weight is ", weight.scalar_type(),
              ", x ", x.scalar_type(), "; want the same type, int8, uint8 (int4) or float8_e4m3fn");
  return x.scalar_type() == ScalarType::Float      ? WeightFormat::fp32
         : x.scalar_type() == ScalarType::BFloat16 ? WeightFormat::bf16
                                                   : WeightFormat::fp16;
}

static int64_t inputs_per_step(WeightFormat format) {
  switch (format) {
    case WeightFormat::fp32: return 1;
    case WeightFormat::bf16: case WeightFormat::fp16: return 2;
    case WeightFormat::int8: case WeightFormat::int8_groups: case WeightFormat::fp8: return 4;
    default: return 8;
  }
}

static void check_weight(const LinearArgs& args, const Tensor& weight, int64_t panels) {
  const int64_t per_step = inputs_per_step(args.format);
  const int64_t bytes = panels * args.steps * STEP_BYTES;
  OP_REQUIRES(weight.is_contiguous() && weight.size(0) == panels && weight.size(1) == args.steps &&
                  int64_t(weight.nbytes()) == bytes,
              "packed_linear: weight is ", weight.sizes(), " ", weight.scalar_type(), " for ", args.depth,
              " inputs and ", args.out_features, " outputs; want contiguous panels [", panels, ", ", args.steps, ", 32",
              per_step == 1 ? "" : per_step == 2 ? ", 2" : ", 4", "] (see trtspec.ops.packing)");
}

// Check int8 or fp8, with one scale per column.
static void check_columns(const char* format, const Tensor& scales, const Tensor& zeros, int64_t panels) {
  OP_REQUIRES(scales.scalar_type() == ScalarType::Float && scales.sizes() == Sizes({panels, PANEL}) &&
                  scales.is_contiguous(),
              "packed_linear: scales is ", scales.sizes(), " ", scales.scalar_type(), "; ", format, " wants [", panels,
              ", 32] float32, contiguous");
  OP_REQUIRES(zeros.numel() == 0, "packed_linear: zeros is ", zeros.sizes(), "; ", format, " wants no elements");
}

// Check int8. The limit of its depth keeps sums of (unsigned byte * signed byte) below 2^31.
static void check_int8(const LinearArgs& args, const Tensor& scales, const Tensor& zeros, int64_t panels) {
  OP_REQUIRES(args.depth <= 65536, "packed_linear: int8 has at most 65536 inputs, not ", args.depth);
  check_columns("int8", scales, zeros, panels);
}

// Return the scale of x for fp8 weights; 0 for none.
static float scale_of_x(WeightFormat format, const std::optional<Tensor>& x_scale) {
  if (!x_scale || x_scale->numel() == 0) return 0;
  OP_REQUIRES(format == WeightFormat::fp8 && x_scale->numel() == 1 && x_scale->scalar_type() == ScalarType::Float,
              "packed_linear: x_scale is ", x_scale->sizes(), " ", x_scale->scalar_type(),
              "; want [1] float32, for float8_e4m3fn weights alone");
  return *x_scale->const_data_ptr<float>();
}

// Check int4, or int8 in groups, which has no zeros.
static void check_groups(const LinearArgs& args, const Tensor& scales, const Tensor& zeros, int64_t panels) {
  const bool int4 = args.format == WeightFormat::int4;
  const int64_t groups = args.groups, group_size = groups > 0 ? args.depth / groups : 0;
  OP_REQUIRES(scales.scalar_type() == ScalarType::Half && scales.is_contiguous() &&
                  scales.sizes() == Sizes({panels, groups, PANEL}) && groups * group_size == args.depth &&
                  (group_size == 32 || group_size == 64 || group_size == 128),
              "packed_linear: scales is ", scales.sizes(), " ", scales.scalar_type(), "; ",
              int4 ? "int4" : "int8 in groups", " with ", args.depth, " inputs wants [", panels,
              ", inputs / group size, 32] float16, contiguous, groups of 32, 64 or 128");
  OP_REQUIRES(int4 || zeros.numel() == 0, "packed_linear: zeros is ", zeros.sizes(), "; int8 wants no elements");
  OP_REQUIRES(zeros.numel() == 0 || (zeros.scalar_type() == ScalarType::Byte && zeros.is_contiguous() &&
                                     zeros.sizes() == scales.sizes()),
              "packed_linear: zeros is ", zeros.sizes(), " ", zeros.scalar_type(), "; want ", scales.sizes(),
              " uint8, contiguous, or no elements");
}

// Scratch memory of this thread of at least `size` bytes, aligned to a cache line and kept for the thread's next call.
static char* scratch(int64_t size) {
  constexpr int64_t LINE = 64;
  static thread_local struct Kept {
    char* data = nullptr;
    int64_t size = 0;
    ~Kept() { std::free(data); }
  } kept;
  if (kept.size < size) {
    std::free(kept.data);
    kept.size = 0;
    size = (size + size / 4 + LINE - 1) / LINE * LINE;
    kept.data = static_cast<char*>(std::aligned_alloc(LINE, size));
    if (kept.data == nullptr) throw std::bad_alloc();
    kept.size = size;
  }
  return kept.data;
}

// Announce the weight of the next linear. A step's linears follow each other as they did in the step before. A linear
// of few rows waits for memory, so after it the weight that came next last time is expected again.
static void expect_successor(const LinearArgs& args, int64_t panels) {
  constexpr int64_t FEW_ROWS = 64;
  constexpr size_t MOST = 4096;  // weights, some of engines that may be gone
  struct Weight {
    const void* data = nullptr;
    int64_t bytes = 0;
  };
  static thread_local std::unordered_map<const void*, Weight> successors;
  static thread_local const void* last = nullptr;
  if (successors.size() > MOST) successors.clear();
  if (last != nullptr) successors[last] = {args.weight, panels * args.steps * STEP_BYTES};
  last = args.weight;
  if (args.rows > FEW_ROWS) return;
  const auto next = successors.find(last);
  if (next != successors.end()) expect_next(next->second.data, next->second.bytes);
}

static void run(LinearArgs& args, int64_t panels) {
  constexpr int64_t ROWS_OF_A_CHUNK = 96;
  const Kernels& k = kernels();
  if (k.linear_takes_x(args)) {
    args.prepared = static_cast<char*>(const_cast<void*>(args.x));
    args.row_bytes = args.x_step * bytes_of(args.element);
  } else {
    const int64_t rows = (args.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
    args.row_bytes = k.linear_row_bytes(args);
    args.prepared = scratch(rows * args.row_bytes);
    parallel_for(args.rows, ROWS_OF_A_CHUNK, [&](int64_t begin, int64_t end) { k.linear_prepare(args, begin, end); });
  }

  expect_successor(args, panels);
  const int64_t panels_of_a_piece = args.swiglu ? 2 : 1;
  panels /= panels_of_a_piece;
  // Piece i is panel i % panels of the rows from i / panels * block_rows on.
  const int64_t block_rows = k.linear_block_rows(args), blocks = (args.rows + block_rows - 1) / block_rows;
  const int64_t panels_of_a_chunk = k.linear_chunk_bytes(args) / (panels_of_a_piece * args.steps * STEP_BYTES + 1) + 1;
  parallel_for(blocks * panels, panels_of_a_chunk, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / panels * block_rows, panel = begin % panels;
      const int64_t count = std::min(panels - panel, end - begin);
      k.linear_block(args, row, std::min(row + block_rows, args.rows), panel, panel + count);
      begin += count;
    }
  });
}

static Tensor linear(const Tensor& x_, const Tensor& weight, const Tensor& scales, const Tensor& zeros,
                     const std::optional<Tensor>& bias_, const std::optional<Tensor>& x_scale, int64_t out_features,
                     bool float_out, bool swiglu) {
  OP_REQUIRES(x_.dim() == 2 && x_.size(1) > 0 && out_features > 0, "packed_linear: x is ", x_.sizes(), " for ",
              out_features, " outputs; want [rows, inputs], one input and one output at least");
  if (weight.dim() == 2) {
    OP_REQUIRES(weight.size(0) == out_features && weight.size(1) == x_.size(1), "packed_linear: weight is ",
                weight.sizes(), "; want [", out_features, ", ", x_.size(1), "]");
    const Tensor out = plain_linear(x_, weight, bias_, float_out);
    return swiglu ? silu_mul(out) : out;
  }
  if (swiglu && out_features % (2 * PANEL) != 0)
    return silu_mul(linear(x_, weight, scales, zeros, bias_, x_scale, out_features, float_out, false));

  const Tensor x = x_.size(1) == 0 || x_.stride(1) == 1 ? x_ : x_.contiguous();
  const Tensor bias = bias_ ? bias_->contiguous() : Tensor();
  const int64_t panels = (out_features + PANEL - 1) / PANEL;
  LinearArgs args = {};
  args.format = weight_format(x, weight, scales);
  args.element = element_of("packed_linear: x", x);
  args.float_out = float_out;
  args.swiglu = swiglu;
  args.rows = x.size(0);
  args.depth = x.size(1);
  args.out_features = out_features;
  args.steps = (args.depth + inputs_per_step(args.format) - 1) / inputs_per_step(args.format);
  const bool grouped = args.format == WeightFormat::int4 || args.format == WeightFormat::int8_groups;
  args.groups = grouped && scales.dim() == 3 ? scales.size(1) : 1;
  check_weight(args, weight, panels);
  if (args.format == WeightFormat::int8) check_int8(args, scales, zeros, panels);
  if (grouped) check_groups(args, scales, zeros, panels);
  if (args.format == WeightFormat::fp8) check_columns("fp8", scales, zeros, panels);
  OP_REQUIRES(!bias.defined() || (bias.scalar_type() == x.scalar_type() && bias.numel() == out_features),
              "packed_linear: bias is ", bias.defined() ? bias.sizes() : Sizes({}), "; want [", out_features,
              "] of x's type, ", x.scalar_type());

  Tensor out = empty({args.rows, swiglu ? out_features / 2 : out_features}, float_out ? ScalarType::Float : x.scalar_type());
  if (out.numel() == 0) return out;
  args.x = x.const_data_ptr();
  args.x_step = x.stride(0);
  args.weight = weight.const_data_ptr();
  args.scales = scales.const_data_ptr();
  args.zeros = zeros.numel() > 0 ? zeros.const_data_ptr<uint8_t>() : nullptr;
  args.x_scale = scale_of_x(args.format, x_scale);
  args.reads_ahead = machine_reads_ahead();
  args.stream_ahead = machine_stream_ahead();
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  args.out = out.mutable_data_ptr();
  run(args, panels);
  return out;
}

Tensor trtspec::packed_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor& zeros,
                              const std::optional<Tensor>& bias, const std::optional<Tensor>& x_scale,
                              int64_t out_features, bool float_out) {
  return linear(x, weight, scales, zeros, bias, x_scale, out_features, float_out, false);
}

Tensor trtspec::packed_swiglu(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor& zeros,
                              const std::optional<Tensor>& bias, const std::optional<Tensor>& x_scale,
                              int64_t out_features) {
  return linear(x, weight, scales, zeros, bias, x_scale, out_features, false, true);
}

STABLE_TORCH_LIBRARY_IMPL(trtspec, CPU, m) {
  if (!trtspec::usable()) return;
  m.impl("packed_linear", TORCH_BOX(&trtspec::packed_linear));
  m.impl("packed_swiglu", TORCH_BOX(&trtspec::packed_swiglu));
}
