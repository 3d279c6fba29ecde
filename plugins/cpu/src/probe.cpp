// For benchmarks: how fast this machine reads memory right now, with as many threads as torch uses.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>

#include "kernels.h"

// Bytes per second of one pass over `memory`.
static double read_bandwidth(const at::Tensor& memory) {
  TORCH_CHECK(memory.is_contiguous(), "read_bandwidth: memory must be contiguous");
  constexpr int64_t PAGE = 4096;
  const char* data = static_cast<const char*>(memory.const_data_ptr());
  std::atomic<int32_t> seen = 0;
  const auto start = std::chrono::steady_clock::now();
  at::parallel_for(0, int64_t(memory.nbytes()) / PAGE, 1, [&](int64_t begin, int64_t end) {
    seen += trtspec::kernels().read_memory(data + begin * PAGE, (end - begin) * PAGE);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return double(memory.nbytes()) / seconds.count();
}

TORCH_LIBRARY(trtspec_probe, m) {
  m.def("read_bandwidth(Tensor memory) -> float");
  m.impl("read_bandwidth", c10::DispatchKey::CPU, read_bandwidth);
}
