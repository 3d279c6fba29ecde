// Shares the pieces of an op out among threads.
#pragma once

#include <cstdint>

namespace trtspec {

// parallel_for calls body(begin, end) for chunks of [0, count), on as many threads as torch uses
// (torch.set_num_threads). A chunk is `chunk` pieces, which together take a few microseconds. Fewer than two chunks are
// not worth another thread. Chunks may run in any order and at the same time. If a body throws, parallel_for throws the
// exception after all chunks have ended.
//
// Within an OwnThreads, or after use_own_threads, the threads are this library's own. OpenMP's threads wait for each
// other at every op. That costs microseconds at best, and milliseconds each time another process has taken one of the
// cores. The own threads never wait for a thread that has not come: the threads that are there take the chunks.
// Elsewhere the threads are those of torch's parallel_for. torch's own ops leave OpenMP's threads spinning, and two
// teams of threads would compete for the cores.
class OwnThreads {
 public:
  OwnThreads();
  ~OwnThreads();

 private:
  bool before_;
};

// Make this thread's ops use `count` own threads from now on. 0: as many threads as torch.set_num_threads says, and
// they are OpenMP's outside an OwnThreads. Return the previous value.
int use_own_threads(int count);

// Announce the memory that this thread's next op will read, as far as it is known. Until that op begins, idle own
// threads prefetch their parts of it into their caches, because memory is idle too. A wrong guess costs nothing but
// time.
void expect_next(const void* data, int64_t bytes);

using Chunk = void (*)(const void* body, int64_t begin, int64_t end);
void share_out(int64_t count, int64_t chunk, Chunk call, const void* body);

template <class Body>
void parallel_for(int64_t count, int64_t chunk, const Body& body) {
  share_out(
      count, chunk,
      [](const void* it, int64_t begin, int64_t end) { (*static_cast<const Body*>(it))(begin, end); }, &body);
}

}  // namespace trtspec
