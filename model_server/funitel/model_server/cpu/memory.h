// Memory that grows on demand, aligned for huge pages, which the kernel is asked for.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace funitel {

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
        constexpr size_t huge = size_t(2) << 20, small = 4096;
        size_t unit = size >= huge ? huge : small;
        size_t rounded = (size + kSlack + unit - 1) / unit * unit;
        void* start = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) return false;
        if (unit == huge) {
            // The end, up to a huge page that would lie there mostly unused, is of small pages.
            size_t whole = (size + kSlack) / huge * huge;
            madvise(start, whole, MADV_HUGEPAGE);
            madvise(static_cast<char*>(start) + whole, rounded - whole, MADV_NOHUGEPAGE);
        }
        start_ = start;
        size_ = rounded - kSlack;
        return true;
    }

    size_t size() const { return size_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(start_);
    }

  private:
    static constexpr size_t kSlack = 64;  // a vector may be read from the last element on

    void release() {
        if (start_ != nullptr) munmap(start_, size_ + kSlack);
        start_ = nullptr;
        size_ = 0;
    }

    void* start_ = nullptr;
    size_t size_ = 0;
};

}  // namespace funitel
