// The Hadamard transform of a head: orthogonal, and its own inverse. It spreads a few large elements over all of them, so
// that codes of few bits with one scale lose less. Source: Ashkboos et al., QuaRot, arXiv 2404.00456.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace funitel {

// The largest head of a pool of codes.
constexpr int kMostDim = 512;

// Sums and differences of lanes `Step` apart: the first of a pair becomes a + b, the second a - b.
template <int Step>
inline F16 butterfly(F16 x) {
    alignas(64) static const struct Signs {
        float values[kLanes];
        Signs() {
            for (int i = 0; i < kLanes; i++) values[i] = i & Step ? -1.0f : 1.0f;
        }
    } signs;
    return fma(x, load(signs.values), partner<Step>(x));
}

// Of sixteen values, or with fewer than sixteen of each run of `size` of them.
inline F16 transform_lanes(F16 x, int size) {
    if (size >= 2) x = butterfly<1>(x);
    if (size >= 4) x = butterfly<2>(x);
    if (size >= 8) x = butterfly<4>(x);
    if (size >= 16) x = butterfly<8>(x);
    return x;
}

// Transform `size` values, a power of two up to kMostDim, in place.
inline void transform_power(float* x, int size) {
    const F16 scale = splat(1.0f / std::sqrt(static_cast<float>(size)));
    if (size <= kLanes) return store(x, mul(transform_lanes(load(x, size), size), scale), size);
    F16 all[kMostDim / kLanes];
    const int count = size / kLanes;
    for (int i = 0; i < count; i++) all[i] = transform_lanes(load(x + i * kLanes), kLanes);
    for (int step = 1; step < count; step *= 2) {
        for (int i = 0; i < count; i++) {
            if (i & step) continue;
            const F16 a = all[i], b = all[i + step];
            all[i] = add(a, b);
            all[i + step] = sub(a, b);
        }
    }
    for (int i = 0; i < count; i++) store(x + i * kLanes, mul(all[i], scale));
}

// Transform a head in place. Of a size that is no power of two, the largest powers of two in it are transformed one after
// the other.
inline void transform(float* x, int size) {
    for (int first = 0; first < size;) {
        int part = 1;
        while (2 * part <= size - first) part *= 2;
        transform_power(x + first, part);
        first += part;
    }
}

}  // namespace funitel
