// Fetches the weights of the next product into the caches of the threads that will read them first, while these wait for
// the end of a phase or for the next one: memory has nothing else to do then.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "matrix.h"

namespace funitel {

class Ahead {
  public:
    // While no thread calls `step`.
    void make_room(int num_threads) { places_ = std::vector<Place>(num_threads); }

    // The matrix of the next product; null when none is known.
    void aim(const Matrix* matrix) { next_.store(matrix, std::memory_order_release); }

    // Fetch a few lines for a thread. Returns false when it has fetched what it should.
    bool step(int thread) {
        Place& place = places_[thread];
        const Matrix* matrix = next_.load(std::memory_order_acquire);
        if (matrix != place.matrix) place = begin(matrix, thread);
        if (place.at == place.end) return false;
        for (int i = 0; i < kLinesEach && place.at != place.end; i++, place.at += kLine) {
            _mm_prefetch(reinterpret_cast<const char*>(place.at), _MM_HINT_T1);
        }
        return true;
    }

  private:
    struct alignas(64) Place {
        const Matrix* matrix = nullptr;
        const uint8_t* at = nullptr;
        const uint8_t* end = nullptr;
    };

    static constexpr int kLinesEach = 8, kLine = 64;
    // A quarter of the smallest second cache of processors with AVX2.
    static constexpr size_t kMostBytes = size_t(64) << 10;

    // Where the thread's range of pairs begins, as `Threads` gives it out.
    Place begin(const Matrix* matrix, int thread) const {
        if (matrix == nullptr) return {};
        int num_pairs = matrix->num_pairs(), num_threads = static_cast<int>(places_.size());
        int first = num_pairs * thread / num_threads, last = num_pairs * (thread + 1) / num_threads;
        const uint8_t* start = matrix->data + matrix->pair_bytes * first;
        size_t size = std::min(matrix->pair_bytes * (last - first), kMostBytes);
        return {matrix, start, start + size / kLine * kLine};
    }

    std::atomic<const Matrix*> next_{nullptr};
    std::vector<Place> places_;
};

}  // namespace funitel
