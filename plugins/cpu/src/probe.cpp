// For benchmarks and tests: how fast this machine reads memory and multiplies right now, with as many threads as torch
// uses.
#include <atomic>
#include <chrono>
#include <vector>

#include "kernels.h"
#include "tensor.h"
#include "threads.h"

using trtspec::ScalarType;
using trtspec::WeightFormat;

// Bytes per second of one pass over `memory`.
static double read_bandwidth(const trtspec::Tensor& memory) {
  OP_REQUIRES(memory.is_contiguous(), "read_bandwidth: memory must be contiguous");
  constexpr int64_t PAGE = 4096, PAGES_OF_A_CHUNK = 256;
  const char* data = static_cast<const char*>(memory.const_data_ptr());
  const trtspec::OwnThreads own_threads;
  std::atomic<int32_t> seen = 0;
  const auto start = std::chrono::steady_clock::now();
  trtspec::parallel_for(int64_t(memory.nbytes()) / PAGE, PAGES_OF_A_CHUNK, [&](int64_t begin, int64_t end) {
    seen += trtspec::kernels().read_memory(data + begin * PAGE, (end - begin) * PAGE);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return double(memory.nbytes()) / seconds.count();
}

// Multiplications per second of packed_linear's inner instructions on registers. group_size: inputs of a group of int4
// weights, whose sums are scaled once per group. The same goes for int8 weights, if it is at most 128.
static double multiply_rate(const trtspec::Tensor& weight, int64_t group_size) {
  constexpr int64_t PIECES = 64, STEPS = 16'384;
  const WeightFormat format = weight.scalar_type() == ScalarType::Float      ? WeightFormat::fp32
                              : weight.scalar_type() == ScalarType::BFloat16 ? WeightFormat::bf16
                              : weight.scalar_type() == ScalarType::Half     ? WeightFormat::fp16
                              : weight.scalar_type() == ScalarType::Char
                                  ? (group_size <= 128 ? WeightFormat::int8_groups : WeightFormat::int8)
                              : weight.scalar_type() == ScalarType::Byte     ? WeightFormat::int4
                                                                             : WeightFormat::fp8;
  const int64_t group_steps = format == WeightFormat::int4          ? group_size / 8
                              : format == WeightFormat::int8_groups ? group_size / 4
                                                                    : STEPS;
  const trtspec::OwnThreads own_threads;
  std::atomic<int64_t> done = 0;
  const auto start = std::chrono::steady_clock::now();
  trtspec::parallel_for(PIECES, 1, [&](int64_t begin, int64_t end) {
    done += trtspec::kernels().multiply(format, (end - begin) * STEPS / group_steps, group_steps);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return double(done) / seconds.count();
}

// Return how often each of `count` pieces was done, on own threads. Piece `failing` throws.
static std::vector<int64_t> count_pieces(int64_t count, int64_t failing) {
  const trtspec::OwnThreads own_threads;
  std::vector<int64_t> done(count);
  trtspec::parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      OP_REQUIRES(i != failing, "piece ", i, " failed");
      ++done[i];
    }
  });
  return done;
}

STABLE_TORCH_LIBRARY(trtspec_probe, m) {
  m.def("read_bandwidth(Tensor memory) -> float");
  m.def("multiply_rate(Tensor weight, int group_size) -> float");
  m.def("set_machine_reads_ahead(bool value) -> bool");
  m.def("count_pieces(int count, int failing) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(trtspec_probe, CompositeExplicitAutograd, m) {
  m.impl("read_bandwidth", TORCH_BOX(&read_bandwidth));
  m.impl("multiply_rate", TORCH_BOX(&multiply_rate));
  m.impl("set_machine_reads_ahead", TORCH_BOX(&trtspec::set_machine_reads_ahead));
  m.impl("count_pieces", TORCH_BOX(&count_pieces));
}
