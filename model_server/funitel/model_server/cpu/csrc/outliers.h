// Weights that lie too far from the others of their blocks: of some inputs of an output, the weight less what its block
// stands for, as float16. They are few, and are multiplied by the activations themselves, not by their levels.
//
// An output adds its outliers up in the order of their inputs, so that a row's result does not depend on what shares the
// batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "blocks.h"
#include "memory.h"
#include "vector.h"

namespace funitel {

struct Outlier {
    uint16_t input;
    Half delta;
};

// Those of a matrix, by the places of its outputs: 16 a panel.
class Outliers {
  public:
    bool empty() const { return entries_.empty(); }
    size_t num_bytes() const { return entries_.size() * sizeof(Outlier) + starts_.size() * sizeof(uint32_t); }

    // Take those of the output at a place, ascending by their inputs; each place once. `finish` follows the last.
    void take(int place, int count, const uint16_t* inputs, const uint16_t* deltas) {
        pieces_.push_back({place, static_cast<uint32_t>(entries_.size()), static_cast<uint32_t>(count)});
        for (int i = 0; i < count; i++) entries_.push_back({inputs[i], {deltas[i]}});
    }

    // Put them in the order of so many places.
    void finish(int num_places) {
        starts_.assign(num_places + 1, 0);
        for (const Piece& piece : pieces_) starts_[piece.place + 1] = piece.count;
        for (int i = 0; i < num_places; i++) starts_[i + 1] += starts_[i];
        std::vector<Outlier> ordered(entries_.size());
        for (const Piece& piece : pieces_) {
            std::copy_n(entries_.begin() + piece.first, piece.count, ordered.begin() + starts_[piece.place]);
        }
        entries_ = std::move(ordered);
        if (entries_.empty()) starts_ = {};
        pieces_ = {};
    }

    // target[input] += factor x delta, of the output at a place.
    void add_to(int place, float factor, float* target) const {
        if (empty()) return;
        for (uint32_t i = starts_[place]; i < starts_[place + 1]; i++) {
            target[entries_[i].input] += to_float(entries_[i].delta) * factor;
        }
    }

    // sums[row][panel of the pair] = what they add to the products of `count` rows x, [input][row].
    void multiply(int pair, const float* x, int count, float (*sums)[kPair][kLanes]) const {
        const uint32_t* starts = starts_.data() + size_t(pair) * kPair * kLanes;
        for (int place = 0; place < kPair * kLanes; place++) {
            const Outlier *first = entries_.data() + starts[place], *last = entries_.data() + starts[place + 1];
            const int panel = place / kLanes, lane = place % kLanes;
            if (count == 1) {
                float total = 0.0f;
                for (; first != last; first++) total = std::fma(to_float(first->delta), x[first->input], total);
                sums[0][panel][lane] = total;
                continue;
            }
            // What is read past the rows is not used.
            F16 totals = splat(0.0f);
            for (; first != last; first++) {
                totals = fma(splat(to_float(first->delta)), load(x + size_t(first->input) * count), totals);
            }
            float each[kLanes];
            store(each, totals);
            for (int row = 0; row < count; row++) sums[row][panel][lane] = each[row];
        }
    }

  private:
    struct Piece {
        int place;
        uint32_t first, count;
    };

    std::vector<Outlier> entries_;
    std::vector<uint32_t> starts_;  // of each place among them, and the end
    std::vector<Piece> pieces_;     // until they are in order
};

}  // namespace funitel
