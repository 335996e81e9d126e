// Weights in panels of sixteen outputs. Two panels lie together, so that the product of a row reads memory as one stream:
// floating-point weights input by input, codes block by block.
//
// Every output is a sum over the inputs in a fixed order, whatever the number of rows and threads: a row's result does not
// depend on what shares the batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "affine_blocks.h"
#include "blocks.h"
#include "memory.h"
#include "outliers.h"
#include "vector.h"

namespace funitel {

// Numbered as in precision.py.
enum Kind : int32_t {
    kFloat32, kFloat16, kBFloat16, kInt8, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL,
    kIQ4_XS, kMXFP4, kQ8_B32T1, kQ6_B64T1, kQ5_B64T1, kQ4_B32T1, kQ4_B64T1, kQ3H_B64T1, kQ3_B32T1, kQ2_B32T1,
    kA16W8_G32, kA16W8_G64, kA16W8_G128, kA16W8_G256, kA16W4_G32, kA16W4_G64, kA16W4_G128, kA16W4_G256
};

// Whether the kind is made of codes; the others are floating-point numbers.
constexpr bool has_codes(Kind kind) { return kind >= kInt8; }

template <class T>
struct Of {
    using Type = T;
};

// Kinds made of codes, each with blocks of the type Block<name>; the products of each list are compiled in a file of their own.
#define FUNITEL_OLD_GGUF(EACH) EACH(Int8) EACH(Q4_0) EACH(Q4_1) EACH(Q5_0) EACH(Q5_1) EACH(Q8_0) EACH(IQ4_NL) EACH(MXFP4)
#define FUNITEL_K_QUANTS(EACH) EACH(Q2_K) EACH(Q3_K) EACH(Q4_K) EACH(Q5_K) EACH(Q6_K) EACH(IQ4_XS)
#define FUNITEL_MIXED(EACH)                                                                                              \
    EACH(Q8_B32T1) EACH(Q6_B64T1) EACH(Q5_B64T1) EACH(Q4_B32T1) EACH(Q4_B64T1) EACH(Q3H_B64T1) EACH(Q3_B32T1) EACH(Q2_B32T1)
#define FUNITEL_GROUPED(EACH)                                                                                            \
    EACH(A16W8_G32) EACH(A16W8_G64) EACH(A16W8_G128) EACH(A16W8_G256)                                                    \
    EACH(A16W4_G32) EACH(A16W4_G64) EACH(A16W4_G128) EACH(A16W4_G256)

// Call `function` with the type of a kind's blocks of codes.
template <class Function>
auto with_block(Kind kind, Function function) {
    switch (kind) {
#define FUNITEL_CASE(name) \
    case k##name: return function(Of<Block##name>());
        FUNITEL_OLD_GGUF(FUNITEL_CASE)
        FUNITEL_K_QUANTS(FUNITEL_CASE)
        FUNITEL_MIXED(FUNITEL_CASE)
        FUNITEL_GROUPED(FUNITEL_CASE)
#undef FUNITEL_CASE
        default: std::abort();  // a kind of floating-point numbers
    }
}

// The same with the type of a kind's floating-point weights.
template <class Function>
auto with_float(Kind kind, Function function) {
    switch (kind) {
        case kFloat16: return function(Of<Half>());
        case kBFloat16: return function(Of<Brain>());
        default: return function(Of<float>());
    }
}

inline void set_number(float& target, float value) { target = value; }
inline void set_number(Half& target, float value) { target.bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline void set_number(Brain& target, float value) { target = to_brain(value); }
inline float number_of(float value) { return value; }
inline float number_of(Half value) { return to_float(value); }
inline float number_of(Brain value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

struct Matrix {
    Kind kind;
    int num_outputs;  // of one part
    int num_inputs;
    int num_parts;  // 2: gate and up, in alternate panels
    int num_panels;
    size_t pair_bytes;  // of a pair of panels; the scales of int8 are at its end
    uint8_t* data = nullptr;
    std::vector<float> bias;  // [num_panels * 16], empty for none
    Outliers outliers;        // beside blocks; empty for none

    Matrix(Kind kind, int outputs, int inputs, int parts)
        : kind(kind), num_outputs(outputs), num_inputs(inputs), num_parts(parts) {
        num_panels = divide_up(outputs, kLanes) * parts;
        pair_bytes = weight_bytes() + (kind == kInt8 ? kPair * kLanes * sizeof(float) : 0);
    }

    // Take memory of `arena`, or where that is full some of its own.
    bool allocate(Arena& arena) {
        size_t size = pair_bytes * num_pairs();
        data = arena.take(size);
        if (data == nullptr && own_.grow(size)) data = own_.as<uint8_t>();
        return data != nullptr;
    }

    int num_pairs() const { return divide_up(num_panels, kPair); }
    size_t num_bytes() const {
        return pair_bytes * num_pairs() + bias.size() * sizeof(float) + outliers.num_bytes();
    }
    // Blocks of a pair; of int8 the last may be filled up with zeros.
    int num_blocks() const {
        return with_block(kind, [this](auto of) {
            constexpr int inputs = decltype(of)::Type::kInputs;
            return divide_up(num_inputs, inputs);
        });
    }
    uint8_t* pair(int index) const { return data + pair_bytes * index; }
    // The scales of a panel of int8.
    float* scales(int panel) const {
        return reinterpret_cast<float*>(pair(panel / kPair) + weight_bytes()) + panel % kPair * kLanes;
    }
    int panel_of(int part, int output) const { return output / kLanes * num_parts + part; }

    // Take one output's weights [num_inputs], `stride` floats apart.
    void set_row(int part, int output, const float* source, size_t stride) {
        int panel = panel_of(part, output), lane = output % kLanes;
        uint8_t* start = pair(panel / kPair);
        if (kind == kInt8) {
            scales(panel)[lane] = quantize_row(reinterpret_cast<BlockInt8*>(start), panel % kPair, lane, source, stride);
            return;
        }
        with_float(kind, [&](auto of) {
            auto* values = reinterpret_cast<typename decltype(of)::Type*>(start);
            for (int i = 0; i < num_inputs; i++) set_number(number_at(values, panel, lane, i), source[i * stride]);
        });
    }

    // Take one output's blocks, or 16-bit numbers, as they lie in a GGUF.
    void set_blocks(int part, int output, const uint8_t* source) {
        int panel = panel_of(part, output), lane = output % kLanes;
        uint8_t* start = pair(panel / kPair);
        if (!has_codes(kind)) {
            with_float(kind, [&](auto of) {
                using Number = typename decltype(of)::Type;
                Number* values = reinterpret_cast<Number*>(start);
                for (int i = 0; i < num_inputs; i++) {
                    std::memcpy(&number_at(values, panel, lane, i), source + i * sizeof(Number), sizeof(Number));
                }
            });
            return;
        }
        with_block(kind, [&](auto of) {
            using Block = typename decltype(of)::Type;
            if constexpr (Block::kHasScales) {
                Block* target = reinterpret_cast<Block*>(start);
                for (int b = 0; b < num_blocks(); b++) target[b].take(panel % kPair, lane, source + b * Block::kFileBytes);
            }
        });
    }

    // Take the outliers of an output, ascending by their inputs; `finish_outliers` follows those of the last.
    void set_outliers(int part, int output, int count, const uint16_t* inputs, const uint16_t* deltas) {
        outliers.take(panel_of(part, output) * kLanes + output % kLanes, count, inputs, deltas);
    }
    bool finish_outliers(Arena& arena) { return outliers.finish(num_pairs(), arena); }

    void set_bias(int part, int output, float value) {
        if (bias.empty()) bias.assign(size_t(num_panels) * kLanes, 0.0f);
        bias[size_t(panel_of(part, output)) * kLanes + output % kLanes] = value;
    }

    // The weights [num_inputs] of an output of the first part, as the products use them, times `factor`.
    void read_row(int output, float factor, float* target) const {
        int panel = panel_of(0, output), lane = output % kLanes;
        const uint8_t* start = pair(panel / kPair);
        if (!has_codes(kind)) {
            with_float(kind, [&](auto of) {
                auto* values = reinterpret_cast<const typename decltype(of)::Type*>(start);
                for (int i = 0; i < num_inputs; i++) target[i] = number_of(number_at(values, panel, lane, i)) * factor;
            });
            return;
        }
        if (kind == kInt8) factor *= scales(panel)[lane];
        with_block(kind, [&](auto of) {
            using Block = typename decltype(of)::Type;
            const Block* blocks = reinterpret_cast<const Block*>(start);
            for (int i = 0; i < num_inputs; i++) {
                target[i] = blocks[i / Block::kInputs].at(panel % kPair, lane, i % Block::kInputs) * factor;
            }
        });
        outliers.add_to(panel * kLanes + lane, factor, target);
    }

  private:
    // Of a pair, without the scales of int8.
    size_t weight_bytes() const {
        if (!has_codes(kind)) {
            return with_float(kind, [this](auto of) {
                using Number = typename decltype(of)::Type;
                size_t inputs = divide_up(num_inputs, kTogether<Number>) * kTogether<Number>;
                return sizeof(Number) * inputs * kPair * kLanes;
            });
        }
        return num_blocks() * with_block(kind, [](auto of) { return sizeof(typename decltype(of)::Type); });
    }

    // A panel's floating-point weight for an input, of the pair's `values`.
    template <class Number>
    static Number& number_at(Number* values, int panel, int lane, int input) {
        constexpr int each = kTogether<std::remove_const_t<Number>>;
        return values[(size_t(input / each) * kPair * kLanes + panel % kPair * kLanes + lane) * each + input % each];
    }

    // Returns the scale. Memory is zero before, which is not the code of zero: all inputs of all blocks are set.
    float quantize_row(BlockInt8* target, int panel, int lane, const float* source, size_t stride) const {
        float most = 0.0f;
        for (int i = 0; i < num_inputs; i++) most = std::max(most, std::fabs(source[i * stride]));
        float scale = most / 127.0f, inverse = most > 0.0f ? 127.0f / most : 0.0f;
        for (int i = 0; i < num_blocks() * kBlockInputs; i++) {
            float level = i < num_inputs ? std::nearbyint(source[i * stride] * inverse) : 0.0f;
            int code = static_cast<int>(std::min(127.0f, std::max(-127.0f, level)));
            target[i / kBlockInputs].codes.set(panel, lane, i % kBlockInputs, code);
        }
        return scale;
    }

    Memory own_;
};

}  // namespace funitel
