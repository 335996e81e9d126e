// The product of an operand with a matrix, in chunks that threads claim, and what becomes of its result.
#pragma once

#include <algorithm>

#include "activations.h"
#include "block_products.h"
#include "matrix.h"
#include "program.h"

namespace funitel {

struct Product {
    const Matrix& matrix;
    const Operand& operand;
    Mode mode;
    Activation activation;
    float scale;    // of what is added
    float* target;  // of the operand's first row
    size_t width;   // floats from a row of the target to the next

    // A chunk is a pair of panels times a block of rows. The pair stays in the innermost cache while the rows pass by, and
    // so do the rows in the next one while the pairs of a thread's range pass by.
    int num_chunks() const { return matrix.num_pairs() * num_blocks(); }

    void multiply(int chunk) const {
        switch (matrix.kind) {
            case kFloat32: return multiply_as<float, float>(chunk);
            case kFloat16: return multiply_as<Half, float>(chunk);
            case kInt8: return multiply_as<int8_t, int32_t>(chunk);
            case kQ4_0: return multiply_as<BlockQ4_0, OperandBlock>(chunk);
            case kQ4_1: return multiply_as<BlockQ4_1, OperandBlock>(chunk);
            case kQ8_0: return multiply_as<BlockQ8_0, OperandBlock>(chunk);
        }
    }

  private:
    static constexpr int kTilesEach = 96 / kTileRows;

    int num_blocks() const { return (operand.num_tiles() + kTilesEach - 1) / kTilesEach; }

    template <class W, class X>
    void multiply_as(int chunk) const {
        int pair = chunk / num_blocks(), first = chunk % num_blocks() * kTilesEach;
        for (int tile = first; tile < std::min(operand.num_tiles(), first + kTilesEach); tile++) {
            multiply_rows<W, X>(operand.tile<X>(matrix, tile), pair, tile * operand.tile_rows, operand.rows_of(tile));
        }
    }

    // The `count` rows of one tile by one pair of panels.
    template <class W, class X>
    void multiply_rows(const X* x, int pair, int first_row, int count) const {
        float gates[kTileRows][kLanes];
        float* start = target + first_row * width;
        const float* scales = operand.scales + first_row;
        const F16 factor = splat(scale);
        // The lines to be written arrive while the products are made: of wide rows no two are in one page.
        const int panels = mode == kGate ? 1 : kPair;
        for (int r = 0; r < count; r++) {
            const float* y = start + r * width + size_t(pair) * panels * kLanes;
            for (int p = 0; p < panels; p++) __builtin_prefetch(y + p * kLanes, 1);
        }
        auto finish = [&](int r, int panel, F16 value) {
            if (mode == kGate) {
                if (panel % 2 == 0) return store(gates[r], activate(activation, value));
                value = mul(load(gates[r]), value);
                panel /= 2;
            }
            int output = panel * kLanes, n = matrix.num_outputs - output;
            float* y = start + r * width + output;
            if (mode == kAccumulate) value = fma(value, factor, load(y, n));
            if (mode == kActivate) value = activate(activation, value);
            store(y, value, n);
        };
        switch (count) {
#define FUNITEL_CASE(R) \
    case R: return multiply_tile<W, X, R>(matrix, x, pair, scales, finish);
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
};

}  // namespace funitel
