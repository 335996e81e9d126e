// The product of a few rows of activations with panels of blocks of codes, for registers of 256 bits, of which there are
// sixteen; wide_product.h has the one for 512.
//
// Every loop over registers is a call for each index at compile time (`each`): an array with an index that g++ learns only
// when it unrolls loops is kept in memory. On a core of an AMD EPYC (Zen 3) six rows by int8 are 1.5 times as fast for it.
#pragma once

#include <algorithm>
#include <utility>

#include "blocks.h"
#include "levels.h"
#include "memory.h"

namespace funitel {

template <class Work, int... I>
inline FUNITEL_INLINE void each_of(std::integer_sequence<int, I...>, Work&& work) {
    (work(std::integral_constant<int, I>()), ...);
}

// Call `work` with 0, 1, ... N - 1, each a constant.
template <int N, class Work>
inline FUNITEL_INLINE void each(Work&& work) {
    each_of(std::make_integer_sequence<int, N>(), work);
}

// Keep g++ from adding in another order, with more sums at once than there are registers.
inline Bytes in_order(Bytes sum) {
    asm("" : "+x"(sum));
    return sum;
}

// Ask for the lines that are needed two blocks of 256 inputs later, or eight of 32: the share of 32 inputs of one part.
// Requests that are spread over the whole block keep memory busy throughout: two cores of an AMD EPYC (Zen 3) read 28 GB/s
// of Q4_K, without them 17.
template <class Block>
inline void fetch_share(const Block* w, int index) {
    constexpr int ahead = Block::kInputs > kBlockInputs ? 2 : 8;
    constexpr int shares = kParts * Block::kInputs / kBlockInputs;
    constexpr int count = (int(sizeof(Block)) / 64 + shares - 1) / shares;
    const char* start = reinterpret_cast<const char*>(w + ahead) + index * count * 64;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) asm volatile("prefetchnta %0" : : "m"(start[i * 64]));  // g++ drops _mm_prefetch here
}

// out[r][p] += the products of rows r, levels of one plane, with 32 inputs of block w, panels from `panel` on.
template <class Block, int R, int P>
inline FUNITEL_INLINE void add_plane(const Block& w, const typename Block::Scales (&common)[P], int sub, int part,
                                     const LevelPlane* x, Part (&out)[R][P]) {
    constexpr int halves = kBlockInputs / Block::kScaleInputs, quads = kQuads / halves;
    constexpr int fitting = std::min(quads_fitting(Block::kMostCode), quads);
    constexpr int next = sizeof(RowBlock) / sizeof(LevelPlane);  // the next row's plane
    using Code = Codes<Block::kMostCode>;
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        const int which = halves == 1 ? kWhole : half;
        Bytes totals[R][P], recent[R][P];
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++) {
            const int q = half * quads + i;
            const Code codes[P] = {Code(w.quad(0, sub, q, part)), Code(w.quad(P - 1, sub, q, part))};
            each<R * P>([&](auto index) FUNITEL_INLINE {
                constexpr int r = index / P, p = index % P;
                Bytes levels = splat_words(x[r * next].words[q]);
                if constexpr (is_wide(Block::kMostCode)) levels = codes[p].signed_levels(levels);
                const Bytes products = pair_products(codes[p].bytes, levels);
                recent[r][p] = i % fitting == 0 ? products : in_order(add_halves(recent[r][p], products));
                if (i % fitting == fitting - 1) {
                    const Bytes sums = sum_pairs(recent[r][p]);
                    totals[r][p] = i < fitting ? sums : in_order(add_words(totals[r][p], sums));
                }
            });
        }
        Part scales[P], minimums[P];
        each<P>([&](auto p) FUNITEL_INLINE {
            if constexpr (Block::kHasScales) scales[p] = Block::scale(w, common[p], p, sub, half, part);
            if constexpr (Block::kHasMinimums) minimums[p] = Block::minimum(w, common[p], p, sub, half, part);
        });
        each<R * P>([&](auto index) FUNITEL_INLINE {
            constexpr int r = index / P, p = index % P;
            const LevelPlane& row = x[r * next];
            Bytes total = totals[r][p];
            if constexpr (Block::kZero != 0) {
                total = add_words(total, times_power_of_two<Block::kZero>(splat_words(row.totals[which])));
            }
            Part factor = splat_part(row.scale);
            if constexpr (Block::kHasScales) factor = mul(scales[p], factor);
            Part sum = fma(to_part(total), factor, out[r][p]);
            if constexpr (Block::kHasMinimums) sum = fma(minimums[p], splat_part(row.sums[which]), sum);
            out[r][p] = sum;
        });
    }
}

// out[r][p] = the products of rows r with both panels of a pair; of the rows the blocks are `stride` apart.
// `is_cold`: the blocks are not in a cache yet.
template <class Block, int R, int P>
inline void multiply_blocks(const Block* w, int num_blocks, int, bool is_cold, const RowBlock* x, int stride, F16 (&out)[R][P]) {
    constexpr int subs = Block::kInputs / kBlockInputs;
    Part sums[kParts][R][P];
    each<kParts * R * P>([&](auto i) FUNITEL_INLINE { sums[i / (R * P)][i / P % R][i % P] = splat_part(0.0f); });
    for (int b = 0; b < num_blocks; b++, w++, x += size_t(stride) * subs) {
        each<kParts>([&](auto part) FUNITEL_INLINE {
            using Scales = typename Block::Scales;
            const Scales common[P] = {Scales(*w, 0, part), Scales(*w, P - 1, part)};
            for (int sub = 0; sub < subs; sub++) {
                if (is_cold) fetch_share(w, part * subs + sub);
                const RowBlock* rows = x + size_t(stride) * sub;
                const LevelPlane* plane = &rows->low;
                for (int left = 1 + has_high<R>(rows); left > 0; left--, plane++) {
                    const Block* block = w;
                    asm("" : "+r"(block), "+r"(left));  // codes of the first plane are not kept for the second
                    add_plane<Block, R, P>(*block, common, sub, part, plane, sums[part]);
                }
            }
        });
    }
    each<R * P>([&](auto i) FUNITEL_INLINE { out[i / P][i % P] = {sums[0][i / P][i % P], sums[1][i / P][i % P]}; });
}

}  // namespace funitel
