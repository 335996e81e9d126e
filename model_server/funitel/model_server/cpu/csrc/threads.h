// Threads that claim chunks. One thread leads and walks through the phases of a step; helpers join in. Each begins with a
// range of chunks of its own, so that it reads memory in one stream and claims without asking the others, and then takes
// what is left of their ranges. A phase is over when its chunks are done, not when every thread has arrived: a helper that
// the system has put aside holds up at most the chunk it claimed. Waiting is a short spin and then a futex, so an idle
// engine takes no processor time.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <vector>

// Version 2.34 of glibc gave these functions new versions and kept the old ones. A library that asks for the old ones loads
// with older versions of glibc too.
#if defined(__GLIBC__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join,pthread_join@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask,pthread_sigmask@GLIBC_2.2.5");
#endif

namespace funitel {

// Ticks of the counter that `__rdtsc` reads.
inline uint64_t ticks_per_microsecond() {
    static const uint64_t ticks = [] {
        using Clock = std::chrono::steady_clock;
        constexpr auto span = std::chrono::microseconds(200);
        uint64_t first = __rdtsc();
        auto begin = Clock::now();
        while (Clock::now() - begin < span) _mm_pause();
        auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
        return (__rdtsc() - first) * 1000 / static_cast<uint64_t>(passed);
    }();
    return ticks;
}

class Threads {
  public:
    using Work = void (*)(void* job, int chunk, int thread);
    // What a thread does again and again while it waits, a little each time. Returns whether there was something to do.
    using Pastime = bool (*)(void* job, int thread);

    // Long enough to bridge the phases of one row of a small model, short enough to leave the core to others.
    static constexpr int kSpinMicroseconds = 15;

    explicit Threads(int num_threads, Pastime pastime = nullptr, void* pastime_job = nullptr)
        : pastime_(pastime), pastime_job_(pastime_job) {
        set(num_threads, kSpinMicroseconds);
    }

    ~Threads() { stop(); }

    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return static_cast<int>(helpers_.size()) + 1; }

    // Go on with so many threads, the leader included, that spin so long before they sleep. Between two phases.
    void set(int num_threads, int spin_microseconds) {
        stop();
        owner_ = getpid();
        spin_ticks_ = ticks_per_microsecond() * static_cast<uint64_t>(spin_microseconds);
        int num_helpers = num_threads > 1 ? num_threads - 1 : 0;
        ranges_ = std::vector<Range>(num_helpers + 1);
        arguments_.resize(num_helpers);
        for (int i = 0; i < num_helpers; i++) {
            arguments_[i] = {this, i + 1, serial_.load()};
            pthread_t helper;
            if (start(&helper, &arguments_[i]) != 0) break;  // fewer helpers: slower, not wrong
            helpers_.push_back(helper);
        }
    }

    // Do chunks 0 .. num_chunks - 1 of a job, in any order and on any thread, and return when all are done.
    void run(Work work, void* job, int num_chunks) {
        bool is_alone = helpers_.empty() || num_chunks < 2 || getpid_cached() != owner_;
        while (num_chunks > 0) {
            int part = num_chunks < kMaxChunks ? num_chunks : kMaxChunks;
            if (is_alone || part < 2) {
                if (pastime_ != nullptr) pastime_(pastime_job_, 0);  // the leader alone has no other time for it
                for (int i = 0; i < part; i++) work(job, base_ + i, 0);
            } else {
                share(work, job, part);
            }
            base_ += part;
            num_chunks -= part;
        }
        base_ = 0;
    }

    // Call when a step begins, on the thread that leads it: notices that this process is a forked child.
    void begin_step() { pid_ = getpid(); }

  private:
    // (serial of the phase: 48 bits, chunks claimed: 16). Alone in its cache line.
    struct alignas(64) Range {
        std::atomic<uint64_t> claimed{0};
    };

    struct Argument {
        Threads* threads;
        int index;
        uint32_t serial;  // of the last phase before it
    };

    static constexpr int kCountBits = 16, kMaxChunks = (1 << kCountBits) - 1;

    static int start(pthread_t* helper, Argument* argument) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the host program
        int error = pthread_create(helper, nullptr, &Threads::help, argument);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return error;
    }

    void stop() {
        if (getpid() == owner_ && !helpers_.empty()) {  // a forked child has the object but none of the threads
            is_over_.store(true);
            serial_.fetch_add(1);
            futex(&serial_, FUTEX_WAKE_PRIVATE, INT_MAX);
            for (pthread_t helper : helpers_) pthread_join(helper, nullptr);
            is_over_.store(false);
        }
        helpers_.clear();
    }

    static long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
        return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
    }

    pid_t getpid_cached() const { return pid_; }

    void pass_time(int thread) {
        if (pastime_ == nullptr || !pastime_(pastime_job_, thread)) _mm_pause();
    }

    void share(Work work, void* job, int num_chunks) {
        work_ = work;
        job_ = job;
        done_.store(0, std::memory_order_relaxed);
        uint64_t phase = ((phase_.load(std::memory_order_relaxed) >> kCountBits) + 1) << kCountBits | num_chunks;
        phase_.store(phase, std::memory_order_release);
        serial_.fetch_add(1, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) > 0) futex(&serial_, FUTEX_WAKE_PRIVATE, INT_MAX);
        take_part(phase, 0);
        uint32_t total = static_cast<uint32_t>(num_chunks);
        for (uint64_t begin = __rdtsc(); done_.load(std::memory_order_acquire) != total;) {
            pass_time(0);
            if (__rdtsc() - begin > spin_ticks_) return sleep_until_done(total);
        }
    }

    void sleep_until_done(uint32_t total) {
        leader_sleeps_.store(true, std::memory_order_seq_cst);
        for (uint32_t done; (done = done_.load(std::memory_order_seq_cst)) != total;) {
            futex(&done_, FUTEX_WAIT_PRIVATE, done);
        }
        leader_sleeps_.store(false, std::memory_order_seq_cst);
    }

    // Do what is left of a phase, this thread's range first.
    void take_part(uint64_t phase, int thread) {
        uint32_t done = 0;
        int all = static_cast<int>(ranges_.size());
        for (int i = 0; i < all; i++) {
            int range = (thread + i) % all;
            for (int chunk; (chunk = claim(phase, range, all)) >= 0; done++) work_(job_, base_ + chunk, thread);
        }
        if (done == 0) return;
        done_.fetch_add(done, std::memory_order_seq_cst);
        if (thread != 0 && leader_sleeps_.load(std::memory_order_seq_cst)) futex(&done_, FUTEX_WAKE_PRIVATE, 1);
    }

    // The next chunk of a range, or -1. A phase cannot end before all its chunks are claimed: one that has ended finds
    // each range at its end or in a later phase, so a thread that comes late claims nothing.
    int claim(uint64_t phase, int range, int num_ranges) {
        uint64_t serial = phase >> kCountBits;
        int num_chunks = static_cast<int>(phase & kMaxChunks);
        int first = num_chunks * range / num_ranges, end = num_chunks * (range + 1) / num_ranges;
        std::atomic<uint64_t>& claimed = ranges_[range].claimed;
        for (uint64_t before = claimed.load(std::memory_order_acquire); before >> kCountBits <= serial;) {
            int next = first + (before >> kCountBits == serial ? static_cast<int>(before & kMaxChunks) : 0);
            if (next >= end) return -1;
            uint64_t after = serial << kCountBits | (next + 1 - first);
            if (claimed.compare_exchange_weak(before, after, std::memory_order_acq_rel)) return next;
        }
        return -1;
    }

    static void* help(void* argument) {
        Argument* mine = static_cast<Argument*>(argument);
        mine->threads->help_until_over(mine->index, mine->serial);
        return nullptr;
    }

    void help_until_over(int thread, uint32_t seen) {
        for (seen = wait_for_change(seen, thread); !is_over_.load(std::memory_order_acquire);
             seen = wait_for_change(seen, thread)) {
            take_part(phase_.load(std::memory_order_acquire), thread);
        }
    }

    uint32_t wait_for_change(uint32_t seen, int thread) {
        uint32_t serial;
        for (uint64_t begin = __rdtsc(); (serial = serial_.load(std::memory_order_acquire)) == seen;) {
            pass_time(thread);
            if (__rdtsc() - begin <= spin_ticks_) continue;
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            while ((serial = serial_.load(std::memory_order_seq_cst)) == seen) {
                futex(&serial_, FUTEX_WAIT_PRIVATE, seen);
            }
            num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
            return serial;
        }
        return serial;
    }

    const Pastime pastime_;
    void* const pastime_job_;
    pid_t owner_ = 0;
    pid_t pid_ = 0;
    uint64_t spin_ticks_ = 0;
    std::vector<Argument> arguments_;
    std::vector<pthread_t> helpers_;
    Work work_ = nullptr;
    void* job_ = nullptr;
    int base_ = 0;
    std::vector<Range> ranges_;
    alignas(64) std::atomic<uint64_t> phase_{0};  // (serial: 48 bits, chunks: 16)
    std::atomic<uint32_t> serial_{0};             // what helpers wait for
    std::atomic<uint32_t> num_asleep_{0};
    std::atomic<bool> is_over_{false};
    alignas(64) std::atomic<uint32_t> done_{0};
    std::atomic<bool> leader_sleeps_{false};
};

// Call `function(chunk, thread)` for every chunk of a phase.
template <class Function>
void for_each(Threads& threads, int num_chunks, Function function) {
    threads.run([](void* job, int chunk, int thread) { (*static_cast<Function*>(job))(chunk, thread); }, &function,
                num_chunks);
}

}  // namespace funitel
