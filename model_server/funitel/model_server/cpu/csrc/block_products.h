// The product of a few rows of activations with panels of GGUF blocks. Within a block sums are exact integers; blocks are
// added in order, so that a row's result does not depend on what shares the batch.
#pragma once

#include "blocks.h"
#include "matrix.h"

namespace funitel {

// Sixteen outputs' pairs of weights as int16: one register, or two.
#if defined(__AVX512F__)

using Words = __m512i;
constexpr int kParts = 1;
inline Words load_words(const uint16_t* p) { return _mm512_loadu_si512(p); }
inline Words low_nibbles(Words x) { return _mm512_and_si512(x, _mm512_set1_epi16(15)); }
inline Words next_nibbles(Words x) { return _mm512_srli_epi16(x, 4); }
inline Words widen(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Words splat_pair(int32_t pair) { return _mm512_set1_epi32(pair); }
inline F16 to_floats(const Words (&sums)[kParts]) { return {_mm512_cvtepi32_ps(sums[0])}; }

#else

using Words = __m256i;
constexpr int kParts = 2;
inline Words load_words(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Words low_nibbles(Words x) { return _mm256_and_si256(x, _mm256_set1_epi16(15)); }
inline Words next_nibbles(Words x) { return _mm256_srli_epi16(x, 4); }
inline Words widen(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Words splat_pair(int32_t pair) { return _mm256_set1_epi32(pair); }
inline F16 to_floats(const Words (&sums)[kParts]) {
    return {_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])};
}

#endif

constexpr int kPartWords = 2 * kLanes / kParts;

// Weights of eight inputs, a pair of inputs at a time.
struct NibbleReader {
    Words words;
    Words next() {
        Words weights = low_nibbles(words);
        words = next_nibbles(words);
        return weights;
    }
};
inline NibbleReader reader(const Nibbles& codes, int group, int part) {
    return {load_words(codes.words[group] + part * kPartWords)};
}

struct ByteReader {
    const int8_t* at;
    Words next() {
        Words weights = widen(at);
        at += 2 * kLanes;
        return weights;
    }
};
inline ByteReader reader(const int8_t (&codes)[kBlockInputs / 2][2 * kLanes], int group, int part) {
    return {codes[group * kGroupPairs] + part * kPartWords};
}

// sums[r][p] += the products of row r with block p of as many panels.
template <class Block, int R, int P>
inline void add_block(const Block* w, const OperandBlock& x, Words (&sums)[R][P][kParts]) {
    // Part by part: the sums of both would not fit in the registers of AVX2.
#pragma GCC unroll 2
    for (int part = 0; part < kParts; part++) {
        for (int group = 0; group < kGroups; group++) {
            decltype(reader(w->codes, 0, 0)) readers[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) readers[p] = reader(w[p].codes, group, part);
#pragma GCC unroll 4
            for (int i = 0; i < kGroupPairs; i++) {
                Words weights[P];
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) weights[p] = readers[p].next();
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    Words pair = splat_pair(x.pairs[group * kGroupPairs + i][r]);
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) add_products(sums[r][p][part], weights[p], pair);
                }
            }
        }
    }
}

// As the other kinds' of matrix.h; found by the type of the weights.
template <class Block, int R, int P>
inline void multiply(const Block* w, const OperandBlock* x, int depth, F16 (&out)[R][P]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) out[r][p] = splat(0.0f);
    }
    for (int b = 0; b < depth / kBlockInputs; b++, w += kPair, x++) {
        Words sums[R][P][kParts];
        F16 scales[P], minimums[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const Block& block = w[p];
            for (size_t i = 0; i < sizeof(Block); i += 64) fetch(reinterpret_cast<const uint8_t*>(&block) + i);
            scales[p] = load(block.scales);
            if constexpr (Block::kHasMinimums) minimums[p] = load(block.minimums);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            Words start = splat_pair(x->starts[r]);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                for (int part = 0; part < kParts; part++) sums[r][p][part] = start;
            }
        }
        add_block(w, *x, sums);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            F16 scale = splat(x->scales[r]), total = splat(x->sums[r]);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                out[r][p] = fma(scales[p], mul(to_floats(sums[r][p]), scale), out[r][p]);
                if constexpr (Block::kHasMinimums) out[r][p] = fma(minimums[p], total, out[r][p]);
            }
        }
    }
}

}  // namespace funitel
