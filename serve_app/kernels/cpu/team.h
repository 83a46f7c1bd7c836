// A team of threads that stays awake for one whole forward pass: waking threads per operator costs more than many a
// decode operator takes.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Memory that will be needed next, fetched into the second-level cache a little at a time while there is nothing to do.
class Fetch {
public:
    Fetch() = default;
    Fetch(const void* begin, int64_t bytes) : at_((const char*)begin), end_(at_ + bytes) {}

    // False when all is fetched.
    bool some() {
        if (at_ >= end_) return false;
        for (int i = 0; i < 4; i++, at_ += 64) __builtin_prefetch(at_, 0, 2);
        return true;
    }

private:
    const char *at_ = nullptr, *end_ = nullptr;
};

class Team {
public:
    explicit Team(int size) : size(size) {}

    // Returns when all have called it. Neighbours mostly arrive within microseconds; on a crowded machine one of them may
    // have lost its core, and then spinning would keep others from it.
    void wait(Fetch fetch = {}) {
        const int phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1);
            if (sleepers_.load() > 0) wake();
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
            if (fetch.some()) continue;
            if (spins < PAUSES)
                pause();
            else if (spins < PAUSES + YIELDS)
                sched_yield();
            else
                sleep(phase);
        }
    }

    // Thread `thread`'s even share [low, high) of `count`.
    static int64_t share(int64_t count, int thread, int threads) { return count * thread / threads; }

    const int size;

private:
    static constexpr int PAUSES = 3000, YIELDS = 20;

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

#if defined(__linux__)
    void sleep(int phase) {
        sleepers_++;
        syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
        sleepers_--;
    }
    void wake() { syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, size, nullptr, nullptr, 0); }
#else
    void sleep(int) { sched_yield(); }
    void wake() {}
#endif

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
    std::atomic<int> sleepers_{0};
};

// One thread of a team.
struct Member {
    Team& team;
    int thread;

    // `work` for each row of this thread's even share.
    template <class Work>
    void rows(int64_t count, Work work) const {
        const int64_t end = Team::share(count, thread + 1, team.size);
        for (int64_t r = Team::share(count, thread, team.size); r < end; r++) work(r);
    }
};

}  // namespace
