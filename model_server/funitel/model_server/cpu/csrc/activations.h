// Non-linear functions of sixteen values: those of MLPs, and the soft cap of scores.
#pragma once

#include <cmath>

#include "vector.h"

namespace funitel {

enum Activation : int32_t { kSilu, kGelu, kGeluTanh, kRelu, kQuickGelu, kReluSquared };

// x / (1 + e^(-steepness x))
inline F16 swish(F16 x, float steepness) {
    return div(x, add(splat(1.0f), exp(mul(x, splat(-steepness)))));
}

inline F16 activate(Activation activation, F16 x) {
    switch (activation) {
        case kSilu: return swish(x, 1.0f);
        case kQuickGelu: return swish(x, 1.702f);
        case kRelu: return max(splat(0.0f), x);
        case kReluSquared: {
            F16 positive = max(splat(0.0f), x);
            return mul(positive, positive);
        }
        case kGeluTanh: {
            // 1 + tanh(u) = 2 - 2 / (e^(2u) + 1)
            F16 one = splat(1.0f);
            F16 u = mul(mul(x, splat(0.7978845608028654f)), fma(mul(x, x), splat(0.044715f), one));
            F16 tail = div(splat(2.0f), add(exp(add(u, u)), one));
            return mul(mul(splat(0.5f), x), sub(splat(2.0f), tail));
        }
        case kGelu: break;
    }
    float values[kLanes];
    store(values, x);
    for (float& value : values) value = 0.5f * value * (1.0f + std::erf(value * 0.7071067811865476f));
    return load(values);
}

// cap * tanh(x / cap)
inline F16 soft_cap(F16 x, F16 cap) {
    F16 u = div(x, cap), one = splat(1.0f);
    return mul(cap, sub(one, div(splat(2.0f), add(exp(add(u, u)), one))));
}

}  // namespace funitel
