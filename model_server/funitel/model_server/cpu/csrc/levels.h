// Activations as levels, which products with blocks of codes read: 32 inputs of a row share a scale, and a level is a
// signed byte. Where levels have 16 bits, they are two of them, high x 254 + low, each multiplied by itself.
//
// A block with an outlier gets 16 bits in any case: one input far above the others would leave these few of the levels.
// Such blocks are few, and are where most of what levels of 8 bits lose is lost.
#pragma once

#include "blocks.h"
#include "vector.h"

namespace funitel {

constexpr int kPlaneBase = 2 * kMostLevel;  // of two planes; each stays within its own seven bits and a sign
constexpr float kOutlier = 5.0f;            // times the root mean square of the block
constexpr int kHalves = 2, kWhole = kHalves;

// Levels of 32 inputs, the low or the high bytes.
struct alignas(64) LevelPlane {
    int32_t words[kQuads];        // four levels each
    int32_t totals[kHalves + 1];  // sums of levels, negative: of either half, of all
    float sums[kHalves + 1];      // of the activations that they stand for, the same way
    float scale;                  // the size of a level
    int32_t has_high;             // of the low plane: whether a level of the high one is not 0
};

struct RowBlock {
    LevelPlane low, high;
};

// Whether some of `R` rows have levels of 16 bits; those of the others are 0 in the high plane, which adds nothing to them.
template <int R>
inline bool has_high(const RowBlock* x) {
    int32_t some = 0;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) some |= x[r].low.has_high;
    return some != 0;
}

inline void set_plane(LevelPlane& plane, const F16 (&levels)[kHalves], float scale) {
    plane.scale = scale;
    for (int h = 0; h < kHalves; h++) {
        __m128i bytes = to_bytes(levels[h]);
        _mm_store_si128(reinterpret_cast<__m128i*>(plane.words) + h, bytes);
        int total = sum(bytes);
        plane.totals[h] = -total;
        plane.sums[h] = scale * static_cast<float>(total);
    }
    plane.totals[kWhole] = plane.totals[0] + plane.totals[1];
    plane.sums[kWhole] = plane.sums[0] + plane.sums[1];
}

// Lay out some inputs of a row, zeros after the last; blocks of the same row are `stride` apart. The scale is not a number
// where an input is none, or is infinite.
inline void set_levels(RowBlock* target, size_t stride, const float* x, int num_inputs, int level_bits) {
    for (int i = 0; i < num_inputs; i += kBlockInputs, target += stride) {
        int left = num_inputs - i;
        F16 halves[kHalves] = {load(x + i, left), left > kLanes ? load(x + i + kLanes, left - kLanes) : splat(0.0f)};
        float most = largest(max(magnitude(halves[0]), magnitude(halves[1])));
        float squares = sum(fma(halves[0], halves[0], mul(halves[1], halves[1])));
        if (!(most < std::numeric_limits<float>::infinity()) || std::isnan(squares)) {
            most = std::numeric_limits<float>::quiet_NaN();
        }
        bool is_fine = level_bits == 16 || most * most > kOutlier * kOutlier / kBlockInputs * squares;
        float most_level = is_fine ? kMostLevel * kPlaneBase : kMostLevel, scale = most / most_level;
        F16 inverse = splat(most > kSmallest ? most_level / most : 0.0f);
        F16 levels[kHalves] = {mul(halves[0], inverse), mul(halves[1], inverse)};
        if (is_fine) {
            F16 high[kHalves];
            for (int h = 0; h < kHalves; h++) {
                levels[h] = nearest(levels[h]);
                high[h] = nearest(mul(levels[h], splat(1.0f / kPlaneBase)));
                levels[h] = fma(high[h], splat(-float(kPlaneBase)), levels[h]);
            }
            set_plane(target->high, high, scale * kPlaneBase);
        } else {
            target->high = {};
        }
        set_plane(target->low, levels, scale);
        target->low.has_high = is_fine;
    }
}

}  // namespace funitel
