// Products of floats on AMX; its tiles multiply bfloat16: each number is the sum of two of them, high and low, which
// keep 16 of its 24 bits, and of a product of two such sums only low times low is left out. Against float32 that changes
// an output by some millionths of its size, for a third of the speed that tiles have.
#pragma once

#include <vector>

#include "memory.h"
#include "tile_registers.h"
#include "vector.h"

namespace funitel {

constexpr int kSquare = 32;  // rows and outputs multiplied at a time: two tiles each

// Sixteen floats as two bfloat16 each; their sum is the float less what does not fit.
struct Halves {
    __m256i high, low;
};

inline Halves halve(F16 x) {
    __m256i high = (__m256i)_mm512_cvtneps_pbh(x.v);
    __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
    return {high, (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x.v, back))};
}

// Rows of activations as tiles read them: [16 rows][32 inputs][high, low].
class TileRows {
  public:
    bool reserve(int rows, int inputs) {
        num_steps_ = inputs / kRegisterInputs;
        return memory_.grow(size_t(rows) / kRegisterRows * num_steps_ * 2 * kRegisterBytes);
    }

    // Sixteen inputs of a row, from a multiple of sixteen on.
    void set(int row, int input, F16 x) {
        Halves halves = halve(x);
        uint8_t* target = step(row / kRegisterRows, input / kRegisterInputs) + row % kRegisterRows * kRegisterStride +
                          input % kRegisterInputs * sizeof(uint16_t);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), halves.high);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + kRegisterBytes), halves.low);
    }

    void set_row(int row, const float* x) {
        for (int i = 0; i < num_steps_ * kRegisterInputs; i += kLanes) set(row, i, load(x + i));
    }

    // Two tiles, the high one first.
    uint8_t* step(int block, int index) const {
        return memory_.as<uint8_t>() + (size_t(block) * num_steps_ + index) * 2 * kRegisterBytes;
    }

  private:
    Memory memory_;
    int num_steps_ = 0;
};

// Weights as tiles read them: [32 outputs][32 inputs][high, low][16 outputs], inputs in pairs.
class TileMatrix {
  public:
    int num_outputs = 0;
    int num_inputs = 0;
    std::vector<float> bias;  // [num_outputs]

    static bool fits(int outputs, int inputs) { return outputs % kSquare == 0 && inputs % kRegisterInputs == 0; }

    // Take weights [outputs, inputs].
    bool take(int outputs, int inputs, const float* weights, const float* biases) {
        num_outputs = outputs;
        num_inputs = inputs;
        bias.assign(biases, biases + outputs);
        if (!memory_.grow(size_t(outputs) * inputs * 2 * sizeof(uint16_t))) return false;
        for (int n = 0; n < outputs; n++) {
            for (int k = 0; k < inputs; k += kLanes) {
                Halves halves = halve(load(weights + size_t(n) * inputs + k));
                alignas(32) uint16_t high[kLanes], low[kLanes];
                _mm256_store_si256(reinterpret_cast<__m256i*>(high), halves.high);
                _mm256_store_si256(reinterpret_cast<__m256i*>(low), halves.low);
                for (int i = 0; i < kLanes; i++) {
                    *place(n, k + i, 0) = high[i];
                    *place(n, k + i, 1) = low[i];
                }
            }
        }
        return true;
    }

    // Four tiles: high of the first and the second 16 outputs, then low.
    const uint8_t* step(int square, int index) const {
        return memory_.as<uint8_t>() + (size_t(square) * (num_inputs / kRegisterInputs) + index) * 4 * kRegisterBytes;
    }

  private:
    uint16_t* place(int output, int input, int part) const {
        int tile = part * 2 + output % kSquare / kRegisterRows, at = input % kRegisterInputs;
        uint8_t* start = const_cast<uint8_t*>(step(output / kSquare, input / kRegisterInputs)) + tile * kRegisterBytes;
        return reinterpret_cast<uint16_t*>(start + at / 2 * kRegisterStride) + output % kRegisterRows * 2 + at % 2;
    }

    Memory memory_;
};

// Multiply rows, as many as a multiple of 32, by all of a matrix. `take(row, output, sums)` is given sixteen outputs of a
// row at a time, without bias.
template <class Take>
inline void multiply(const TileMatrix& matrix, const TileRows& rows, int num_rows, Take take) {
    alignas(64) float sums[4][kRegisterRows * kLanes];
    const int num_steps = matrix.num_inputs / kRegisterInputs;
    settle_memory();
    for (int square = 0; square < matrix.num_outputs / kSquare; square++) {
        for (int row = 0; row < num_rows; row += kSquare) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int i = 0; i < num_steps; i++) {
                const uint8_t* w = matrix.step(square, i);
                const uint8_t* x = rows.step(row / kRegisterRows, i);
                const uint8_t* y = rows.step(row / kRegisterRows + 1, i);
                _tile_loadd(4, x, kRegisterStride);
                _tile_loadd(6, w, kRegisterStride);
                _tile_loadd(7, w + kRegisterBytes, kRegisterStride);
                _tile_loadd(5, y, kRegisterStride);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
                _tile_loadd(4, x + kRegisterBytes, kRegisterStride);
                _tile_loadd(5, y + kRegisterBytes, kRegisterStride);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
                _tile_loadd(4, x, kRegisterStride);
                _tile_loadd(5, y, kRegisterStride);
                _tile_loadd(6, w + 2 * kRegisterBytes, kRegisterStride);
                _tile_loadd(7, w + 3 * kRegisterBytes, kRegisterStride);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, sums[0], kRegisterStride);
            _tile_stored(1, sums[1], kRegisterStride);
            _tile_stored(2, sums[2], kRegisterStride);
            _tile_stored(3, sums[3], kRegisterStride);
            for (int r = 0; r < kSquare; r++) {
                for (int part = 0; part < 2; part++) {
                    const float* found = sums[r / kRegisterRows * 2 + part] + r % kRegisterRows * kLanes;
                    take(row + r, square * kSquare + part * kLanes, load(found));
                }
            }
        }
    }
}

}  // namespace funitel
