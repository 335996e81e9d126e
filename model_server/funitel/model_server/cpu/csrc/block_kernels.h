// The products of block types, of which each is compiled once, in one of engine_*.cpp.
#pragma once

#include "block_products.h"

#if defined(__AVX512F__)
#include "wide_product.h"
#else
#include "narrow_product.h"
#endif

namespace funitel {

// Panels of a pair multiplied at a time: with 32 registers both while sums and results fit, and for blocks of bytes, which
// take none for unpacking, with two rows more.
template <class Block>
constexpr int block_panels_at_once(int rows) {
    constexpr bool has_bytes = Block::kInputs == kBlockInputs && sizeof(Block) >= kBlockInputs * kPair * kLanes;
    return kRegisters == 32 && rows > (has_bytes ? 8 : 6) ? 1 : kPair;
}

// Rows [first, first + R) of those that `multiply_all_rows` has.
template <class Block, int R>
void multiply_rows(const Block* w, int num_blocks, bool is_cold, const RowBlock* x, int stride, int first,
                   F16 (*sums)[kPair]) {
    constexpr int P = block_panels_at_once<Block>(R);
    for (int panel = 0; panel < kPair; panel += P) {
        F16 found[R][P];
        multiply_blocks<Block, R, P>(w, num_blocks, panel, is_cold && panel == 0, x + first, stride, found);
        for (int r = 0; r < R; r++) {
            for (int p = 0; p < P; p++) sums[first + r][panel + p] = found[r][p];
        }
    }
}

// The sizes are few, as each is a function of its own for every type.
template <class Block>
void multiply_all_rows(const Block* w, int num_blocks, bool is_cold, const RowBlock* x, int count, F16 (*sums)[kPair]) {
    for (int first = 0; first < count;) {
        int left = count - first;
        bool is_first = is_cold && first == 0;
        if constexpr (kVectorRows >= 12) {
            if (left >= 12) {
                multiply_rows<Block, 12>(w, num_blocks, is_first, x, count, first, sums);
                first += 12;
                continue;
            }
            if (left >= 8) {
                multiply_rows<Block, 8>(w, num_blocks, is_first, x, count, first, sums);
                first += 8;
                continue;
            }
        }
        if (left >= 6) {
            multiply_rows<Block, 6>(w, num_blocks, is_first, x, count, first, sums);
            first += 6;
        } else if (left >= 4) {
            multiply_rows<Block, 4>(w, num_blocks, is_first, x, count, first, sums);
            first += 4;
        } else if (left >= 3) {
            multiply_rows<Block, 3>(w, num_blocks, is_first, x, count, first, sums);
            first += 3;
        } else if (left == 2) {
            multiply_rows<Block, 2>(w, num_blocks, is_first, x, count, first, sums);
            first += 2;
        } else {
            multiply_rows<Block, 1>(w, num_blocks, is_first, x, count, first, sums);
            first += 1;
        }
    }
}

#define FUNITEL_COMPILE(name)                                                                                     \
    template void multiply_all_rows(const Block##name* w, int num_blocks, bool is_cold, const RowBlock* x, int count, \
                                    F16 (*sums)[kPair]);

}  // namespace funitel
