// GGUF's blocks as they are: 32 inputs of an output share a scale, and in some types a minimum. A panel holds the blocks
// of sixteen outputs side by side; no weight is rounded or expanded on the way.
// Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <cstring>

#include "vector.h"

namespace funitel {

constexpr int kBlockInputs = 32;
constexpr int kGroupPairs = 4;  // pairs of inputs that are read together
constexpr int kGroups = kBlockInputs / 2 / kGroupPairs;

inline Half read_half(const uint8_t* source) {
    Half value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

// Four bits for each weight. A word has those of four inputs of an output, two inputs apart: shifted by 0, 4, 8 and 12
// bits and masked, a row of words is what four pairs of activations are multiplied by.
struct Nibbles {
    uint16_t words[kGroups][2 * kLanes];

    // Take one output's from a file, which keeps inputs i and i + 16 in a byte.
    void take(int lane, const uint8_t* source) {
        for (int i = 0; i < kBlockInputs; i++) {
            int value = i < kBlockInputs / 2 ? source[i] & 15 : source[i - kBlockInputs / 2] >> 4;
            words[i / 8][lane * 2 + i % 2] |= static_cast<uint16_t>(value << shift(i));  // was zero
        }
    }

    int at(int lane, int input) const { return words[input / 8][lane * 2 + input % 2] >> shift(input) & 15; }

  private:
    static int shift(int input) { return input % 8 / 2 * 4; }
};

// A weight is scale x (code - 8).
struct BlockQ4_0 {
    static constexpr size_t kFileBytes = 18;
    static constexpr int kZero = 8;
    static constexpr bool kHasMinimums = false;
    Half scales[kLanes];
    Nibbles codes;

    void take(int lane, const uint8_t* source) {
        scales[lane] = read_half(source);
        codes.take(lane, source + 2);
    }
    float at(int lane, int input) const { return _cvtsh_ss(scales[lane].bits) * float(codes.at(lane, input) - kZero); }
};

// A weight is scale x code + minimum.
struct BlockQ4_1 {
    static constexpr size_t kFileBytes = 20;
    static constexpr int kZero = 0;
    static constexpr bool kHasMinimums = true;
    Half scales[kLanes];
    Half minimums[kLanes];
    Nibbles codes;

    void take(int lane, const uint8_t* source) {
        scales[lane] = read_half(source);
        minimums[lane] = read_half(source + 2);
        codes.take(lane, source + 4);
    }
    float at(int lane, int input) const {
        return _cvtsh_ss(scales[lane].bits) * float(codes.at(lane, input)) + _cvtsh_ss(minimums[lane].bits);
    }
};

// A weight is scale x code, the code a signed byte.
struct BlockQ8_0 {
    static constexpr size_t kFileBytes = 34;
    static constexpr int kZero = 0;
    static constexpr bool kHasMinimums = false;
    Half scales[kLanes];
    int8_t codes[kBlockInputs / 2][2 * kLanes];  // [pair of inputs][output, input of the pair]

    void take(int lane, const uint8_t* source) {
        scales[lane] = read_half(source);
        for (int i = 0; i < kBlockInputs; i++) codes[i / 2][lane * 2 + i % 2] = static_cast<int8_t>(source[2 + i]);
    }
    float at(int lane, int input) const {
        return _cvtsh_ss(scales[lane].bits) * float(codes[input / 2][lane * 2 + input % 2]);
    }
};

// Activations of 32 inputs for a tile of rows, as int16 levels with a scale of their own for each row: with so many
// levels for so few inputs a sum of products neither leaves 32 bits nor loses what the blocks can tell.
template <int Rows>
struct LevelBlock {
    int32_t pairs[kBlockInputs / 2][Rows];
    float scales[Rows];   // the size of a level
    int32_t starts[Rows];  // what the sum of products starts at: zero point x sum of levels, negative
    float sums[Rows];     // of the activations, for minimums
};

// Lay out a row of activations; `zero` is the zero point of the weights. The scale is not a number where an input is none.
template <int Rows>
void set_levels(LevelBlock<Rows>* target, int row, const float* x, int num_blocks, int zero) {
    constexpr float most_levels = 32767.0f;
    for (int b = 0; b < num_blocks; b++, x += kBlockInputs) {
        F16 first = load(x), second = load(x + kLanes), none = splat(0.0f);
        float probe = sum(fma(first, none, mul(second, none)));
        float most = largest(max(max(none, magnitude(first)), magnitude(second)));
        F16 inverse = splat(most > kSmallest ? most_levels / most : 0.0f);
        int16_t levels[kBlockInputs];
        store_int16(levels, mul(first, inverse));
        store_int16(levels + kLanes, mul(second, inverse));
        int32_t total = 0;
        for (int i = 0; i < kBlockInputs; i += 2) {
            int32_t pair;
            std::memcpy(&pair, levels + i, sizeof pair);
            target[b].pairs[i / 2][row] = pair;
            total += levels[i] + levels[i + 1];
        }
        float scale = most / most_levels + probe;
        target[b].scales[row] = scale;
        target[b].starts[row] = -zero * total;
        target[b].sums[row] = scale * static_cast<float>(total);
    }
}

}  // namespace funitel
