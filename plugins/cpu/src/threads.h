// Sharing an op's pieces out among threads.
#pragma once

#include <cstdint>

namespace trtspec {

// body(begin, end) for chunks of [0, count), on as many threads as torch uses (torch.set_num_threads). A chunk is
// `chunk` pieces, worth a few microseconds: fewer than two chunks are not worth another thread. Chunks may run in any
// order and at the same time. What a body throws is thrown here, once all have ended.
//
// Within an OwnThreads, or after use_own_threads, the threads are this library's. OpenMP's wait for each other at every
// op, which costs microseconds when all is well, and milliseconds each time another process has taken one of the cores;
// ours wait for nobody who has not come: whoever is there takes the chunks. Elsewhere it is torch's parallel_for, since
// torch's own ops leave OpenMP's threads spinning, and two teams would fight for the cores.
class OwnThreads {
 public:
  OwnThreads();
  ~OwnThreads();

 private:
  bool before_;
};

// From now on this thread's ops use `count` threads of our own; 0: as many as torch.set_num_threads says, and OpenMP's
// unless within an OwnThreads. Returns what it was.
int use_own_threads(int count);

// What this thread's next op is going to read, as far as one can tell. Until then threads of our own that have nothing to
// do fetch their parts of it into their caches, as memory stands idle, too. A wrong guess changes nothing but time.
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
