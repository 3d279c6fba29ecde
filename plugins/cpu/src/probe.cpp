// For benchmarks and tests: how fast this machine reads memory right now, with as many threads as torch uses, and ops on
// the threads that they have in compiled graphs.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <vector>

#include "kernels.h"
#include "threads.h"

// Bytes per second of one pass over `memory`.
static double read_bandwidth(const at::Tensor& memory) {
  TORCH_CHECK(memory.is_contiguous(), "read_bandwidth: memory must be contiguous");
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

// How often each of `count` pieces was done, on own threads; piece `failing` throws.
static std::vector<int64_t> count_pieces(int64_t count, int64_t failing) {
  const trtspec::OwnThreads own_threads;
  std::vector<int64_t> done(count);
  trtspec::parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      TORCH_CHECK(i != failing, "piece ", i, " failed");
      ++done[i];
    }
  });
  return done;
}

// From now on ops of this Python thread use our own threads, or OpenMP's again.
static void use_own_threads(bool own) {
  static thread_local std::optional<trtspec::OwnThreads> scope;
  scope.reset();
  if (own) scope.emplace();
}

TORCH_LIBRARY(trtspec_probe, m) {
  m.def("read_bandwidth(Tensor memory) -> float");
  m.impl("read_bandwidth", c10::DispatchKey::CPU, read_bandwidth);
  m.def("count_pieces(int count, int failing) -> int[]", count_pieces);
  m.def("use_own_threads(bool own) -> ()", use_own_threads);
}
