// What normalises a row or a head: its mean square, or its mean and variance; weights and a bias may follow.
#pragma once

#include <cmath>

#include "vector.h"

namespace funitel {

// One norm of a model.
struct Norm {
    int32_t weight, bias;  // vectors, -1 for none
    int32_t is_layer;      // by mean and variance, not by the mean square
    int32_t head_stride;   // from the weights of a head to those of the next, 0 where heads share them
    int32_t whole_size;    // elements of the row, on all ranks, with one mean square for all heads; 0: each has its own
    float eps;
};

// The sum of squares of n values less `centre`.
inline float squares(const float* x, int n, float centre) {
    F16 total = splat(0.0f), middle = splat(centre);
    for (int i = 0; i < n; i += kLanes) {
        float values[kLanes] = {};
        store(values, sub(load(x + i, n - i), middle), n - i);
        F16 value = load(values);  // zero past the end
        total = fma(value, value, total);
    }
    return sum(total);
}

// y = (x - centre) * factor, by weights and with a bias where they are not null; x and y may be the same.
inline void rescale(const float* x, float* y, int n, float centre, float factor, const float* weight,
                    const float* bias) {
    F16 middle = splat(centre), scale = splat(factor);
    for (int i = 0; i < n; i += kLanes) {
        F16 value = mul(sub(load(x + i, n - i), middle), scale);
        if (weight != nullptr) value = mul(value, load(weight + i, n - i));
        if (bias != nullptr) value = add(value, load(bias + i, n - i));
        store(y + i, value, n - i);
    }
}

// Normalise n values by themselves; x and y may be the same.
inline void normalise(const Norm& norm, const float* x, float* y, int n, const float* weight, const float* bias) {
    float mean = 0.0f;
    if (norm.is_layer) {
        F16 total = splat(0.0f);
        for (int i = 0; i < n; i += kLanes) total = add(total, load(x + i, n - i));
        mean = sum(total) / n;
    }
    rescale(x, y, n, mean, 1.0f / std::sqrt(squares(x, n, mean) / n + norm.eps), weight, bias);
}

}  // namespace funitel
