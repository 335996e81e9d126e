// Memory that grows on demand, aligned for huge pages, which the kernel is asked for.
#pragma once

#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace funitel {

inline int divide_up(int a, int b) { return (a + b - 1) / b; }

// Bytes of the second cache, which a core has alone.
inline size_t find_second_cache() {
    const long found = sysconf(_SC_LEVEL2_CACHE_SIZE);  // 0 where it is not known
    return found > 0 ? static_cast<size_t>(found) : size_t(1) << 20;
}

inline const size_t kSecondCacheBytes = find_second_cache();

class Memory {
  public:
    Memory() = default;
    Memory(Memory&& other) noexcept : start_(other.start_), size_(other.size_) { other.start_ = nullptr; }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { release(); }

    // Hold at least `size` bytes; what was held is lost when that means to move. New memory is zero.
    bool grow(size_t size) {
        if (size <= size_) return true;
        release();
        size_t unit = size >= kHuge ? kHuge : kSmall;
        size_t rounded = (size + kSlack + unit - 1) / unit * unit;
        char* start = unit == kHuge ? map_aligned(rounded) : map(rounded);
        if (start == nullptr) return false;
        if (unit == kHuge) {
            // The end, up to a huge page that would lie there mostly unused, is of small pages.
            size_t whole = (size + kSlack) / kHuge * kHuge;
            madvise(start, whole, MADV_HUGEPAGE);
            madvise(start + whole, rounded - whole, MADV_NOHUGEPAGE);
        }
        start_ = start;
        size_ = rounded - kSlack;
        return true;
    }

    size_t size() const { return size_; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(start_);
    }

  private:
    static constexpr size_t kHuge = size_t(2) << 20, kSmall = 4096;
    static constexpr size_t kSlack = 64;  // a vector may be read from the last element on

    static char* map(size_t size) {
        void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return start == MAP_FAILED ? nullptr : static_cast<char*>(start);
    }

    // Kernels before 6.7 place a mapping at any small page: a huge page more than is needed, less what lies around.
    static char* map_aligned(size_t size) {
        char* start = map(size + kHuge);
        if (start == nullptr) return nullptr;
        size_t before = (kHuge - reinterpret_cast<uintptr_t>(start) % kHuge) % kHuge;
        if (before > 0) munmap(start, before);
        if (before < kHuge) munmap(start + before + size, kHuge - before);
        return start + before;
    }

    void release() {
        if (start_ != nullptr) munmap(start_, size_ + kSlack);
        start_ = nullptr;
        size_ = 0;
    }

    char* start_ = nullptr;
    size_t size_ = 0;
};

// The weights of a step come from memory, and the processor's own prefetching stops at every page: ask for what is
// needed 3 KiB later.
inline void fetch(const void* source) {
    _mm_prefetch(static_cast<const char*>(source) + 3072, _MM_HINT_T0);
}

// Read a line of each 64 bytes, one after the other, so that all of them are on their way at once and the processor sees
// that they are neighbours: its own prefetching reads 25 GB/s, misses elsewhere 4 (two cores of an AMD EPYC, Zen 4).
inline void touch(const void* start, size_t size) {
    constexpr size_t line = 64;
    const char* from = static_cast<const char*>(start);
    for (size_t i = 0; i < size; i += line) {
        int ignored;
        asm volatile("movl %1, %0" : "=r"(ignored) : "m"(*reinterpret_cast<const int*>(from + i)));
    }
}

// Memory that is given out from its start on and never taken back. What is small shares its huge pages with its
// neighbours: by itself it would have none, and a processor that reads small pages waits for addresses at each.
class Arena {
  public:
    // Once, before anything is taken.
    bool reserve(size_t size) { return memory_.grow(size); }

    // Zeros; null where there is no more.
    uint8_t* take(size_t size) {
        size_t rounded = (size + kLine - 1) / kLine * kLine;
        if (rounded > memory_.size() - used_) return nullptr;
        uint8_t* start = memory_.as<uint8_t>() + used_;
        used_ += rounded;
        return start;
    }

  private:
    static constexpr size_t kLine = 64;

    Memory memory_;
    size_t used_ = 0;
};

}  // namespace funitel
