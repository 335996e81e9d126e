// The product of a few rows of activations with panels of blocks of codes, for registers of 512 bits; narrow_product.h has
// the one for 256. Few rows wait for blocks of 256 inputs, see `touch`.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "levels.h"
#include "memory.h"

namespace funitel {

// Ask for the lines of 32 inputs of a block, as `fetch` does.
template <class Block>
inline void fetch_some(const Block* w, int sub) {
    constexpr size_t size = sizeof(Block) * kBlockInputs / Block::kInputs;
    const uint8_t* start = reinterpret_cast<const uint8_t*>(w) + sub * size;
#pragma GCC unroll 16
    for (size_t i = 0; i < size; i += 64) fetch(start + i);
}

// out[r][p] += the products of rows r, levels of one plane, with 32 inputs of block w, panels from `panel` on.
template <class Block, int R, int P>
inline void add_plane(const Block& w, const typename Block::Scales& first, const typename Block::Scales& second, int panel,
                      int sub, int part, const LevelPlane* x, F16 (&out)[R][P]) {
    using Code = Codes<Block::kMostCode>;
    using Sum = DotSum<Block::kMostCode, Block::kZero>;
    constexpr int halves = kBlockInputs / Block::kScaleInputs, quads = kQuads / halves;
    constexpr int next = sizeof(RowBlock) / sizeof(LevelPlane);  // the next row's plane
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        const int which = halves == 1 ? kWhole : half;
        Sum sums[R][P];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) sums[r][p].start(&x[r * next].totals[which]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++) {
            const int q = half * quads + i;
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                const Code codes(w.quad(panel + p, sub, q, part));
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    sums[r][p].add(codes, &x[r * next].words[q]);
                    sums[r][p].settle(i + 1);
                }
            }
        }
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
            const typename Block::Scales& common = p == 0 ? first : second;
            Part scale, minimum;
            if constexpr (Block::kHasScales) scale = Block::scale(w, common, panel + p, sub, half, part);
            if constexpr (Block::kHasMinimums) minimum = Block::minimum(w, common, panel + p, sub, half, part);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const LevelPlane& row = x[r * next];
                Part factor = splat_part(row.scale);
                if constexpr (Block::kHasScales) factor = mul(scale, factor);
                Part& target = part_of(out[r][p], part);
                target = fma(to_part(sums[r][p].total()), factor, target);
                if constexpr (Block::kHasMinimums) target = fma(minimum, splat_part(row.sums[which]), target);
            }
        }
    }
}

// Blocks to touch at a time where they come from memory, 0 for none. Few rows wait for blocks of 256 inputs, which are read
// in another order than they lie in, and more rows for blocks of bytes, which are large; a row alone reads those in order,
// and what else there is arrives by `fetch` while products are made. Measured; see `touch`.
template <class Block, int R>
constexpr int blocks_touched() {
    if constexpr (Block::kInputs > kBlockInputs) {
        return R <= Block::kTouchedRows ? 1 : 0;
    } else {
        constexpr bool has_bytes = sizeof(Block) >= kBlockInputs * kPair * kLanes;
        return !has_bytes || R == 1 ? 0 : R >= 8 ? 16 : 4;
    }
}

// out[r][p] = the products of rows r with panels of a pair, from `panel` on; of the rows the blocks are `stride` apart.
// `is_cold`: the blocks are not in a cache yet.
template <class Block, int R, int P>
inline void multiply_blocks(const Block* w, int num_blocks, int panel, bool is_cold, const RowBlock* x, int stride,
                            F16 (&out)[R][P]) {
    constexpr int subs = Block::kInputs / kBlockInputs;
    constexpr int touched = blocks_touched<Block, R>();
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) out[r][p] = splat(0.0f);
    }
    for (int b = 0; b < num_blocks; b++, w++, x += size_t(stride) * subs) {
        if constexpr (touched > 0) {
            if (is_cold && b % touched == 0) touch(w, sizeof(Block) * std::min(touched, num_blocks - b));
        }
#pragma GCC unroll 2
        for (int part = 0; part < kParts; part++) {
            const typename Block::Scales first(*w, panel, part), second(*w, panel + P - 1, part);
            for (int sub = 0; sub < subs; sub++) {
                if (touched == 0 && panel == 0 && part == 0) fetch_some(w, sub);
                const RowBlock* rows = x + size_t(stride) * sub;
                const int num_planes = 1 + has_high<R>(rows);
                for (int plane = 0; plane < num_planes; plane++) {
                    add_plane<Block, R, P>(*w, first, second, panel, sub, part, &rows->low + plane, out);
                }
            }
        }
    }
}

}  // namespace funitel
