// Ranks of one host that add up and hand out what they computed, in memory that all of them have mapped. No rank owns the
// exchange: every rank writes its part into a slot of its own, says so, waits for the others and reads theirs. Sums are
// taken in the order of the ranks, so every rank gets the same bits in any order of arrival.
//
// Slots are used in turns of two: a writer of turn n has seen every rank arrive at turn n - 1, so all have read n - 2.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <new>

#include "entry.h"
#include "vector.h"

namespace funitel {

class Ranks {
  public:
    static constexpr size_t kNoteBytes = 64;  // at the start, the caller's: it tells the memory from any other
    static constexpr size_t kSlotBytes = size_t(1) << 20;

    static size_t num_bytes(int size) { return first_slot(size) + 2 * size * kSlotBytes; }

    // Join as `rank` of `size` in the zeroed memory of `fd`, which is this object's from here on.
    Ranks(int fd, int rank, int size, int64_t timeout_ms) : fd_(fd), rank_(rank), size_(size), timeout_ms_(timeout_ms) {
        if (lock(F_SETLK, rank).l_type != F_WRLCK) return;
        void* start = mmap(nullptr, num_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (start != MAP_FAILED) start_ = static_cast<char*>(start);
    }

    ~Ranks() {
        if (start_ != nullptr) munmap(start_, num_bytes(size_));
        close(fd_);
    }

    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;

    bool is_open() const { return start_ != nullptr; }

    // The rank that did not come, after a call has returned false; -1 before. Nothing succeeds after that.
    int lost_rank() const { return lost_rank_; }

    // Add up `count` values over all ranks, in place. `for_pieces(n, function)` calls function(first, last) for ranges
    // that make up 0 .. n, on any threads.
    template <class ForPieces>
    bool sum(float* values, size_t count, ForPieces for_pieces) {
        constexpr size_t most = kSlotBytes / sizeof(float);
        for (size_t done = 0; done < count; done += most) {
            float* part = values + done;
            size_t n = std::min(most, count - done);
            float* mine = slot<float>(rank_);
            for_pieces(n, [=](size_t first, size_t last) {
                std::memcpy(mine + first, part + first, (last - first) * sizeof(float));
            });
            if (!meet()) return false;
            for_pieces(n, [=](size_t first, size_t last) { add_up(part, first, last); });
            turn_++;
        }
        return true;
    }

    // Give every rank the bytes of rank `source`.
    bool broadcast(char* data, size_t size, int source) {
        for (size_t done = 0; done < size; done += kSlotBytes) {
            size_t n = std::min(kSlotBytes, size - done);
            if (rank_ == source) std::memcpy(slot<char>(rank_), data + done, n);
            if (!meet()) return false;
            if (rank_ != source) std::memcpy(data + done, slot<char>(source), n);
            turn_++;
        }
        return true;
    }

    // Put the columns of all ranks side by side on rank 0: `part` is [num_rows, starts[rank + 1] - starts[rank]], `all`
    // is [num_rows, starts[size]] and null on other ranks.
    bool gather(const float* part, int num_rows, const int64_t* starts, float* all) {
        constexpr size_t most = kSlotBytes / sizeof(float);
        size_t widest = 0;
        for (int r = 0; r < size_; r++) widest = std::max<size_t>(widest, starts[r + 1] - starts[r]);
        size_t count = num_rows * size_t(starts[rank_ + 1] - starts[rank_]);
        for (size_t done = 0; done < num_rows * widest; done += most) {
            if (done < count) std::memcpy(slot<float>(rank_), part + done, std::min(most, count - done) * sizeof(float));
            if (!meet()) return false;
            for (int r = 0; r < size_ && all != nullptr; r++) {
                size_t width = starts[r + 1] - starts[r], end = std::min(num_rows * width, done + most);
                for (size_t i = done, n; i < end; i += n) {
                    n = std::min(width - i % width, end - i);
                    float* target = all + i / width * starts[size_] + starts[r] + i % width;
                    std::memcpy(target, slot<float>(r) + (i - done), n * sizeof(float));
                }
            }
            turn_++;
        }
        return true;
    }

  private:
    struct alignas(64) Seat {
        std::atomic<uint32_t> arrived;  // turns this rank has written
        std::atomic<uint32_t> num_asleep;
    };

    // Ranks on cores of their own arrive within microseconds of each other; a rank that shares a core must yield it soon.
    static constexpr uint64_t kSpinCycles = 40000;
    static constexpr int64_t kNapMs = 50;  // between looks at whether a rank still lives

    static size_t first_slot(int size) { return (kNoteBytes + size * sizeof(Seat) + 4095) / 4096 * 4096; }

    Seat& seat(int rank) const { return reinterpret_cast<Seat*>(start_ + kNoteBytes)[rank]; }

    template <class T>
    T* slot(int rank) const {
        return reinterpret_cast<T*>(start_ + first_slot(size_) + (2 * rank + turn_ % 2) * kSlotBytes);
    }

    void add_up(float* target, size_t first, size_t last) const {
        for (size_t i = first; i < last; i += kLanes) {
            int n = static_cast<int>(std::min<size_t>(kLanes, last - i));
            F16 total = load(slot<float>(0) + i, n);
            for (int r = 1; r < size_; r++) total = add(total, load(slot<float>(r) + i, n));
            store(target + i, total, n);
        }
    }

    // Say that the own slot is written, and wait until everyone's is.
    bool meet() {
        if (lost_rank_ >= 0) return false;
        Seat& mine = seat(rank_);
        mine.arrived.store(turn_ + 1, std::memory_order_seq_cst);
        if (mine.num_asleep.load(std::memory_order_seq_cst) > 0) futex(mine, FUTEX_WAKE, INT_MAX, nullptr);
        for (int r = 0; r < size_; r++) {
            if (!wait_for(r)) lost_rank_ = r;
            if (lost_rank_ >= 0) return false;
        }
        return true;
    }

    // Counters wrap, and no rank is ever ahead by more than one turn.
    bool has_arrived(int rank) const {
        return static_cast<int32_t>(seat(rank).arrived.load(std::memory_order_seq_cst) - (turn_ + 1)) >= 0;
    }

    bool wait_for(int rank) {
        for (uint64_t begin = __rdtsc(); !has_arrived(rank); _mm_pause()) {
            if (__rdtsc() - begin > kSpinCycles) return sleep_until_arrived(rank);
        }
        return true;
    }

    bool sleep_until_arrived(int rank) {
        Seat& other = seat(rank);
        const timespec nap = {0, kNapMs * 1000000};
        int64_t deadline = now_ms() + timeout_ms_;
        other.num_asleep.fetch_add(1, std::memory_order_seq_cst);
        while (!has_arrived(rank) && now_ms() < deadline) {
            long result = futex(other, FUTEX_WAIT, turn_, &nap);  // until it says more than the turn before
            if (result != 0 && errno == ETIMEDOUT && lock(F_GETLK, rank).l_type == F_UNLCK) break;
        }
        other.num_asleep.fetch_sub(1, std::memory_order_seq_cst);
        return has_arrived(rank);  // it may have come, and then ended
    }

    // Every rank holds a lock on the byte of its number, which the kernel lets go of when the process ends.
    struct flock lock(int command, int rank) const {
        struct flock lock = {};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = rank;
        lock.l_len = 1;
        if (fcntl(fd_, command, &lock) != 0) lock.l_type = F_RDLCK;  // not known
        return lock;
    }

    static long futex(Seat& seat, int operation, uint32_t value, const timespec* timeout) {
        return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&seat.arrived), operation, value, timeout, nullptr, 0);
    }

    static int64_t now_ms() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * int64_t(1000) + now.tv_nsec / 1000000;
    }

    int fd_, rank_, size_;
    int64_t timeout_ms_;
    char* start_ = nullptr;
    uint32_t turn_ = 0;
    int lost_rank_ = -1;
};

}  // namespace funitel

// The C interface; `ranks.py` says the same in ctypes.
extern "C" {

int64_t ENTRY(funitel_ranks_bytes)(int32_t size) { return funitel::Ranks::num_bytes(size); }

// Join the ranks in `fd`, which is closed with them, or at once when this returns null: it cannot be.
funitel::Ranks* ENTRY(funitel_ranks)(int32_t fd, int32_t rank, int32_t size, int64_t timeout_ms) {
    auto* ranks = new (std::nothrow) funitel::Ranks(fd, rank, size, timeout_ms);
    if (ranks == nullptr || ranks->is_open()) return ranks;
    delete ranks;
    return nullptr;
}

void ENTRY(funitel_ranks_release)(funitel::Ranks* ranks) { delete ranks; }

int32_t ENTRY(funitel_ranks_lost_rank)(const funitel::Ranks* ranks) { return ranks->lost_rank(); }

// These return whether all ranks came.

int32_t ENTRY(funitel_ranks_sum)(funitel::Ranks* ranks, float* values, int64_t count) {
    return ranks->sum(values, count, [](size_t n, auto work) { work(0, n); });
}

int32_t ENTRY(funitel_ranks_broadcast)(funitel::Ranks* ranks, char* data, int64_t size, int32_t source) {
    return ranks->broadcast(data, size, source);
}

int32_t ENTRY(funitel_ranks_gather)(funitel::Ranks* ranks, const float* part, int32_t num_rows, const int64_t* starts,
                                    float* all) {
    return ranks->gather(part, num_rows, starts, all);
}

}  // extern "C"
