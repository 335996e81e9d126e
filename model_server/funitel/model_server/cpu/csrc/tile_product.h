// The product of rows of activations with pairs of panels of bfloat16 weights in the tile registers of AMX. What a row's sums
// are does not depend on how many rows a register has, so one row is multiplied this way as well.
#pragma once

#include <algorithm>

#include "operand.h"
#include "tile_registers.h"
#include "vector.h"

namespace funitel {

// sums[row][p] = the products of one or two tiles of `num_rows` rows each, `tile_bytes` apart, with panel p of a pair.
// Activations are [32 inputs][row], weights [two inputs][panel][output][input]. `is_cold`: the weights are not in a cache yet.
template <int Tiles>
FUNITEL_AMX inline void multiply_in_registers(const Brain* w, int num_steps, const uint8_t* x, size_t tile_bytes,
                                              int num_rows, bool is_cold, F16 (*sums)[kPair]) {
    constexpr int stride = sizeof(F16[kPair]), lines = kRegisterRows * kPair, ahead = 15 << 10;
    const char* weights = reinterpret_cast<const char*>(w);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < num_steps; step++) {
        if (is_cold) {
#pragma GCC unroll 32
            for (int i = 0; i < lines; i++) _mm_prefetch(weights + ahead + i * kRegisterStride, _MM_HINT_T0);
        }
        _tile_loadd(4, x, kRegisterStride);
        _tile_loadd(6, weights, stride);
        _tile_loadd(7, weights + kRegisterStride, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (Tiles == 2) {
            _tile_loadd(5, x + tile_bytes, kRegisterStride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        x += num_rows * kRegisterStride;
        weights += lines * kRegisterStride;
    }
    _tile_stored(0, &sums[0][0], stride);
    _tile_stored(1, &sums[0][1], stride);
    if constexpr (Tiles == 2) {
        _tile_stored(2, &sums[num_rows][0], stride);
        _tile_stored(3, &sums[num_rows][1], stride);
    }
}

// sums[row][p] = the products of rows in tiles of `tile_rows`, the last of what is left, with panel p of a pair. Two tiles at a
// time share the weights that are loaded.
FUNITEL_AMX inline void multiply_in_registers(const Brain* w, int num_inputs, const uint8_t* x, int num_rows,
                                              int tile_rows, F16 (*sums)[kPair]) {
    const int num_steps = num_inputs / kRegisterInputs, whole = std::min(num_rows, tile_rows);
    const size_t row_bytes = size_t(num_steps) * kRegisterStride;
    settle_memory();
    TileRegisters registers;
    registers.shape(whole);
    int row = 0;
    for (; row + 2 * whole <= num_rows; row += 2 * whole) {
        multiply_in_registers<2>(w, num_steps, x + row * row_bytes, whole * row_bytes, whole, row == 0, sums + row);
    }
    if (row + whole <= num_rows) {
        multiply_in_registers<1>(w, num_steps, x + row * row_bytes, 0, whole, row == 0, sums + row);
        row += whole;
    }
    if (row < num_rows) {
        registers.shape(num_rows - row);
        multiply_in_registers<1>(w, num_steps, x + row * row_bytes, 0, num_rows - row, false, sums + row);
    }
}

}  // namespace funitel
