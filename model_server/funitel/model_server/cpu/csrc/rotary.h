// Rotary positions: pairs of a head's leading elements turn by angles that grow with the position, or with one of the
// three positions that tokens of images have.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "vector.h"

namespace funitel {

// One kind of rotary positions; the layers of a model may have several.
struct Turn {
    std::vector<float> frequencies;  // of each pair
    float amplitude;                 // multiplies cosines and sines
    bool is_interleaved;             // pairs are neighbours, instead of i and i + number of pairs
    std::vector<int32_t> axes;       // whose position each pair turns by; empty: all by that of axis 0
    int first;                       // where its angles begin among those of a token

    int num_pairs() const { return static_cast<int>(frequencies.size()); }
    int num_angles() const { return 2 * num_pairs(); }

    // The cosines of a position's angles, then the sines.
    void fill(int position, float* angles) const {
        fill_by(angles, [position](int) { return position; });
    }

    // The same of a token with a position on each axis, `stride` apart.
    void fill(const int32_t* positions, size_t stride, float* angles) const {
        fill_by(angles, [&](int pair) { return positions[axes.empty() ? 0 : axes[pair] * stride]; });
    }

    // Turn a head and scale it, with what does not turn.
    void rotate(float* head, const float* angles, int head_dim, float scale) const {
        const float *cosines = angles, *sines = angles + num_pairs();
        if (is_interleaved) {
            rotate_neighbours(head, cosines, sines, scale);
        } else {
            rotate_halves(head, cosines, sines, scale);
        }
        for (int i = num_angles(); i < head_dim; i++) head[i] *= scale;
    }

  private:
    template <class PositionOf>
    void fill_by(float* angles, PositionOf position_of) const {
        for (int i = 0; i < num_pairs(); i++) {
            float angle = static_cast<float>(position_of(i)) * frequencies[i];
            angles[i] = std::cos(angle) * amplitude;
            angles[num_pairs() + i] = std::sin(angle) * amplitude;
        }
    }

    void rotate_halves(float* head, const float* cosines, const float* sines, float scale) const {
        int half = num_pairs();
        F16 factor = splat(scale);
        for (int i = 0; i < half; i += kLanes) {
            int n = half - i;
            F16 c = load(cosines + i, n), s = load(sines + i, n), a = load(head + i, n), b = load(head + half + i, n);
            store(head + i, mul(sub(mul(a, c), mul(b, s)), factor), n);
            store(head + half + i, mul(add(mul(b, c), mul(a, s)), factor), n);
        }
    }

    void rotate_neighbours(float* head, const float* cosines, const float* sines, float scale) const {
        for (int i = 0; i < num_pairs(); i++) {
            float c = cosines[i], s = sines[i], a = head[2 * i], b = head[2 * i + 1];
            head[2 * i] = (a * c - b * s) * scale;
            head[2 * i + 1] = (b * c + a * s) * scale;
        }
    }
};

}  // namespace funitel
