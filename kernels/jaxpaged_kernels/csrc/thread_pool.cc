#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxpaged {
namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How the calling thread treats subnormal numbers: XLA's threads flush them to zero, and a result must not depend on which
// thread has computed it.
uint64_t floating_point_mode() {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#else
  return 0;
#endif
}
void set_floating_point_mode([[maybe_unused]] uint64_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

// Whole processors' worth of time that a container may use, 0 = as many as there are.
int quota() {
  long long limit = 0, period = 0;
  if (std::FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    if (std::fscanf(file, "%lld %lld", &limit, &period) != 2) limit = 0;  // "max": no limit
    std::fclose(file);
  }
  return period > 0 ? static_cast<int>((limit + period - 1) / period) : 0;
}

int usable_processors() {
  int processors = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) processors = CPU_COUNT(&set);
#endif
  if (const int most = quota(); most > 0) processors = std::min(processors, most);
  return std::max(1, processors);
}

// The kernels of a step follow each other within microseconds, and waking a thread takes longer than that: a worker looks
// out for the next call for this long before it sleeps.
constexpr auto kSpin = std::chrono::microseconds(50);

class Pool {
 public:
  // Where the system refuses some of the threads, the pool works with those that there are.
  explicit Pool(int num_workers) {
    try {
      for (; num_workers_ < num_workers; ++num_workers_) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  int num_threads() const { return num_workers_ + 1; }

  void run(int64_t num_tasks, Task task, void* context) {
    std::unique_lock lock(calls_, std::try_to_lock);
    if (!lock.owns_lock() || num_workers_ == 0 || num_tasks < 2) {
      for (int64_t i = 0; i < num_tasks; ++i) task(context, i);
      return;
    }
    task_ = task;
    context_ = context;
    num_tasks_ = num_tasks;
    mode_ = floating_point_mode();
    next_.store(0, std::memory_order_relaxed);
    // From here on workers may join.
    generation_ += kGeneration;
    state_.store(generation_ | kOpen, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) state_.notify_all();
    do_tasks();
    // Whoever has not joined by now is not waited for: a thread without a processor must not hold up a call.
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; (state_.load(std::memory_order_acquire) & kJoined) != 0; ++spins) {
      if (spins < 4096) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
    if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  // state_: generation | is open | number of workers that have joined
  static constexpr uint64_t kJoined = 0xffff;
  static constexpr uint64_t kOpen = 0x10000;
  static constexpr uint64_t kGeneration = 0x20000;

  // What a task throws (it is out of memory) is thrown again by `run`, when nobody works on the call any more.
  void do_tasks() {
    try {
      for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) task_(context_, i);
    } catch (...) {
      next_.store(num_tasks_, std::memory_order_relaxed);
      const std::lock_guard lock(failures_);
      failure_ = std::current_exception();
    }
  }

  void work() {
    uint64_t done = 0;  // generation that this worker has worked on last
    for (;;) {
      uint64_t state = wait_for_call(done);
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      done = state & ~(kJoined | kOpen);
      set_floating_point_mode(mode_);
      do_tasks();
      state_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  // The state of an open call that is not of generation `done`.
  uint64_t wait_for_call(uint64_t done) {
    auto is_new = [&](uint64_t state) { return (state & kOpen) != 0 && (state & ~(kJoined | kOpen)) != done; };
    for (;;) {
      const auto start = std::chrono::steady_clock::now();
      do {
        for (int i = 0; i < 64; ++i) {
          const uint64_t state = state_.load(std::memory_order_acquire);
          if (is_new(state)) return state;
          pause();
        }
      } while (std::chrono::steady_clock::now() - start < kSpin);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      const uint64_t state = state_.load(std::memory_order_seq_cst);
      if (!is_new(state)) state_.wait(state, std::memory_order_acquire);
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  int num_workers_ = 0;
  std::mutex calls_, failures_;
  std::exception_ptr failure_;
  uint64_t generation_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  uint64_t mode_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> sleeping_{0};
};

// Never destroyed: its threads live as long as the process.
Pool& pool() {
  static Pool* const pool = new Pool(usable_processors() - 1);
  return *pool;
}

}  // namespace

void parallel_for(int64_t num_tasks, Task task, void* context) { pool().run(num_tasks, task, context); }

int num_threads() { return pool().num_threads(); }

}  // namespace jaxpaged
