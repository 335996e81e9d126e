// Weights that lie too far from the others of their blocks: of some inputs of an output, the weight less what its block
// stands for, as float16. They are few, and are multiplied by the activations themselves, not by their levels.
//
// Those of a pair of panels lie together in the order of their inputs, so that no branch depends on how many an output
// has. An output adds its own up in this order, and a row's result does not depend on what shares the batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

#include "blocks.h"
#include "memory.h"
#include "vector.h"

namespace funitel {

class Outliers {
  public:
    bool empty() const { return data_ == nullptr; }
    size_t num_bytes() const { return empty() ? 0 : starts_.back() * kBytesEach + starts_.size() * sizeof(uint32_t); }

    // Take those of the output at a place, 16 a panel, ascending by their inputs; each place once. `finish` follows.
    void take(int place, int count, const uint16_t* inputs, const uint16_t* deltas) {
        for (int i = 0; i < count; i++) taken_.push_back({place, inputs[i], {deltas[i]}});
    }

    // Put them in order, for so many pairs of panels, in memory of `arena`, or where that is full in some of their own.
    bool finish(int num_pairs, Arena& arena) {
        if (taken_.empty()) return true;
        data_ = arena.take(taken_.size() * kBytesEach);
        if (data_ == nullptr && own_.grow(taken_.size() * kBytesEach)) data_ = own_.as<uint8_t>();
        if (data_ == nullptr) return false;
        std::sort(taken_.begin(), taken_.end(), [](const Taken& a, const Taken& b) {
            return std::make_tuple(pair_of(a), a.input, a.place) < std::make_tuple(pair_of(b), b.input, b.place);
        });
        starts_.assign(num_pairs + 1, 0);
        for (const Taken& each : taken_) starts_[pair_of(each) + 1]++;
        std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
        for (int pair = 0; pair < num_pairs; pair++) {
            const Pair to = of(pair);
            for (int i = 0; i < to.count; i++) {
                const Taken& from = taken_[starts_[pair] + i];
                to.deltas[i] = from.delta;
                to.inputs[i] = from.input;
                to.lanes[i] = static_cast<uint8_t>(from.place % kBoth);
            }
        }
        taken_ = {};
        return true;
    }

    // target[input] += factor x delta, of the output at a place.
    void add_to(int place, float factor, float* target) const {
        if (empty()) return;
        const Pair from = of(place / kBoth);
        for (int i = 0; i < from.count; i++) {
            if (from.lanes[i] == place % kBoth) target[from.inputs[i]] += to_float(from.deltas[i]) * factor;
        }
    }

    // sums[row][panel of the pair] = what they add to the products of `count` rows x, [input][row]. What lies at `next`
    // is fetched meanwhile: memory has nothing else to do.
    void multiply(int pair, const float* x, int count, float (*sums)[kPair][kLanes], const uint8_t* next) const {
        const Pair from = of(pair);
        if (count == 1) {
            float* totals = sums[0][0];
            std::fill_n(totals, kBoth, 0.0f);
            for (int i = 0; i < from.count; i += kLanes) {
                for (int line = 0; line < kLinesEach; line++, next += kLine) fetch(next);
                const int later = from.count + i;  // of the next pair
                _mm_prefetch(reinterpret_cast<const char*>(from.deltas + later), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(from.inputs + later), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(from.lanes + later), _MM_HINT_T0);
                multiply_one(from, i, x, totals);
            }
            return;
        }
        // What is read past the rows is not used.
        alignas(64) float totals[kBoth][kLanes] = {};
        for (int i = 0; i < from.count; i++) {
            float* total = totals[from.lanes[i]];
            const F16 values = load(x + size_t(from.inputs[i]) * count);
            store(total, fma(splat(to_float(from.deltas[i])), values, load(total)));
        }
        for (int row = 0; row < count; row++) {
            float* both = &sums[row][0][0];
            for (int lane = 0; lane < kBoth; lane++) both[lane] = totals[lane][row];
        }
    }

  private:
    struct Taken {
        int place;
        uint16_t input;
        Half delta;
    };
    // Those of a pair of panels; those of the next one follow.
    struct Pair {
        int count;
        Half* deltas;
        uint16_t* inputs;
        uint8_t* lanes;
    };

    static constexpr int kBoth = kPair * kLanes;
    static constexpr size_t kBytesEach = sizeof(Half) + sizeof(uint16_t) + sizeof(uint8_t);
    static constexpr int kLinesEach = 4, kLine = 64;

    static int pair_of(const Taken& taken) { return taken.place / kBoth; }

    Pair of(int pair) const {
        const size_t first = starts_[pair], all = starts_.back();
        Half* deltas = reinterpret_cast<Half*>(data_);
        uint16_t* inputs = reinterpret_cast<uint16_t*>(deltas + all);
        uint8_t* lanes = reinterpret_cast<uint8_t*>(inputs + all);
        return {static_cast<int>(starts_[pair + 1] - first), deltas + first, inputs + first, lanes + first};
    }

    // Add sixteen from the first on, or as many as there are.
    static void multiply_one(const Pair& from, int first, const float* x, float* totals) {
        const int count = std::min(kLanes, from.count - first);
        alignas(64) float deltas[kLanes];
        store(deltas, load(from.deltas + first, count));
        const uint16_t* inputs = from.inputs + first;
        const uint8_t* lanes = from.lanes + first;
        if (count == kLanes) {
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; i++) totals[lanes[i]] = std::fma(deltas[i], x[inputs[i]], totals[lanes[i]]);
            return;
        }
        for (int i = 0; i < count; i++) totals[lanes[i]] = std::fma(deltas[i], x[inputs[i]], totals[lanes[i]]);
    }

    uint8_t* data_ = nullptr;
    std::vector<uint32_t> starts_;  // of each pair's among all, and the end
    std::vector<Taken> taken_;      // until they are in order
    Memory own_;
};

}  // namespace funitel
