// The product of a few rows of activations with panels of floating-point weights. Sums have a fixed order, so that a row's
// result does not depend on what shares the batch.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "memory.h"
#include "vector.h"

namespace funitel {

// Inputs summed in one go by the float kinds; the sums of such runs are then added in order. Rounding errors grow with
// the length of a sum, so two short levels lose less than one long one.
constexpr int kRun = 128;

// out[r][p] = the products of row r of a tile with panel p. `x` is the tile, `w` the first panel.
template <class W, int R, int P>
inline void multiply(const W* w, const float* x, int depth, F16 (&out)[R][P]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) out[r][p] = splat(0.0f);
    }
    for (int begin = 0; begin < depth; begin += kRun) {
        const int end = std::min(depth, begin + kRun);
        F16 sums[R][P];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sums[r][p] = splat(0.0f);
        }
        for (int i = begin; i < end; i++) {
            F16 weights[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const W* source = w + (size_t(i) * kPair + p) * kLanes;
                fetch(source);
                weights[p] = load(source);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                F16 value = splat(x[size_t(i) * R + r]);
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) sums[r][p] = fma(value, weights[p], sums[r][p]);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) out[r][p] = add(out[r][p], sums[r][p]);
        }
    }
}

// Panels of a pair multiplied at a time, so that the accumulators fit in the registers.
constexpr int dense_panels_at_once(int rows) { return kRegisters == 32 || rows <= 3 ? kPair : 1; }

// Call `finish(row, panel of the pair, sums)` for R rows of a tile.
template <class W, int R, class Finish>
void multiply_tile(const W* w, int depth, const float* x, Finish finish) {
    constexpr int P = dense_panels_at_once(R);
    for (int panel = 0; panel < kPair; panel += P) {
        F16 sums[R][P];
        multiply<W, R, P>(w + panel * kLanes, x, depth, sums);
        for (int r = 0; r < R; r++) {
            for (int p = 0; p < P; p++) finish(r, panel + p, sums[r][p]);
        }
    }
}

template <class W, class Finish>
void multiply_dense(const W* w, int depth, const float* x, int count, Finish finish) {
    switch (count) {
#define FUNITEL_CASE(R) \
    case R: return multiply_tile<W, R>(w, depth, x, finish);
        FUNITEL_CASE(1)
        FUNITEL_CASE(2)
        FUNITEL_CASE(3)
        FUNITEL_CASE(4)
        FUNITEL_CASE(5)
        FUNITEL_CASE(6)
#if defined(__AVX512F__)
        FUNITEL_CASE(7)
        FUNITEL_CASE(8)
        FUNITEL_CASE(9)
        FUNITEL_CASE(10)
        FUNITEL_CASE(11)
        FUNITEL_CASE(12)
#endif
#undef FUNITEL_CASE
    }
}

}  // namespace funitel
