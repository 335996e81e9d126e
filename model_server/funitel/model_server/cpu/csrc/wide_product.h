// The product of a few rows of activations with panels of blocks of codes, for registers of 512 bits; narrow_product.h has
// the one for 256.
#pragma once

#include "blocks.h"
#include "levels.h"

namespace funitel {

// Ask for the lines that are needed 12 KiB later: the share of 32 inputs. They come to the second cache, from which a core
// reads faster than it multiplies: in the first they drive out levels, and on an AMD EPYC (Zen 4) eight rows are 1.3 to 1.6
// times as fast without that. A row alone reads blocks of 32 inputs in the order in which they lie: the processor's own
// prefetching is faster.
template <class Block, int R>
inline void fetch_share(const Block* w, int sub) {
    if constexpr (R > 1 || Block::kInputs > kBlockInputs) {
        constexpr int ahead = 12288, lines = (sizeof(Block) * kBlockInputs / Block::kInputs + 63) / 64;
        const char* start = reinterpret_cast<const char*>(w) + ahead + sub * lines * 64;
#pragma GCC unroll 32
        for (int i = 0; i < lines; i++) asm volatile("prefetcht1 %0" : : "m"(start[i * 64]));  // g++ drops _mm_prefetch here
    }
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

// out[r][p] = the products of rows r with panels of a pair, from `panel` on; of the rows the blocks are `stride` apart.
// `is_cold`: the blocks are not in a cache yet.
template <class Block, int R, int P>
inline void multiply_blocks(const Block* w, int num_blocks, int panel, bool is_cold, const RowBlock* x, int stride,
                            F16 (&out)[R][P]) {
    constexpr int subs = Block::kInputs / kBlockInputs;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) out[r][p] = splat(0.0f);
    }
    for (int b = 0; b < num_blocks; b++, w++, x += size_t(stride) * subs) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; part++) {
            const typename Block::Scales first(*w, panel, part), second(*w, panel + P - 1, part);
            for (int sub = 0; sub < subs; sub++) {
                if (is_cold && part == 0) fetch_share<Block, R>(w, sub);
                const RowBlock* rows = x + size_t(stride) * sub;
                const LevelPlane* plane = &rows->low;
                for (int left = 1 + has_high<R>(rows); left > 0; left--, plane++) {
                    const Block* block = w;
                    asm("" : "+r"(block), "+r"(left));  // codes of the first plane are not kept for the second
                    add_plane<Block, R, P>(*block, first, second, panel, sub, part, plane, out);
                }
            }
        }
    }
}

}  // namespace funitel
