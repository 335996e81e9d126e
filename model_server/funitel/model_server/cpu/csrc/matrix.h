// Weights in panels of sixteen outputs, and their product with a few rows of activations. Two panels lie together, input
// by input, so that the product of a row reads memory as one stream.
//
// Every output is a sum over the inputs in a fixed order (float kinds), one exact integer sum (int8), or one for each
// block in a fixed order (GGUF's), whatever the number of rows and threads: a row's result does not depend on what shares
// the batch.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "blocks.h"
#include "memory.h"
#include "vector.h"

namespace funitel {

enum Kind : int32_t { kFloat32 = 0, kFloat16 = 1, kInt8 = 2, kQ4_0 = 3, kQ4_1 = 4, kQ8_0 = 5 };

// The most rows multiplied at a time.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

constexpr int kPair = 2;  // panels that lie together

// Panels of a pair multiplied at a time, so that the accumulators fit in the registers.
constexpr int panels_at_once(int rows) {
#if defined(__AVX512F__)
    return kPair;
#else
    return rows <= 3 ? kPair : 1;
#endif
}

using OperandBlock = LevelBlock<kTileRows>;

constexpr bool has_blocks(Kind kind) { return kind >= kQ4_0; }

template <class B>
struct Of {
    using Block = B;
};

// Call `function` with the type of a kind's blocks.
template <class Function>
auto with_block(Kind kind, Function function) {
    switch (kind) {
        case kQ4_0: return function(Of<BlockQ4_0>());
        case kQ4_1: return function(Of<BlockQ4_1>());
        default: return function(Of<BlockQ8_0>());
    }
}

struct Matrix {
    Kind kind;
    int num_outputs;  // of one part
    int num_inputs;
    int num_parts;  // 2: gate and up, in alternate panels
    int num_panels;
    int depth;          // inputs, made even for int8
    size_t pair_bytes;  // of a pair of panels; the scales of int8 are at its end
    int levels = 0;     // int8: largest magnitude of a quantised activation
    uint8_t* data = nullptr;
    std::vector<float> bias;  // [num_panels * 16], empty for none

    Matrix(Kind kind, int outputs, int inputs, int parts)
        : kind(kind), num_outputs(outputs), num_inputs(inputs), num_parts(parts) {
        num_panels = (outputs + kLanes - 1) / kLanes * parts;
        depth = kind == kInt8 ? (inputs + 1) & ~1 : inputs;
        pair_bytes = weight_bytes() + (kind == kInt8 ? kPair * kLanes * sizeof(float) : 0);
    }

    // Take memory of `arena`, or where that is full some of its own.
    bool allocate(Arena& arena) {
        size_t size = pair_bytes * num_pairs();
        data = arena.take(size);
        if (data == nullptr && own_.grow(size)) data = own_.as<uint8_t>();
        return data != nullptr;
    }

    int num_pairs() const { return (num_panels + kPair - 1) / kPair; }
    size_t element_bytes() const { return kind == kFloat32 ? 4 : kind == kFloat16 ? 2 : 1; }
    // What one panel has for an input, a pair of inputs in int8, or a block.
    size_t step_bytes() const {
        if (has_blocks(kind)) return with_block(kind, [](auto of) { return sizeof(typename decltype(of)::Block); });
        return kLanes * element_bytes() * (kind == kInt8 ? 2 : 1);
    }
    int num_blocks() const { return depth / kBlockInputs; }
    int num_steps() const { return has_blocks(kind) ? num_blocks() : kind == kInt8 ? depth / 2 : depth; }
    size_t weight_bytes() const { return num_steps() * kPair * step_bytes(); }  // of a pair
    size_t num_bytes() const { return pair_bytes * num_pairs() + bias.size() * sizeof(float); }
    int lane_of(int output) const { return output % kLanes; }
    int panel_of(int part, int output) const { return output / kLanes * num_parts + part; }
    // The first step of a panel; the others follow, each kPair steps after the one before.
    uint8_t* panel(int index) const {
        return data + pair_bytes * (index / kPair) + step_bytes() * (index % kPair);
    }
    float* scales(int index) const {
        uint8_t* pair = data + pair_bytes * (index / kPair);
        return reinterpret_cast<float*>(pair + weight_bytes()) + index % kPair * kLanes;
    }

    // Take one output's weights [num_inputs], `stride` floats apart.
    void set_row(int part, int output, const float* source, size_t stride) {
        int index = panel_of(part, output), lane = lane_of(output);
        uint8_t* target = panel(index);
        if (kind == kFloat32) {
            float* values = reinterpret_cast<float*>(target);
            for (int i = 0; i < num_inputs; i++) values[place(i, lane)] = source[i * stride];
        } else if (kind == kFloat16) {
            Half* values = reinterpret_cast<Half*>(target);
            for (int i = 0; i < num_inputs; i++) {
                values[place(i, lane)].bits = _cvtss_sh(source[i * stride], _MM_FROUND_TO_NEAREST_INT);
            }
        } else {
            scales(index)[lane] = quantize_row(target, lane, source, stride);
        }
    }

    // Take one output's blocks as they lie in a GGUF.
    void set_blocks(int part, int output, const uint8_t* source) {
        uint8_t* start = panel(panel_of(part, output));
        with_block(kind, [&](auto of) {
            using Block = typename decltype(of)::Block;
            Block* target = reinterpret_cast<Block*>(start);
            for (int b = 0; b < num_blocks(); b++) target[b * kPair].take(lane_of(output), source + b * Block::kFileBytes);
        });
    }

    void set_bias(int part, int output, float value) {
        if (bias.empty()) bias.assign(size_t(num_panels) * kLanes, 0.0f);
        bias[size_t(panel_of(part, output)) * kLanes + lane_of(output)] = value;
    }

    // One weight, as the products use it.
    float at(int output, int input) const {
        int index = panel_of(0, output), lane = lane_of(output);
        const uint8_t* source = panel(index);
        if (kind == kFloat32) return reinterpret_cast<const float*>(source)[place(input, lane)];
        if (kind == kFloat16) return _cvtsh_ss(reinterpret_cast<const Half*>(source)[place(input, lane)].bits);
        if (kind == kInt8) return reinterpret_cast<const int8_t*>(source)[int8_place(input, lane)] * scales(index)[lane];
        return with_block(kind, [&](auto of) {
            using Block = typename decltype(of)::Block;
            return reinterpret_cast<const Block*>(source)[input / kBlockInputs * kPair].at(lane, input % kBlockInputs);
        });
    }

    // The largest sum of magnitudes of an output's weights in one panel.
    int64_t heaviest(int index) const {
        if (kind != kInt8) return 1;
        const int8_t* values = reinterpret_cast<const int8_t*>(panel(index));
        int32_t sums[kLanes * 2] = {};
        for (int i = 0; i < depth / 2; i++) {
            for (int j = 0; j < kLanes * 2; j++) sums[j] += std::abs(values[int8_place(i * 2, 0) + j]);
        }
        int32_t most = 1;
        for (int lane = 0; lane < kLanes; lane++) most = std::max(most, sums[lane * 2] + sums[lane * 2 + 1]);
        return most;
    }

    // The most levels for which no sum of products leaves 32 bits: the heaviest output's weights are the bound.
    void choose_levels(int64_t heaviest_output) {
        levels = static_cast<int>(std::min<int64_t>(32767, std::numeric_limits<int32_t>::max() / heaviest_output));
    }

    // Of a weight, from the start of its panel.
    static size_t place(int input, int lane) { return size_t(input) * kPair * kLanes + lane; }
    static size_t int8_place(int input, int lane) { return (size_t(input / 2) * kPair * kLanes + lane) * 2 + input % 2; }

  private:
    Memory own_;

    float quantize_row(uint8_t* target, int lane, const float* source, size_t stride) {
        float most = 0.0f;
        for (int i = 0; i < num_inputs; i++) most = std::max(most, std::fabs(source[i * stride]));
        float scale = most / 127.0f, inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int8_t* values = reinterpret_cast<int8_t*>(target);
        for (int i = 0; i < num_inputs; i++) {
            float level = std::nearbyint(source[i * stride] * inverse);
            values[int8_place(i, lane)] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, level)));
        }
        return scale;
    }
};

// Memory of an operand.
struct OperandMemory {
    Memory values;
    Memory scales;

    bool reserve(int rows, int inputs) {
        size_t depth = size_t(inputs + 1) & ~size_t(1), tiles = (size_t(rows) + kTileRows - 1) / kTileRows;
        return values.grow(tiles * kTileRows * depth * sizeof(float)) && scales.grow(rows * sizeof(float));
    }
};

// Activations as the kernels read them: [tile of rows][input][row of the tile], floats, or pairs of int16 with a scale per
// row. Tiles are as equal as can be, and the last is as narrow as it has rows: few rows take little of the caches.
struct Operand {
    uint8_t* values = nullptr;
    float* scales = nullptr;  // of rows
    int num_rows = 0;
    int tile_rows = 0;  // of all tiles but the last, which may have fewer

    void lie_in(const OperandMemory& memory) {
        values = memory.values.as<uint8_t>();
        scales = memory.scales.as<float>();
    }

    // Rows are to follow, as many as this.
    void begin(int rows) {
        num_rows = rows;
        int tiles = std::max(1, (rows + kTileRows - 1) / kTileRows);
        tile_rows = (rows + tiles - 1) / tiles;
    }

    int num_tiles() const { return (num_rows + tile_rows - 1) / tile_rows; }
    // Bytes of `values` that the rows take for `matrix`.
    size_t num_bytes(const Matrix& matrix) const {
        if (has_blocks(matrix.kind)) return size_t(num_tiles()) * matrix.num_blocks() * sizeof(OperandBlock);
        return size_t(num_rows) * matrix.num_steps() * sizeof(float);
    }
    int rows_of(int tile) const { return std::min(tile_rows, num_rows - tile * tile_rows); }

    // X is float, int32_t for pairs of int16, or OperandBlock, which has room for kTileRows rows.
    template <class X>
    X* tile(const Matrix& matrix, int index) const {
        return reinterpret_cast<X*>(values) + size_t(index) * matrix.num_steps() * (has_blocks(matrix.kind) ? 1 : tile_rows);
    }

    // Lay out row `row` of the activations for `matrix`: at least its depth, rounded up to 16, can be read.
    void set_row(const Matrix& matrix, int row, const float* x) {
        int index = row / tile_rows, place = row % tile_rows, rows = rows_of(index);
        if (has_blocks(matrix.kind)) {
            int zero = with_block(matrix.kind, [](auto of) { return decltype(of)::Block::kZero; });
            return set_levels(tile<OperandBlock>(matrix, index), place, x, matrix.num_blocks(), zero);
        }
        if (matrix.kind == kInt8) {
            scales[row] = quantize(matrix, x, tile<int32_t>(matrix, index) + place, rows);
            return;
        }
        float* target = tile<float>(matrix, index) + place;
        for (int i = 0; i < matrix.num_inputs; i++) target[size_t(i) * rows] = x[i];
    }

  private:
    // Write pairs of levels, `stride` apart; returns the size of a level, not a number where an input is none.
    static float quantize(const Matrix& matrix, const float* x, int32_t* target, size_t stride) {
        int n = matrix.num_inputs;
        F16 most = splat(0.0f), probe = splat(0.0f);
        for (int i = 0; i < n; i += kLanes) {
            F16 v = load(x + i, n - i);
            most = max(most, magnitude(v));
            probe = fma(v, splat(0.0f), probe);
        }
        float largest_value = largest(most);
        F16 inverse = splat(largest_value > kSmallest ? matrix.levels / largest_value : 0.0f);
        for (int i = 0; i < n; i += kLanes) {
            int16_t levels[kLanes];
            store_int16(levels, mul(load(x + i, n - i), inverse));
            for (int j = 0; j < kLanes && i + j < n; j += 2) {
                int32_t pair;
                std::memcpy(&pair, levels + j, sizeof pair);
                target[size_t(i + j) / 2 * stride] = pair;
            }
        }
        return largest_value / matrix.levels + sum(probe);
    }
};

// The weights of a step come from memory, and the processor's own prefetching stops at every page: ask for what is
// needed 3 KiB later.
inline void fetch(const void* source) {
    _mm_prefetch(static_cast<const char*>(source) + 3072, _MM_HINT_T0);
}

// Inputs summed in one go by the float kinds; the sums of such runs are then added in order. Rounding errors grow with
// the length of a sum, so two short levels lose less than one long one.
constexpr int kRun = 128;

// out[r][p] = the products of row r of a tile with panel p. `x` is the tile, `w` the first panel.
template <class W, int R, int P>
inline void multiply(const W* w, const float* x, int depth, F16 (&out)[R][P]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) out[r][p] = splat(0.0f);
    }
    for (int begin = 0; begin < depth; begin += kRun) {
        const int end = std::min(depth, begin + kRun);
        F16 sums[R][P];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sums[r][p] = splat(0.0f);
        }
        for (int i = begin; i < end; i++) {
            F16 weights[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const W* source = w + (size_t(i) * kPair + p) * kLanes;
                fetch(source);
                weights[p] = load(source);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                F16 value = splat(x[size_t(i) * R + r]);
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) sums[r][p] = fma(value, weights[p], sums[r][p]);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) out[r][p] = add(out[r][p], sums[r][p]);
        }
    }
}

#if defined(__AVX512F__)

// sum += pairs of weights times one pair of activations. In assembly because g++ would keep the sums in memory.
inline void add_products(__m512i& sum, __m512i weights, __m512i pair) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %[pair], %[weights], %[sum]" : [sum] "+v"(sum) : [weights] "v"(weights), [pair] "v"(pair));
#else
    __m512i product;
    asm("vpmaddwd %[pair], %[weights], %[product]\n\tvpaddd %[product], %[sum], %[sum]"
        : [sum] "+v"(sum), [product] "=&v"(product)
        : [weights] "v"(weights), [pair] "v"(pair));
#endif
}

template <int R, int P>
inline void multiply(const int8_t* w, const int32_t* x, int depth, F16 (&out)[R][P]) {
    __m512i sums[R][P];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sums[r][p] = _mm512_setzero_si512();
    }
    for (int i = 0; i < depth / 2; i++) {
        __m512i weights[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const int8_t* source = w + (size_t(i) * kPair + p) * 2 * kLanes;
            if (p == 0) fetch(source);
            weights[p] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            __m512i pair = _mm512_set1_epi32(x[size_t(i) * R + r]);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) add_products(sums[r][p], weights[p], pair);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) out[r][p].v = _mm512_cvtepi32_ps(sums[r][p]);
    }
}

#else

// sum += pairs of weights times one pair of activations. In assembly because g++ would add several steps together first
// and so run out of registers.
inline void add_products(__m256i& sum, __m256i weights, __m256i pair) {
    __m256i product;
    asm("vpmaddwd %[pair], %[weights], %[product]\n\tvpaddd %[product], %[sum], %[sum]"
        : [sum] "+x"(sum), [product] "=&x"(product)
        : [weights] "x"(weights), [pair] "x"(pair));
}

template <int R, int P>
inline void multiply(const int8_t* w, const int32_t* x, int depth, F16 (&out)[R][P]) {
    __m256i sums[R][P][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sums[r][p][0] = sums[r][p][1] = _mm256_setzero_si256();
    }
    for (int i = 0; i < depth / 2; i++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const __m128i* source = reinterpret_cast<const __m128i*>(w + (size_t(i) * kPair + p) * 2 * kLanes);
            if (p == 0) fetch(source);
            __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(source));
            __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128(source + 1));
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                __m256i pair = _mm256_set1_epi32(x[size_t(i) * R + r]);
                add_products(sums[r][p][0], first, pair);
                add_products(sums[r][p][1], second, pair);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            out[r][p] = {_mm256_cvtepi32_ps(sums[r][p][0]), _mm256_cvtepi32_ps(sums[r][p][1])};
        }
    }
}

#endif

// Call `finish(row of the tile, panel, sums)` for R rows of one tile and a pair of panels.
template <class W, class X, int R, class Finish>
void multiply_tile(const Matrix& matrix, const X* x, int pair, const float* row_scales, Finish finish) {
    constexpr int P = panels_at_once(R);
    for (int begin = 0; begin < kPair; begin += P) {
        const int first = pair * kPair + begin;
        F16 sums[R][P];
        multiply(reinterpret_cast<const W*>(matrix.panel(first)), x, matrix.depth, sums);
        for (int r = 0; r < R; r++) {
            for (int p = first; p < std::min(first + P, matrix.num_panels); p++) {
                F16 value = sums[r][p - first];
                if (matrix.kind == kInt8) value = mul(value, mul(splat(row_scales[r]), load(matrix.scales(p))));
                if (!matrix.bias.empty()) value = add(value, load(matrix.bias.data() + size_t(p) * kLanes));
                finish(r, p, value);
            }
        }
    }
}

}  // namespace funitel
