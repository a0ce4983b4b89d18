// Threads that help with the tasks of a call, and wait for the next call awake for a moment.
//
// A step makes hundreds of calls with microseconds between them. Waking a sleeping thread takes longer than many of them,
// so a helper looks for work for a while before it sleeps; it gives way meanwhile to whoever else wants its core.
//
// Threads are those of POSIX: the C++ headers for them take a compiler half a second in each file that includes this.

#ifndef QUIRE_CREW_H_
#define QUIRE_CREW_H_

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/sysinfo.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace quire {

class Crew {
 public:
  // One for the process, which never ends: libraries are not unloaded, and its threads hold nothing.
  static Crew& instance() {
    static Crew* crew = new Crew(processors() - 1);
    return *crew;
  }

  // Threads that a call can have, with the one that makes it.
  int64_t size() const { return helpers_ + 1; }

  // Calls work(i) for every i below `tasks`, on this thread and on helpers that are free. Nobody waits for a helper that
  // has not begun; while others use the crew, this thread does all of it.
  template <typename Work>
  void run(int64_t tasks, const Work& work) {
    const Turn turn(&busy_);
    if (tasks < 2 || helpers_ == 0 || !turn.is_ours || !all_left()) {
      for (int64_t i = 0; i < tasks; ++i) work(i);
      return;
    }
    // Nobody is inside and the crew is closed, so the fields are this thread's to write.
    call_ = [](const void* context, int64_t i) { (*static_cast<const Work*>(context))(i); };
    context_ = &work;
    tasks_ = tasks;
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    open_.store(true);
    calls_.fetch_add(1);
    if (asleep_.load() > 0) {
      pthread_mutex_lock(&sleep_);
      pthread_cond_broadcast(&wake_);
      pthread_mutex_unlock(&sleep_);
    }
    take_tasks();
    for (int64_t turns = 0; done_.load(std::memory_order_acquire) < tasks; ++turns) {
      if (turns < kBusyTurns) pause();
      else sched_yield();
    }
    open_.store(false);
  }

 private:
  static constexpr int64_t kBusyTurns = 2000;
  static constexpr int64_t kAwakeNanoseconds = 200'000;

  // The lock, where it is free.
  struct Turn {
    explicit Turn(pthread_mutex_t* lock) : lock(lock), is_ours(pthread_mutex_trylock(lock) == 0) {}
    ~Turn() {
      if (is_ours) pthread_mutex_unlock(lock);
    }
    pthread_mutex_t* const lock;
    const bool is_ours;
  };

  explicit Crew(int helpers) : helpers_(helpers < 0 ? 0 : helpers) {
    for (int i = 0; i < helpers_; ++i) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, begin, this) != 0) return;  // calls do without it and those after it
      pthread_setname_np(thread, "quire-crew");
      pthread_detach(thread);
    }
  }

  // Those that this thread may run on, or the share of them that NPROC names, which XLA's own threads follow as well.
  static int processors() {
    const char* share = getenv("NPROC");
    const int given = share == nullptr ? 0 : atoi(share);
    if (given > 0) return given;
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : get_nprocs();
  }

  static void* begin(void* crew) {
    static_cast<Crew*>(crew)->help();
    return nullptr;
  }

  static int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  }

  static void pause() {
#if defined(__aarch64__)
    asm volatile("yield");
#elif defined(__x86_64__)
    asm volatile("pause");
#endif
  }

  // Whether every helper is done with the call before this one; one that lost its core may take long over it.
  bool all_left() const {
    for (int64_t turns = 0; inside_.load() != 0; ++turns) {
      if (turns == kBusyTurns) return false;
      pause();
    }
    return true;
  }

  void take_tasks() {
    int64_t taken = 0;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_; ++taken) call_(context_, i);
    if (taken > 0) done_.fetch_add(taken, std::memory_order_release);
  }

  void help() {
    uint64_t seen = 0;
    for (;;) {
      seen = wait_for_call(seen);
      // What this thread reads after entering stays as it is: the fields are written only when nobody is inside.
      inside_.fetch_add(1);
      if (open_.load()) take_tasks();
      inside_.fetch_sub(1);
    }
  }

  // The number of calls there have been, once it is not `seen` any more.
  uint64_t wait_for_call(uint64_t seen) {
    const int64_t begun = nanoseconds();
    for (int64_t turns = 1;; ++turns) {
      const uint64_t calls = calls_.load();
      if (calls != seen) return calls;
      if (turns % 64) {
        pause();
        continue;
      }
      sched_yield();
      if (nanoseconds() - begun > kAwakeNanoseconds) break;
    }
    pthread_mutex_lock(&sleep_);
    asleep_.fetch_add(1);
    while (calls_.load() == seen) pthread_cond_wait(&wake_, &sleep_);
    asleep_.fetch_sub(1);
    pthread_mutex_unlock(&sleep_);
    return calls_.load();
  }

  const int helpers_;
  pthread_mutex_t busy_ = PTHREAD_MUTEX_INITIALIZER, sleep_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
  std::atomic<uint64_t> calls_{0};
  std::atomic<int> asleep_{0}, inside_{0};
  std::atomic<bool> open_{false};
  std::atomic<int64_t> next_{0}, done_{0};
  int64_t tasks_ = 0;
  const void* context_ = nullptr;
  void (*call_)(const void*, int64_t) = nullptr;
};

}  // namespace quire

#endif  // QUIRE_CREW_H_
