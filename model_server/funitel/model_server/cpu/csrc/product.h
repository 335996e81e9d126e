// The product of an operand with a matrix, in chunks that threads claim, and what becomes of its result.
#pragma once

#include <algorithm>

#include "activations.h"
#include "block_products.h"
#include "dense_products.h"
#include "low_rank.h"
#include "operand.h"
#include "program.h"
#if defined(__AVX512VNNI__)
#include "tile_product.h"
#endif

namespace funitel {

struct Product {
    const Matrix& matrix;
    const Operand& operand;
    Mode mode;
    Activation activation;
    float scale;    // of what is added
    float* target;  // of the operand's first row
    size_t width;   // floats from a row of the target to the next
    const LowRankSums* added = nullptr;  // what the adapters of rows add; null for nothing

    // A chunk is a pair of panels times a block of rows. The pair stays in the innermost cache while the blocks of a group
    // pass by, and so do the rows of the group in the next one while the pairs pass by; then comes the next group.
    int num_chunks() const { return matrix.num_pairs() * (has_one_tile() ? 1 : num_blocks()); }

    void multiply(int chunk) const {
        if (has_one_tile()) return multiply(chunk, 0, 1);
        const int in_cache = tiles_in_cache(), each = tiles_of_block(in_cache);
        const int most = std::max(1, in_cache / each), group = chunk / (most * matrix.num_pairs()) * most;
        const int count = std::min(most, divide_up(operand.num_tiles(), each) - group);
        chunk -= group * matrix.num_pairs();
        const int first = (group + chunk % count) * each;
        multiply(chunk / count, first, std::min(operand.num_tiles(), first + each));
    }

  private:
    static constexpr int kMostRows = 96;  // of a block
    bool has_one_tile() const { return operand.num_rows <= operand.tile_rows; }
    // The rows of a group leave room in the second cache for a pair of panels, and for what a neighbour on the same core has
    // there. Levels take a fifth: a cache of 1 MiB (AMD EPYC, Zen 4) has prompts by 4-bit codes 1.1 times, rows of 8,192
    // inputs 1.4 times as fast as with two fifths. Other rows take those: the fewer, the more often weights are read.
    int tiles_in_cache() const {
        const size_t bytes = kSecondCacheBytes / 5 * (has_codes(matrix.kind) ? 1 : 2);
        return static_cast<int>(bytes / (operand.read_bytes(matrix) * operand.tile_rows));
    }
    int tiles_of_block(int in_cache) const { return std::clamp(in_cache, 1, kMostRows / operand.tile_rows); }
    int num_blocks() const { return divide_up(operand.num_tiles(), tiles_of_block(tiles_in_cache())); }

    // Multiply some tiles of rows by a pair of panels.
    void multiply(int pair, int first, int end) const {
        alignas(64) float more[kMostRows][kPair][kLanes];  // of each row of the block, where it has an adapter
        const int first_row = first * operand.tile_rows;
        if (added != nullptr) {
            if (first == 0) added->touch_pairs(pair);
            added->add(pair, first_row, std::min(operand.num_rows, end * operand.tile_rows), more);
        }
#if defined(__AVX512VNNI__)
        if (uses_tile_registers(matrix)) {
            F16 sums[kMostRows][kPair];
            const int num_rows = std::min(operand.num_rows, end * operand.tile_rows) - first_row;
            fetch_target(pair, first_row, num_rows);
            const auto* w = reinterpret_cast<const Brain*>(matrix.pair(pair));
            multiply_in_registers(w, matrix.num_inputs, operand.tile(matrix, first), num_rows, operand.tile_rows, sums);
            for (int tile = first; tile < end; tile++) {
                const int row = tile * operand.tile_rows - first_row;
                finish_tile(pair, tile, sums + row, more + row);
            }
            return;
        }
#endif
        for (int tile = first; tile < end; tile++) {
            multiply_tile(pair, tile, tile == first, more + (tile * operand.tile_rows - first_row));
        }
    }

    // The lines to be written arrive while the products are made: of wide rows no two are in one page.
    void fetch_target(int pair, int first_row, int num_rows) const {
        const int num_written = mode == kGate ? 1 : kPair;
        const float* y = target + first_row * width + size_t(pair) * num_written * kLanes;
        for (int r = 0; r < num_rows; r++, y += width) {
            for (int p = 0; p < num_written; p++) __builtin_prefetch(y + p * kLanes, 1);
        }
    }

    // `more`: what adapters add to each row of the tile that has one.
    void multiply_tile(int pair, int tile, bool is_cold, const float (*more)[kPair][kLanes]) const {
        const int count = operand.rows_of(tile);
        fetch_target(pair, tile * operand.tile_rows, count);
        F16 sums[kTileRows][kPair];
        const uint8_t* x = operand.tile(matrix, tile);
        if (has_codes(matrix.kind)) {
            with_block(matrix.kind, [&](auto of) {
                const auto* w = reinterpret_cast<const typename decltype(of)::Type*>(matrix.pair(pair));
                multiply_all_rows(w, matrix.num_blocks(), is_cold, reinterpret_cast<const RowBlock*>(x), count, sums);
            });
        } else {
            with_float(matrix.kind, [&](auto of) {
                using Number = typename decltype(of)::Type;
                multiply_dense(reinterpret_cast<const Number*>(matrix.pair(pair)), matrix.num_inputs, x, count, sums);
            });
        }
        finish_tile(pair, tile, sums, more);
    }

    // Write what becomes of the sums of a tile.
    void finish_tile(int pair, int tile, F16 (*sums)[kPair], const float (*more)[kPair][kLanes]) const {
        const int count = operand.rows_of(tile), first_row = tile * operand.tile_rows, first_panel = pair * kPair;
        const int num_panels = std::min(kPair, matrix.num_panels - first_panel);
        alignas(64) float apart[kTileRows][kPair][kLanes];  // of outliers
        const bool has_outliers = !matrix.outliers.empty();
        if (has_outliers) {
            matrix.outliers.multiply(pair, operand.floats(matrix, tile), count, apart, matrix.pair(pair));
        }
        // `of` gives, for a panel, what becomes of the sum of a row.
        const auto change = [&](auto of) FUNITEL_INLINE {
            for (int p = 0; p < num_panels; p++) {
                const auto changed = of(p);
                for (int r = 0; r < count; r++) sums[r][p] = changed(r, sums[r][p]);
            }
        };
        if (matrix.kind == kInt8) {
            change([&](int p) FUNITEL_INLINE {
                return [scales = load(matrix.scales(first_panel + p))](int, F16 sum) { return mul(sum, scales); };
            });
        }
        if (has_outliers) {
            change([&](int p) FUNITEL_INLINE {
                return [&apart, p](int r, F16 sum) { return add(sum, load(apart[r][p])); };
            });
        }
        if (!matrix.bias.empty()) {
            const float* start = matrix.bias.data() + size_t(first_panel) * kLanes;
            change([&](int p) FUNITEL_INLINE {
                return [bias = load(start + p * kLanes)](int, F16 sum) { return add(sum, bias); };
            });
        }
        if (added != nullptr) {
            change([&](int p) FUNITEL_INLINE {
                return [&, p](int r, F16 sum) { return added->has(first_row + r) ? add(sum, load(more[r][p])) : sum; };
            });
        }
        const F16 factor = splat(scale);
        const Rows rows = {target + size_t(first_row) * width, width, count, matrix.num_outputs};
        switch (mode) {
            case kGate:
                if (num_panels < kPair) return;
                return rows.write(pair, 1, [&](int r, int, const float*, int) FUNITEL_INLINE {
                    return mul(activate(activation, sums[r][0]), sums[r][1]);
                });
            case kAccumulate:
                return rows.write(first_panel, num_panels, [&](int r, int p, const float* y, int n) FUNITEL_INLINE {
                    return fma(sums[r][p], factor, load(y, n));
                });
            case kMultiply:
                return rows.write(first_panel, num_panels, [&](int r, int p, const float* y, int n) FUNITEL_INLINE {
                    return mul(sums[r][p], load(y, n));
                });
            case kActivate:
                return rows.write(first_panel, num_panels, [&](int r, int p, const float*, int) FUNITEL_INLINE {
                    return activate(activation, sums[r][p]);
                });
            case kStore:
                return rows.write(first_panel, num_panels, [&](int r, int p, const float*, int) FUNITEL_INLINE {
                    return sums[r][p];
                });
        }
    }

    // Rows that are written.
    struct Rows {
        float* start;
        size_t width;
        int count, num_outputs;

        // Write what `make` returns for a row, one of some panels and what is there, of which so many outputs count.
        template <class Make>
        FUNITEL_INLINE void write(int panel, int num_panels, Make make) const {
            for (int r = 0; r < count; r++) {
                for (int p = 0; p < num_panels; p++) {
                    const int output = (panel + p) * kLanes, n = num_outputs - output;
                    float* y = start + r * width + output;
                    store(y, make(r, p, y, n), n);
                }
            }
        }
    };
};

}  // namespace funitel
