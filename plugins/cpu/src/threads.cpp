// See threads.h. One team of workers serves the process; one op at a time has it, others run in their caller alone.
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

// A worker without work looks for it this long before it sleeps. Ops of a step follow each other within microseconds,
// steps within a fraction of a millisecond; waking a sleeper costs tens of microseconds.
constexpr microseconds STAYS_AWAKE{1000};
constexpr int EAGER_LOOKS = 2000;  // some 50 us without giving way to other processes

// A worker that is inside a chunk and gets no processor for this long is held up, and the caller with it: the machine is
// busy with something else. Then it is faster to go on alone for a while, twice as long each time it happens again.
constexpr microseconds HELD_UP{200}, SHORTEST_REST{4000}, LONGEST_REST{64000};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks again and again, giving way to other processes after a while.
class Wait {
 public:
  void look_again() {
    if (++looks_ < EAGER_LOOKS) return pause();
    if (looks_ == EAGER_LOOKS) start_ = Clock::now();
    std::this_thread::yield();
  }
  // How long it has been giving way.
  Clock::duration so_far() const { return looks_ < EAGER_LOOKS ? Clock::duration{} : Clock::now() - start_; }

 private:
  int looks_ = 0;
  Clock::time_point start_;
};

// What is expected to be read next. Its parts may be read while it changes: whatever address comes of it, a prefetch of
// it does no harm.
struct alignas(64) Expected {
  std::atomic<const char*> data = nullptr;
  std::atomic<int64_t> bytes = 0;
  std::atomic<int> threads = 1;
  std::atomic<uint32_t> number = 0;
} expected;

// Half of what a core's L2 holds: the rest is for what it works on.
int64_t most_fetched() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = std::clamp<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE) / 2, 128 * 1024, 1024 * 1024);
#else
  constexpr int64_t bytes = 128 * 1024;
#endif
  return bytes;
}

// Fetches a member's part of what is expected, a little at a time.
class Fetch {
 public:
  explicit Fetch(int member) : member_(member) {}

  // False: there is nothing left to fetch.
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

// A thread's own part of [0, count), from which it takes chunks in order: memory is read straight ahead. When it has
// none left it helps the others.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct alignas(64) Worker {
  std::atomic<bool> inside = false;
#if defined(__linux__)
  clockid_t cpu_clock{};  // of its thread
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
      // The system gives no more threads: nobody waits for those that are missing, the others do their shares.
    }
  }

  int size() const { return int(shares_.size()); }

  // With `threads` of its members, the caller being one. False: the team is resting, do it alone.
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
  // state_: the job's number, whether workers may still join it, and how many are in it.
  static constexpr uint32_t INSIDE = 0xfff, OPEN = 0x1000, NUMBER_STEP = 0x2000;

  void work_forever(int index) {
    Worker& me = workers_[index];
    uint32_t last_job = 0;
    Fetch fetch(index + 1);
    for (;;) {
      uint32_t state = next_job(last_job, fetch);
      me.inside.store(true, std::memory_order_relaxed);
      // Only now the job is sure to stay; a failed exchange means that others joined, or that it is over.
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

  // The state of an open job that is not `last_job`.
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

  // Has a worker that we wait for used less than half of the time since note_cpu_times?
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
  std::exception_ptr error_;  // the first
  std::vector<Share> shares_;
  std::vector<Worker> workers_;
  Fetch fetch_{0};  // the caller's
  alignas(64) std::atomic<uint32_t> state_ = 0;
  microseconds rest_{};
  Clock::time_point rest_until_{};
};

std::mutex one_at_a_time;
Team* team = nullptr;  // grows to the largest number of threads that was asked for

// A forked child has none of its parent's threads.
void forget_team() {
  team = nullptr;
  new (&one_at_a_time) std::mutex;
}
const int forks_are_watched = pthread_atfork(nullptr, nullptr, forget_team);

thread_local bool own_threads = false;
thread_local int own_count = 0;  // 0: as many as torch's

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

// On torch's threads. What a chunk throws may not pass through torch's C functions.
static void share_out_with_torch(int64_t count, int64_t chunk, Chunk call, const void* body) {
  struct Job {
    const Chunk call;
    const void* const body;
    std::atomic<bool> failed = false;
    std::exception_ptr error;  // the first
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
