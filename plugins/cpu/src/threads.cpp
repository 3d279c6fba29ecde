// Implements threads.h. One team of workers serves the process. One op at a time has the team; other ops run in their
// caller alone.
#include "threads.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tensor.h"

namespace trtspec {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Time for which a worker without work looks for it before it sleeps. Ops of a step follow each other within
// microseconds, steps within a fraction of a millisecond. Waking a sleeping worker costs tens of microseconds.
constexpr microseconds STAYS_AWAKE{1000};
constexpr int EAGER_LOOKS = 2000;  // some 50 us without yielding to other processes

// A worker that is inside a chunk and gets no processor for this long is held up, and the caller with it. The machine
// is busy with something else. Then it is faster for the caller to go on alone for a while, twice as long each time
// this happens again.
constexpr microseconds HELD_UP{200}, SHORTEST_REST{4000}, LONGEST_REST{64000};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A wait that looks again and again, and yields to other processes after a while.
class Wait {
 public:
  void look_again() {
    if (++looks_ < EAGER_LOOKS) return pause();
    if (looks_ == EAGER_LOOKS) start_ = Clock::now();
    std::this_thread::yield();
  }
  // How long it has been yielding.
  Clock::duration so_far() const { return looks_ < EAGER_LOOKS ? Clock::duration{} : Clock::now() - start_; }

 private:
  int looks_ = 0;
  Clock::time_point start_;
};

// Memory that is expected to be read next. Its fields may be read while they change. The address may then be wrong, but
// a prefetch of any address does no harm.
struct alignas(64) Expected {
  std::atomic<const char*> data = nullptr;
  std::atomic<int64_t> bytes = 0;
  std::atomic<int> threads = 1;
  std::atomic<uint32_t> number = 0;
} expected;

// Most bytes that a core prefetches: half of its L2. The rest is for the data that the core works on.
int64_t most_fetched() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = std::clamp<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE) / 2, 128 * 1024, 1024 * 1024);
#else
  constexpr int64_t bytes = 128 * 1024;
#endif
  return bytes;
}

// Prefetches a member's part of the expected memory, a little at a time.
class Fetch {
 public:
  explicit Fetch(int member) : member_(member) {}

  // Fetch some of it. Return false if nothing is left to fetch.
  bool some() {
    if (const uint32_t now = expected.number.load(std::memory_order_acquire); now != number_) begin(now);
    if (at_ >= end_) return false;
    constexpr int LINE = 64, LINES = 8;
    for (int i = 0; i < LINES; ++i, at_ += LINE) __builtin_prefetch(reinterpret_cast<const void*>(at_), 0, 2);
    return true;
  }

 private:
  void begin(uint32_t number) {
    number_ = number;
    const auto data = reinterpret_cast<uintptr_t>(expected.data.load(std::memory_order_relaxed));
    const int64_t bytes = expected.bytes.load(std::memory_order_relaxed);
    const int threads = expected.threads.load(std::memory_order_relaxed);
    at_ = end_ = 0;
    if (member_ >= threads) return;
    at_ = data + bytes * member_ / threads;
    end_ = data + std::min(bytes * (member_ + 1) / threads, bytes * member_ / threads + most_fetched());
  }

  const int member_;
  uint32_t number_ = 0;
  uintptr_t at_ = 0, end_ = 0;
};

// A thread's own part of [0, count). The thread takes chunks from it in order, so it reads memory straight ahead. When
// nothing is left of its part, it helps the others.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct alignas(64) Worker {
  std::atomic<bool> inside = false;
#if defined(__linux__)
  clockid_t cpu_clock{};  // of the worker's thread
  timespec cpu_time{};    // when the caller began to suspect it
#endif
};

class Team {
 public:
  explicit Team(int workers) : shares_(workers + 1), workers_(workers) {
    try {
      for (int i = 0; i < workers; ++i) {
        std::thread thread([this, i] { work_forever(i); });
#if defined(__linux__)
        pthread_getcpuclockid(thread.native_handle(), &workers_[i].cpu_clock);
#endif
        thread.detach();  // the team lives as long as the process
      }
    } catch (const std::system_error&) {
      // The system gives no more threads. No thread waits for the missing ones, and the others do their shares.
    }
  }

  int size() const { return int(shares_.size()); }

  // Run the chunks on `threads` members, of which the caller is one. Return false if the team is resting: then the
  // caller does all chunks alone.
  bool run(int threads, int64_t count, int64_t chunk, Chunk call, const void* body) {
    if (rest_ > microseconds{} && Clock::now() < rest_until_) return false;
    call_ = call;
    body_ = body;
    chunk_ = chunk;
    threads_ = threads;
    const int64_t chunks = (count + chunk - 1) / chunk;
    for (int i = 0; i < threads; ++i) {
      shares_[i].next.store(chunks * i / threads * chunk, std::memory_order_relaxed);
      shares_[i].end = std::min(count, chunks * (i + 1) / threads * chunk);
    }
    uint32_t number = (state_.load(std::memory_order_relaxed) | (NUMBER_STEP - 1)) + 1;
    state_.store(number | OPEN, std::memory_order_release);
    state_.notify_all();
    take_chunks(0);
    state_.fetch_and(~OPEN, std::memory_order_acquire);
    wait_for_workers();
    if (failed_.exchange(false, std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
    return true;
  }

 private:
  // state_: number of the job, whether workers may still join it, and number of workers in it.
  static constexpr uint32_t INSIDE = 0xfff, OPEN = 0x1000, NUMBER_STEP = 0x2000;

  void work_forever(int index) {
    Worker& me = workers_[index];
    uint32_t last_job = 0;
    Fetch fetch(index + 1);
    for (;;) {
      uint32_t state = next_job(last_job, fetch);
      me.inside.store(true, std::memory_order_relaxed);
      // Only from now on the job is sure to stay. A failed exchange means that others joined, or that the job is over.
      while ((state & OPEN) && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) pause();
      if (state & OPEN) {
        last_job = state & ~(OPEN | INSIDE);
        if (index + 1 < threads_) take_chunks(index + 1);
        me.inside.store(false, std::memory_order_relaxed);
        state_.fetch_sub(1, std::memory_order_release);
      } else {
        me.inside.store(false, std::memory_order_relaxed);
      }
    }
  }

  // Wait for an open job that is not `last_job`, and return its state.
  uint32_t next_job(uint32_t last_job, Fetch& fetch) {
    for (Wait wait;;) {
      const uint32_t state = state_.load(std::memory_order_acquire);
      if ((state & OPEN) && (state & ~(OPEN | INSIDE)) != last_job) return state;
      if (fetch.some()) continue;
      if (wait.so_far() > STAYS_AWAKE) {
        state_.wait(state, std::memory_order_acquire);
        wait = {};
      } else {
        wait.look_again();
      }
    }
  }

  void take_chunks(int member) noexcept {
    for (int i = 0; i < threads_; ++i) {
      Share& share = shares_[(member + i) % threads_];
      for (int64_t begin; share.next.load(std::memory_order_relaxed) < share.end &&
                          (begin = share.next.fetch_add(chunk_, std::memory_order_relaxed)) < share.end;)
        try {
          call_(body_, begin, std::min(begin + chunk_, share.end));
        } catch (...) {
          if (!failed_.exchange(true)) error_ = std::current_exception();
        }
    }
  }

  void wait_for_workers() {
    bool suspecting = false, held_up = false;
    for (Wait wait; state_.load(std::memory_order_acquire) & INSIDE;) {
      if (fetch_.some()) continue;
      wait.look_again();
      if (!suspecting && wait.so_far() > HELD_UP) {
        suspecting = true;
        note_cpu_times();
      } else if (suspecting && !held_up && wait.so_far() > 2 * HELD_UP) {
        held_up = was_held_up();
        if (!held_up) suspecting = false, wait = {};
      }
    }
    if (held_up) {
      rest_ = std::clamp(2 * rest_, SHORTEST_REST, LONGEST_REST);
      rest_until_ = Clock::now() + rest_;
    } else if (rest_ > microseconds{} && Clock::now() > rest_until_ + rest_) {
      rest_ = {};
    }
  }

#if defined(__linux__)
  void note_cpu_times() {
    for (Worker& worker : workers_) clock_gettime(worker.cpu_clock, &worker.cpu_time);
  }

  // Return whether a worker that we wait for has used less than HELD_UP / 2 of CPU time since note_cpu_times.
  bool was_held_up() {
    for (Worker& worker : workers_) {
      timespec now;
      if (!worker.inside.load(std::memory_order_relaxed) || clock_gettime(worker.cpu_clock, &now) != 0) continue;
      const int64_t used =
          (now.tv_sec - worker.cpu_time.tv_sec) * 1'000'000'000 + now.tv_nsec - worker.cpu_time.tv_nsec;
      if (std::chrono::nanoseconds(used) < HELD_UP / 2) return true;
    }
    return false;
  }
#else
  void note_cpu_times() {}
  bool was_held_up() { return false; }
#endif

  Chunk call_;
  const void* body_;
  int64_t chunk_;
  int threads_;
  std::atomic<bool> failed_ = false;
  std::exception_ptr error_;  // the first exception
  std::vector<Share> shares_;
  std::vector<Worker> workers_;
  Fetch fetch_{0};  // the caller's
  alignas(64) std::atomic<uint32_t> state_ = 0;
  microseconds rest_{};
  Clock::time_point rest_until_{};
};

std::mutex one_at_a_time;
Team* team = nullptr;  // grows to the largest number of threads that a caller asked for

// A forked child has none of its parent's threads.
void forget_team() {
  team = nullptr;
  new (&one_at_a_time) std::mutex;
}
const int forks_are_watched = pthread_atfork(nullptr, nullptr, forget_team);

thread_local bool own_threads = false;
thread_local int own_count = 0;  // 0: as many as torch uses

}  // namespace

static int torch_threads() {
  uint32_t count;
  check(torch_get_num_threads(&count));
  return int(count);
}

OwnThreads::OwnThreads() : before_(std::exchange(own_threads, true)) {}
OwnThreads::~OwnThreads() { own_threads = before_; }

void expect_next(const void* data, int64_t bytes) {
  if (!own_threads && own_count == 0) return;
  expected.data.store(static_cast<const char*>(data), std::memory_order_relaxed);
  expected.bytes.store(bytes, std::memory_order_relaxed);
  expected.threads.store(own_count > 0 ? own_count : torch_threads(), std::memory_order_relaxed);
  expected.number.fetch_add(1, std::memory_order_release);
}

int use_own_threads(int count) { return std::exchange(own_count, count); }

// Run the chunks on torch's threads. An exception may not pass through torch's C functions, so it is thrown again here.
static void share_out_with_torch(int64_t count, int64_t chunk, Chunk call, const void* body) {
  struct Job {
    const Chunk call;
    const void* const body;
    std::atomic<bool> failed = false;
    std::exception_ptr error;  // the first exception
  } job{call, body};
  const auto run = [](int64_t begin, int64_t end, void* of) {
    Job& job = *static_cast<Job*>(of);
    try {
      job.call(job.body, begin, end);
    } catch (...) {
      if (!job.failed.exchange(true)) job.error = std::current_exception();
    }
  };
  check(torch_parallel_for(0, count, chunk, run, &job));
  if (job.error) std::rethrow_exception(job.error);
}

void share_out(int64_t count, int64_t chunk, Chunk call, const void* body) {
  chunk = std::max<int64_t>(chunk, 1);
  if (!own_threads && own_count == 0) return share_out_with_torch(count, chunk, call, body);
  const int most = own_count > 0 ? own_count : torch_threads();
  const int threads = int(std::min<int64_t>(most, (count + chunk - 1) / chunk));
  if (threads > 1) {
    const std::unique_lock mine(one_at_a_time, std::try_to_lock);
    if (mine) {
      if (team == nullptr || team->size() < most) team = new Team(most - 1);
      if (team->run(threads, count, chunk, call, body)) return;
    }
  }
  if (count > 0) call(body, 0, count);
}

}  // namespace trtspec

static int64_t use_own(int64_t count) {
  OP_REQUIRES(count >= 0 && count < 4096, "use_own: count is ", count, "; want 0 to 4095");
  return trtspec::use_own_threads(int(count));
}

STABLE_TORCH_LIBRARY(trtspec_threads, m) { m.def("use_own(int count) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(trtspec_threads, CompositeExplicitAutograd, m) { m.impl("use_own", TORCH_BOX(&use_own)); }
