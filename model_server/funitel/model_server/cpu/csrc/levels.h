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
    int32_t is_used;              // 0: all levels are 0
};

struct RowBlock {
    LevelPlane low, high;
};

inline void set_plane(LevelPlane& plane, const F16 (&levels)[kHalves], float scale) {
    plane.scale = scale;
    plane.is_used = true;
    for (int h = 0; h < kHalves; h++) {
        store_int8(reinterpret_cast<int8_t*>(plane.words) + h * kLanes, levels[h]);
        float total = sum(levels[h]);
        plane.totals[h] = -static_cast<int32_t>(total);
        plane.sums[h] = scale * total;
    }
    plane.totals[kWhole] = plane.totals[0] + plane.totals[1];
    plane.sums[kWhole] = plane.sums[0] + plane.sums[1];
}

// Lay out some inputs of a row, zeros after the last; blocks of the same row are `stride` apart. The scale is not a number
// where an input is none.
inline void set_levels(RowBlock* target, size_t stride, const float* x, int num_inputs, int level_bits) {
    const F16 none = splat(0.0f);
    for (int i = 0; i < num_inputs; i += kBlockInputs, target += stride) {
        int left = num_inputs - i;
        F16 halves[kHalves] = {load(x + i, left), left > kLanes ? load(x + i + kLanes, left - kLanes) : none};
        float probe = sum(fma(halves[0], none, mul(halves[1], none)));
        float most = largest(max(max(none, magnitude(halves[0])), magnitude(halves[1])));
        float mean = sum(fma(halves[0], halves[0], mul(halves[1], halves[1]))) / kBlockInputs;
        bool is_fine = level_bits == 16 || most * most > kOutlier * kOutlier * mean;
        float most_level = is_fine ? kMostLevel * kPlaneBase : kMostLevel, scale = most / most_level + probe;
        F16 inverse = splat(most > kSmallest ? most_level / most : 0.0f), low[kHalves], high[kHalves];
        for (int h = 0; h < kHalves; h++) {
            low[h] = nearest(mul(halves[h], inverse));
            high[h] = nearest(mul(low[h], splat(1.0f / kPlaneBase)));
            if (is_fine) low[h] = fma(high[h], splat(-float(kPlaneBase)), low[h]);
        }
        set_plane(target->low, low, scale);
        if (is_fine) {
            set_plane(target->high, high, scale * kPlaneBase);
        } else {
            target->high = {};
        }
    }
}

}  // namespace funitel
