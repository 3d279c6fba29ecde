// For benchmarks: how fast this machine reads memory right now, with as many threads as torch uses.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>

// Bytes per second of one pass over `memory`.
static double read_bandwidth(const at::Tensor& memory) {
  TORCH_CHECK(memory.is_contiguous(), "read_bandwidth: memory must be contiguous");
  typedef uint64_t Line __attribute__((vector_size(64)));
  const char* data = static_cast<const char*>(memory.const_data_ptr());
  std::atomic<uint64_t> sink = 0;  // so that nothing is optimised away
  const auto start = std::chrono::steady_clock::now();
  at::parallel_for(0, int64_t(memory.nbytes() / sizeof(Line)), 4096, [&](int64_t begin, int64_t end) {
    Line sum = {};
    for (int64_t i = begin; i < end; ++i) {
      Line line;
      std::memcpy(&line, data + i * sizeof(Line), sizeof line);
      sum ^= line;
    }
    sink += sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return double(memory.nbytes()) / seconds.count();
}

TORCH_LIBRARY(trtspec_probe, m) {
  m.def("read_bandwidth(Tensor memory) -> float");
  m.impl("read_bandwidth", c10::DispatchKey::CPU, read_bandwidth);
}
