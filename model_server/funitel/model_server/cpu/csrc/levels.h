// Activations as levels, which products with blocks of codes read: 32 inputs of a row share a scale. In 8 bits a level is a
// signed byte. In 16 bits it is two of them, high x 254 + low, each multiplied by itself: the loss of the blocks is then
// all there is, for twice the time.
#pragma once

#include "blocks.h"
#include "vector.h"

namespace funitel {

constexpr int kPlaneBase = 2 * kMostLevel;  // of two planes; each stays within its own seven bits and a sign

template <int Planes>
struct RowBlock {
    int32_t words[Planes][kQuads];  // four levels each; the low plane first
    int32_t totals[Planes][3];      // sums of levels, negative: of either half, of all
    float sums[3];                  // of the activations, the same way
    float scale;                    // the size of a level
};

constexpr int kWhole = 2;  // of totals and sums

constexpr float most_level(int planes) { return planes == 1 ? kMostLevel : kMostLevel * kPlaneBase; }

// Lay out some inputs of a row, zeros after the last; blocks of the same row are `stride` apart. The scale is not a number
// where an input is none.
template <int Planes>
void set_levels(RowBlock<Planes>* target, size_t stride, const float* x, int num_inputs) {
    const F16 none = splat(0.0f);
    for (int i = 0; i < num_inputs; i += kBlockInputs, target += stride) {
        int left = num_inputs - i;
        F16 halves[2] = {load(x + i, left), left > kLanes ? load(x + i + kLanes, left - kLanes) : none};
        float probe = sum(fma(halves[0], none, mul(halves[1], none)));
        float most = largest(max(max(none, magnitude(halves[0])), magnitude(halves[1])));
        F16 inverse = splat(most > kSmallest ? most_level(Planes) / most : 0.0f);
        target->scale = most / most_level(Planes) + probe;
        for (int h = 0; h < 2; h++) {
            F16 levels = nearest(mul(halves[h], inverse)), planes[2] = {levels, none};
            if (Planes == 2) {
                planes[1] = nearest(mul(levels, splat(1.0f / kPlaneBase)));
                planes[0] = fma(planes[1], splat(-float(kPlaneBase)), levels);
            }
            for (int p = 0; p < Planes; p++) {
                store_int8(reinterpret_cast<int8_t*>(target->words[p]) + h * kLanes, planes[p]);
                target->totals[p][h] = -static_cast<int32_t>(sum(planes[p]));
            }
            target->sums[h] = target->scale * sum(levels);
        }
        for (int p = 0; p < Planes; p++) target->totals[p][kWhole] = target->totals[p][0] + target->totals[p][1];
        target->sums[kWhole] = target->sums[0] + target->sums[1];
    }
}

}  // namespace funitel
