// Rotary positions: pairs of a head's leading elements turn by angles that grow with the position.
#pragma once

#include <cmath>
#include <vector>

#include "vector.h"

namespace funitel {

// One kind of rotary positions; the layers of a model may have several.
struct Turn {
    std::vector<float> frequencies;  // of each pair
    float amplitude;                 // multiplies cosines and sines
    bool is_interleaved;             // pairs are neighbours, instead of i and i + number of pairs
    int first;                       // where its angles begin among those of a token

    int num_pairs() const { return static_cast<int>(frequencies.size()); }
    int num_angles() const { return 2 * num_pairs(); }

    // The cosines of a position's angles, then the sines.
    void fill(int position, float* angles) const {
        for (int i = 0; i < num_pairs(); i++) {
            float angle = static_cast<float>(position) * frequencies[i];
            angles[i] = std::cos(angle) * amplitude;
            angles[num_pairs() + i] = std::sin(angle) * amplitude;
        }
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
