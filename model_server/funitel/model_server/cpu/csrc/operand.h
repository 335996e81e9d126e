// Activations as the products read them.
#pragma once

#include <algorithm>
#include <iterator>

#include "levels.h"
#include "matrix.h"
#include "tile_registers.h"

namespace funitel {

// The most rows of a tile: what a product takes at once in vector registers, where sums and
// results of so many fit, and in tile registers.
constexpr int kVectorRows = kRegisters == 32 ? 12 : 6;
#if defined(__AVX512VNNI__)
constexpr int kTileRows = kRegisterRows;
#else
constexpr int kTileRows = kVectorRows;
#endif

// Whether a matrix is multiplied in tile registers.
inline bool uses_tile_registers(const Matrix& matrix) {
#if defined(__AVX512VNNI__)
    return matrix.kind == kBFloat16 && matrix.num_inputs % kRegisterInputs == 0 && has_tile_registers();
#else
    return false;
#endif
}

// Rows that a product with codes takes at once; of others it takes some after the other, and unpacks the codes for each.
constexpr int kRowCounts[] = {1, 2, 3, 4, 6, 8, 12};

// The least of them that is not below `rows`.
inline int whole_tile(int rows) {
    return *std::lower_bound(std::begin(kRowCounts), std::end(kRowCounts), rows);
}

// Rows in tiles, [tile][input][row of the tile]: floats; for bfloat16 weights pairs of inputs, as bfloat16, or 32 of them
// where they are multiplied in tile registers; for codes 32 inputs, as a RowBlock. Tiles are as equal as their rows can be
// taken at once, and the last is as narrow as it has rows: few rows take little of the caches. What is laid out for one
// matrix can be multiplied with every matrix of as many inputs that has the same of these four. Behind the tiles of all rows
// of levels there are, where that is asked for, tiles of floats, which the outliers of matrices read.
struct Operand {
    uint8_t* values = nullptr;
    int level_bits = 8;  // 16, or 8 where no outlier asks for more
    bool keeps_floats = false;  // beside levels
    int num_rows = 0;
    int tile_rows = 0;  // of all tiles but the last, which may have fewer

    // Bytes that a row takes for `matrix`, without floats beside levels.
    static size_t row_bytes(const Matrix& matrix) {
        if (has_codes(matrix.kind)) return size_t(divide_up(matrix.num_inputs, kBlockInputs)) * sizeof(RowBlock);
        if (matrix.kind == kBFloat16) return size_t(divide_up(matrix.num_inputs, 2)) * sizeof(uint32_t);
        return matrix.num_inputs * sizeof(float);
    }

    // Bytes of a row that a product reads: of levels mostly the low plane alone.
    static size_t read_bytes(const Matrix& matrix) {
        return has_codes(matrix.kind) ? row_bytes(matrix) / 2 : row_bytes(matrix);
    }

    // Rows are to follow, as many as this, for `matrix`.
    void begin(const Matrix& matrix, int rows) {
        num_rows = rows;
        const bool in_registers = uses_tile_registers(matrix);
        const int tiles = std::max(1, divide_up(rows, in_registers ? kTileRows : kVectorRows));
        tile_rows = divide_up(rows, tiles);
        if (!in_registers) tile_rows = whole_tile(tile_rows);
    }

    int num_tiles() const { return divide_up(num_rows, tile_rows); }
    int rows_of(int tile) const { return std::min(tile_rows, num_rows - tile * tile_rows); }
    // Bytes of `values` that the rows take for `matrix`.
    size_t num_bytes(const Matrix& matrix) const { return num_rows * (row_bytes(matrix) + float_bytes(matrix)); }
    // Bytes of a row of floats beside levels.
    size_t float_bytes(const Matrix& matrix) const {
        return keeps_floats && has_codes(matrix.kind) ? matrix.num_inputs * sizeof(float) : 0;
    }

    uint8_t* tile(const Matrix& matrix, int index) const {
        return values + size_t(index) * tile_rows * row_bytes(matrix);
    }

    // The floats of a tile beside its levels, [input][row].
    float* floats(const Matrix& matrix, int index) const {
        float* start = reinterpret_cast<float*>(values + num_rows * row_bytes(matrix));
        return start + size_t(index) * tile_rows * matrix.num_inputs;
    }

    // Lay out row `row` of the activations for `matrix`.
    void set_row(const Matrix& matrix, int row, const float* x) const {
        int index = row / tile_rows, place = row % tile_rows, rows = rows_of(index);
        uint8_t* start = tile(matrix, index);
        if (has_codes(matrix.kind)) {
            set_levels(reinterpret_cast<RowBlock*>(start) + place, rows, x, matrix.num_inputs, level_bits);
            if (keeps_floats) set_floats(floats(matrix, index) + place, rows, x, matrix.num_inputs);
        } else if (uses_tile_registers(matrix)) {
            set_brains(start + place * kRegisterStride, rows * kRegisterStride, x, matrix.num_inputs);
        } else if (matrix.kind == kBFloat16) {
            set_pairs(reinterpret_cast<uint32_t*>(start) + place, rows, x, matrix.num_inputs);
        } else {
            set_floats(reinterpret_cast<float*>(start) + place, rows, x, matrix.num_inputs);
        }
    }

  private:
    static void set_floats(float* target, size_t stride, const float* x, int num_inputs) {
        if (stride == 1) {
            std::copy_n(x, num_inputs, target);
            return;
        }
        for (int i = 0; i < num_inputs; i++) target[i * stride] = x[i];
    }

    static void set_brains(uint8_t* target, size_t stride, const float* x, int num_inputs) {
        for (int i = 0; i < num_inputs; i += kRegisterInputs, target += stride) {
            Brain* numbers = reinterpret_cast<Brain*>(target);
            store(numbers, load(x + i));
            store(numbers + kLanes, load(x + i + kLanes));
        }
    }

    static void set_pairs(uint32_t* target, size_t stride, const float* x, int num_inputs) {
        for (int i = 0; i < num_inputs; i += kLanes) {
            Pairs pairs(x + i, std::min(kLanes, num_inputs - i));
            for (int j = 0; j < pairs.count; j++, target += stride) *target = pairs.words[j];
        }
    }
};

}  // namespace funitel
