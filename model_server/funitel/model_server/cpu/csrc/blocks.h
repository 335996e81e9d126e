// GGUF's blocks as they are: 32 inputs of an output share a scale, and in some types a minimum; in the types with a "K"
// 256 inputs lie together, with scales of parts of them in few bits. Two panels of sixteen outputs have their blocks side
// by side; no weight is rounded on the way. Codes lie in quads of inputs, see dot_products.h.
//
// A block type has, beside `take` for one output's block of a file:
//   kInputs, kFileBytes     of a block
//   kMostCode, kZero        the largest code as `quad` gives it, and the code of zero
//   kScaleInputs            32 or 16, inputs of a scale
//   kHasScales, kHasMinimums
//   Scales(block, panel, part)  what all of its scales have in common, held in registers
//   scale, minimum(common, panel, sub, half, part)   of 32 inputs, or half of them
//   quad(panel, sub, q, part)   codes of quad q of 32 inputs
//   at(panel, lane, input)      one weight
// Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c
#pragma once

#include <cstring>

#include "dot_products.h"
#include "vector.h"

namespace funitel {

constexpr int kBlockInputs = 32, kSuperInputs = 256;
constexpr int kQuads = kBlockInputs / kQuad, kSubs = kSuperInputs / kBlockInputs;
constexpr int kPair = 2;  // panels that lie together

inline Half read_half(const uint8_t* source) {
    Half value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

inline float to_float(Half x) { return _cvtsh_ss(x.bits); }

using Quads = uint8_t[kPair][kQuadBytes];  // of both panels
using Halves = Half[kPair][kLanes];

// Copy four bytes of a file to the place of an output.
inline void take_quad(Quads& target, int panel, int lane, const uint8_t* source) {
    std::memcpy(target[panel] + lane * kQuad, source, kQuad);
}

inline const uint8_t* part_start(const Quads& quads, int panel, int part) { return quads[panel] + part * kPartBytes; }
inline Bytes load_quad(const Quads& quads, int panel, int part) { return load_bytes(part_start(quads, panel, part)); }
inline int byte_at(const Quads& quads, int panel, int lane, int input) {
    return quads[panel][lane * kQuad + input % kQuad];
}

// Bits of each byte of a quad: `count` of them from `first` on, moved to `target`.
inline Bytes bits_of(const Quads& quads, int panel, int part, int first, int count, int target = 0) {
    Bytes bytes = load_quad(quads, panel, part);
    if (kRegisters == 16 && !__builtin_constant_p(first)) {
        // g++ would leave a branch for each quad in the loop over quads.
        bytes = shift_right(bytes, first);
        if (target > 0) bytes = shift_left(bytes, target);
    } else if (first > target) {
        bytes = shift_right(bytes, first - target);
    } else if (first < target) {
        bytes = shift_left(bytes, target - first);
    }
    return both(bytes, splat_bytes(static_cast<uint8_t>(((1 << count) - 1) << target)));
}

// Four bits for each of 32 inputs: input i is in the low half of byte i, or in the high one of byte i - 16.
struct Nibbles {
    Quads quads[kQuads / 2];

    void take(int panel, int lane, const uint8_t* source) {
        for (int q = 0; q < kQuads / 2; q++) take_quad(quads[q], panel, lane, source + q * kQuad);
    }
    Bytes quad(int panel, int q, int part) const { return bits_of(quads[q % 4], panel, part, q / 4 * 4, 4); }
    int at(int panel, int lane, int input) const {
        return byte_at(quads[input / kQuad % 4], panel, lane, input) >> input / 16 * 4 & 15;
    }
};

// A fifth bit for each of 32 inputs: that of input i is in byte i % 4, at i / 4.
struct FifthBits {
    Quads quads;

    void take(int panel, int lane, const uint8_t* source) {
        uint32_t bits;
        std::memcpy(&bits, source, sizeof bits);
        for (int i = 0; i < kBlockInputs; i++) {
            quads[panel][lane * kQuad + i % kQuad] |= static_cast<uint8_t>((bits >> i & 1) << i / kQuad);  // was zero
        }
    }
    Bytes quad(int panel, int q, int part) const { return bits_of(quads, panel, part, q, 1, 4); }
    int at(int panel, int lane, int input) const { return (byte_at(quads, panel, lane, input) >> input / kQuad & 1) << 4; }
};

// The scale of blocks of 32 inputs: one number for each output.
struct PlainScales {
    Part scale_, minimum_;

    template <class Block>
    PlainScales(const Block& block, int panel, int part) {
        scale_ = to_part(block.scales[panel] + part * kPartLanes);
        if constexpr (Block::kHasMinimums) minimum_ = to_part(block.minimums[panel] + part * kPartLanes);
    }
};

// What blocks of 32 inputs with a scale have in common.
template <class Block>
struct PlainBlock {
    static constexpr int kInputs = kBlockInputs, kScaleInputs = kBlockInputs;
    using Scales = PlainScales;
    static Part scale(const Block&, const Scales& common, int, int, int, int) { return common.scale_; }
    static Part minimum(const Block&, const Scales& common, int, int, int, int) { return common.minimum_; }
};

// A weight is scale x (code - 8).
struct BlockQ4_0 : PlainBlock<BlockQ4_0> {
    static constexpr size_t kFileBytes = 18;
    static constexpr int kMostCode = 15, kZero = 8;
    static constexpr bool kHasScales = true, kHasMinimums = false;
    Halves scales;
    Nibbles codes;

    void take(int panel, int lane, const uint8_t* source) {
        scales[panel][lane] = read_half(source);
        codes.take(panel, lane, source + 2);
    }
    Bytes quad(int panel, int, int q, int part) const { return codes.quad(panel, q, part); }
    float at(int panel, int lane, int input) const {
        return to_float(scales[panel][lane]) * float(codes.at(panel, lane, input) - kZero);
    }
};

// A weight is scale x code + minimum.
struct BlockQ4_1 : PlainBlock<BlockQ4_1> {
    static constexpr size_t kFileBytes = 20;
    static constexpr int kMostCode = 15, kZero = 0;
    static constexpr bool kHasScales = true, kHasMinimums = true;
    Halves scales, minimums;
    Nibbles codes;

    void take(int panel, int lane, const uint8_t* source) {
        scales[panel][lane] = read_half(source);
        minimums[panel][lane] = read_half(source + 2);
        codes.take(panel, lane, source + 4);
    }
    Bytes quad(int panel, int, int q, int part) const { return codes.quad(panel, q, part); }
    float at(int panel, int lane, int input) const {
        return std::fma(to_float(scales[panel][lane]), float(codes.at(panel, lane, input)),
                        to_float(minimums[panel][lane]));
    }
};

// A weight is scale x (code - 16).
struct BlockQ5_0 : PlainBlock<BlockQ5_0> {
    static constexpr size_t kFileBytes = 22;
    static constexpr int kMostCode = 31, kZero = 16;
    static constexpr bool kHasScales = true, kHasMinimums = false;
    Halves scales;
    Nibbles codes;
    FifthBits fifth;

    void take(int panel, int lane, const uint8_t* source) {
        scales[panel][lane] = read_half(source);
        fifth.take(panel, lane, source + 2);
        codes.take(panel, lane, source + 6);
    }
    Bytes quad(int panel, int, int q, int part) const {
        return either(codes.quad(panel, q, part), fifth.quad(panel, q, part));
    }
    float at(int panel, int lane, int input) const {
        int code = codes.at(panel, lane, input) | fifth.at(panel, lane, input);
        return to_float(scales[panel][lane]) * float(code - kZero);
    }
};

// A weight is scale x code + minimum.
struct BlockQ5_1 : PlainBlock<BlockQ5_1> {
    static constexpr size_t kFileBytes = 24;
    static constexpr int kMostCode = 31, kZero = 0;
    static constexpr bool kHasScales = true, kHasMinimums = true;
    Halves scales, minimums;
    Nibbles codes;
    FifthBits fifth;

    void take(int panel, int lane, const uint8_t* source) {
        scales[panel][lane] = read_half(source);
        minimums[panel][lane] = read_half(source + 2);
        fifth.take(panel, lane, source + 4);
        codes.take(panel, lane, source + 8);
    }
    Bytes quad(int panel, int, int q, int part) const {
        return either(codes.quad(panel, q, part), fifth.quad(panel, q, part));
    }
    float at(int panel, int lane, int input) const {
        int code = codes.at(panel, lane, input) | fifth.at(panel, lane, input);
        return std::fma(to_float(scales[panel][lane]), float(code), to_float(minimums[panel][lane]));
    }
};

// Signed codes of eight bits, as `quad` wants them.
struct WideCodes {
    Quads quads[kQuads];

    void take(int panel, int lane, const uint8_t* source) {
        for (int i = 0; i < kBlockInputs; i++) set(panel, lane, i, static_cast<int8_t>(source[i]));
    }
    void set(int panel, int lane, int input, int code) {
        quads[input / kQuad][panel][lane * kQuad + input % kQuad] = static_cast<uint8_t>(code + kWideOffset);
    }
    int at(int panel, int lane, int input) const {
        int byte = byte_at(quads[input / kQuad], panel, lane, input);
        return kWideOffset != 0 ? byte - kWideOffset : static_cast<int8_t>(byte);
    }
};

// A weight is scale x code, the code a signed byte.
struct BlockQ8_0 : PlainBlock<BlockQ8_0> {
    static constexpr size_t kFileBytes = 34;
    static constexpr int kMostCode = 255, kZero = kWideOffset;
    static constexpr bool kHasScales = true, kHasMinimums = false;
    Halves scales;
    WideCodes codes;

    void take(int panel, int lane, const uint8_t* source) {
        scales[panel][lane] = read_half(source);
        codes.take(panel, lane, source + 2);
    }
    Bytes quad(int panel, int, int q, int part) const { return load_quad(codes.quads[q], panel, part); }
    float at(int panel, int lane, int input) const {
        return to_float(scales[panel][lane]) * float(codes.at(panel, lane, input));
    }
};

// Of int8: a weight is the output's scale x code; the scale is at the end of the panel.
struct BlockInt8 {
    static constexpr int kInputs = kBlockInputs, kScaleInputs = kBlockInputs, kMostCode = 255, kZero = kWideOffset;
    static constexpr bool kHasScales = false, kHasMinimums = false;
    struct Scales {
        Scales(const BlockInt8&, int, int) {}
    };
    WideCodes codes;

    Bytes quad(int panel, int, int q, int part) const { return load_quad(codes.quads[q], panel, part); }
    float at(int panel, int lane, int input) const { return float(codes.at(panel, lane, input)); }
};

// Four bits that choose one of sixteen numbers.
template <class Block>
struct TableCodes {
    static __m128i table() {
        static constexpr Table values = make_table();
        return _mm_load_si128(reinterpret_cast<const __m128i*>(values.bytes));
    }

  private:
    struct alignas(16) Table {
        uint8_t bytes[16];
    };
    static constexpr Table make_table() {
        Table made{};
        for (int i = 0; i < 16; i++) made.bytes[i] = static_cast<uint8_t>(Block::kValues[i] + Block::kZero);
        return made;
    }
};

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A weight is scale x the value of the code.
struct BlockIQ4_NL : PlainBlock<BlockIQ4_NL>, TableCodes<BlockIQ4_NL> {
    static constexpr size_t kFileBytes = 18;
    static constexpr int kMostCode = 255, kZero = kWideOffset;
    static constexpr bool kHasScales = true, kHasMinimums = false;
    static constexpr const int8_t (&kValues)[16] = kIq4Values;
    Halves scales;
    Nibbles codes;

    void take(int panel, int lane, const uint8_t* source) {
        scales[panel][lane] = read_half(source);
        codes.take(panel, lane, source + 2);
    }
    Bytes quad(int panel, int, int q, int part) const { return look_up(table(), codes.quad(panel, q, part)); }
    float at(int panel, int lane, int input) const {
        return to_float(scales[panel][lane]) * float(kValues[codes.at(panel, lane, input)]);
    }
};

// A weight is a power of two x the value of the code, in halves. The smallest power, 2^-128, counts as zero.
struct BlockMXFP4 : TableCodes<BlockMXFP4> {
    static constexpr size_t kFileBytes = 17;
    static constexpr int kInputs = kBlockInputs, kScaleInputs = kBlockInputs;
    static constexpr int kMostCode = 28, kZero = 16;
    static constexpr bool kHasScales = true, kHasMinimums = false;
    static constexpr const int8_t (&kValues)[16] = kMxfp4Values;
    uint8_t exponents[kPair][kLanes];
    Nibbles codes;

    struct Scales {
        Part scale_;
        Scales(const BlockMXFP4& block, int panel, int part)
            : scale_(mul(power_of_two_part(block.exponents[panel] + part * kPartLanes), splat_part(0.5f))) {}
    };
    static Part scale(const BlockMXFP4&, const Scales& common, int, int, int, int) { return common.scale_; }

    void take(int panel, int lane, const uint8_t* source) {
        exponents[panel][lane] = source[0];
        codes.take(panel, lane, source + 1);
    }
    Bytes quad(int panel, int, int q, int part) const { return look_up(table(), codes.quad(panel, q, part)); }
    float at(int panel, int lane, int input) const {
        float scale = exponents[panel][lane] == 0 ? 0.0f : std::ldexp(0.5f, int(exponents[panel][lane]) - 127);
        return scale * float(kValues[codes.at(panel, lane, input)]);
    }
};

// Blocks of 256 inputs. `scale` of 32 or 16 of them is that of all x a small integer, and so is `minimum`.

using SubScales = uint8_t[kPair][kLanes];

struct SuperScales {
    Part scale_, minimum_;

    template <class Block>
    SuperScales(const Block& block, int panel, int part) {
        scale_ = to_part(block.scales[panel] + part * kPartLanes);
        if constexpr (Block::kHasMinimums) minimum_ = to_part(block.minimums[panel] + part * kPartLanes);
    }
};

// The 6-bit scale and minimum `index` of 8, as Q4_K and Q5_K pack them in 12 bytes.
inline void unpack_sixes(const uint8_t* packed, int index, uint8_t& scale, uint8_t& minimum) {
    if (index < 4) {
        scale = packed[index] & 63;
        minimum = packed[index + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4);
        minimum = static_cast<uint8_t>((packed[index + 4] >> 4) | (packed[index] >> 6) << 4);
    }
}

// A weight is scale x its integer x code - minimum x its integer; `HasFifth`: codes of 5 bits.
template <bool HasFifth>
struct BlockK4 {
    static constexpr size_t kFileBytes = HasFifth ? 176 : 144;
    static constexpr int kInputs = kSuperInputs, kScaleInputs = kBlockInputs;
    static constexpr int kMostCode = HasFifth ? 31 : 15, kZero = 0;
    static constexpr bool kHasScales = true, kHasMinimums = true;
    using Scales = SuperScales;
    Halves scales, minimums;
    SubScales sub_scales[kSubs], sub_minimums[kSubs];
    Quads codes[kSubs / 2][kQuads];               // of a pair of subs the first is in the low halves
    Quads fifth[HasFifth ? kQuads : 0];           // bit s of a byte is that of sub s

    void take(int panel, int lane, const uint8_t* source) {
        scales[panel][lane] = read_half(source);
        minimums[panel][lane] = read_half(source + 2);
        minimums[panel][lane].bits ^= 0x8000;  // it is taken away
        for (int s = 0; s < kSubs; s++) {
            unpack_sixes(source + 4, s, sub_scales[s][panel][lane], sub_minimums[s][panel][lane]);
        }
        const uint8_t* bytes = source + 16;
        if (HasFifth) {
            for (int q = 0; q < kQuads; q++) take_quad(fifth[q], panel, lane, bytes + q * kQuad);
            bytes += kBlockInputs;
        }
        for (int i = 0; i < kSubs / 2 * kQuads; i++) take_quad(codes[i / kQuads][i % kQuads], panel, lane, bytes + i * kQuad);
    }
    Bytes quad(int panel, int sub, int q, int part) const {
        Bytes low = bits_of(codes[sub / 2][q], panel, part, sub % 2 * 4, 4);
        return HasFifth ? either(low, bits_of(fifth[q], panel, part, sub, 1, 4)) : low;
    }
    static Part scale(const BlockK4& block, const Scales& common, int panel, int sub, int, int part) {
        return mul(common.scale_, to_part(block.sub_scales[sub][panel] + part * kPartLanes));
    }
    static Part minimum(const BlockK4& block, const Scales& common, int panel, int sub, int, int part) {
        return mul(common.minimum_, to_part(block.sub_minimums[sub][panel] + part * kPartLanes));
    }
    float at(int panel, int lane, int input) const {
        int sub = input / kBlockInputs, q = input % kBlockInputs / kQuad;
        int code = byte_at(codes[sub / 2][q], panel, lane, input) >> sub % 2 * 4 & 15;
        if (HasFifth) code |= (byte_at(fifth[q], panel, lane, input) >> sub & 1) << 4;
        float scale = to_float(scales[panel][lane]) * float(sub_scales[sub][panel][lane]);
        return std::fma(scale, float(code), to_float(minimums[panel][lane]) * float(sub_minimums[sub][panel][lane]));
    }
};

using BlockQ4_K = BlockK4<false>;
using BlockQ5_K = BlockK4<true>;

// A weight is scale x its integer x code - minimum x its integer; codes of 2 bits, 16 inputs share the integers.
struct BlockQ2_K {
    static constexpr size_t kFileBytes = 84;
    static constexpr int kInputs = kSuperInputs, kScaleInputs = kBlockInputs / 2, kMostCode = 3, kZero = 0;
    static constexpr bool kHasScales = true, kHasMinimums = true;
    using Scales = SuperScales;
    Halves scales, minimums;
    SubScales integers[2 * kSubs];  // of the scale in the lower four bits, of the minimum in the upper ones
    Quads codes[2][kQuads];         // of 128 inputs; bits 2j and 2j + 1 are of their sub j

    void take(int panel, int lane, const uint8_t* source) {
        for (int i = 0; i < 2 * kSubs; i++) integers[i][panel][lane] = source[i];
        for (int i = 0; i < 2 * kQuads; i++) take_quad(codes[i / kQuads][i % kQuads], panel, lane, source + 16 + i * kQuad);
        scales[panel][lane] = read_half(source + 80);
        minimums[panel][lane] = read_half(source + 82);
        minimums[panel][lane].bits ^= 0x8000;
    }
    Bytes quad(int panel, int sub, int q, int part) const {
        return bits_of(codes[sub / 4][q], panel, part, sub % 4 * 2, 2);
    }
    static Part scale(const BlockQ2_K& block, const Scales& common, int panel, int sub, int half, int part) {
        return mul(common.scale_, low_bits_part(block.integers[2 * sub + half][panel] + part * kPartLanes));
    }
    static Part minimum(const BlockQ2_K& block, const Scales& common, int panel, int sub, int half, int part) {
        return mul(common.minimum_, high_bits_part(block.integers[2 * sub + half][panel] + part * kPartLanes));
    }
    float at(int panel, int lane, int input) const {
        int sub = input / kBlockInputs, both = integers[input / 16][panel][lane];
        int code = byte_at(codes[sub / 4][input % kBlockInputs / kQuad], panel, lane, input) >> sub % 4 * 2 & 3;
        float scale = to_float(scales[panel][lane]) * float(both & 15);
        return std::fma(scale, float(code), to_float(minimums[panel][lane]) * float(both >> 4));
    }
};

using SignedScales = int8_t[kPair][kLanes];

// A weight is scale x its integer x (code - zero); 16 inputs share the integer.
template <class Block>
struct SignedSuperBlock {
    static constexpr int kInputs = kSuperInputs, kScaleInputs = kBlockInputs / 2;
    static constexpr bool kHasScales = true, kHasMinimums = false;
    using Scales = SuperScales;
    Halves scales;
    SignedScales sub_scales[2 * kSubs];

    static Part scale(const Block& block, const Scales& common, int panel, int sub, int half, int part) {
        return mul(common.scale_, to_part(block.sub_scales[2 * sub + half][panel] + part * kPartLanes));
    }
    float at(int panel, int lane, int input) const {
        const Block& block = static_cast<const Block&>(*this);
        float scale = to_float(scales[panel][lane]) * float(sub_scales[input / 16][panel][lane]);
        return scale * float(block.code_at(panel, lane, input) - Block::kZero);
    }
};

// Codes of 3 bits, the third apart.
struct BlockQ3_K : SignedSuperBlock<BlockQ3_K> {
    static constexpr size_t kFileBytes = 110;
    static constexpr int kMostCode = 7, kZero = 4;
    Quads codes[2][kQuads];  // as in Q2_K
    Quads third[kQuads];     // bit s of a byte is that of sub s

    void take(int panel, int lane, const uint8_t* source) {
        for (int q = 0; q < kQuads; q++) take_quad(third[q], panel, lane, source + q * kQuad);
        source += kBlockInputs;
        for (int i = 0; i < 2 * kQuads; i++) take_quad(codes[i / kQuads][i % kQuads], panel, lane, source + i * kQuad);
        source += 2 * kBlockInputs;
        for (int i = 0; i < 2 * kSubs; i++) {
            int low = i < 8 ? source[i] & 15 : source[i - 8] >> 4;
            sub_scales[i][panel][lane] = static_cast<int8_t>((low | (source[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
        }
        scales[panel][lane] = read_half(source + 12);
    }
    Bytes quad(int panel, int sub, int q, int part) const {
        return either(bits_of(codes[sub / 4][q], panel, part, sub % 4 * 2, 2), bits_of(third[q], panel, part, sub, 1, 2));
    }
    int code_at(int panel, int lane, int input) const {
        int sub = input / kBlockInputs, q = input % kBlockInputs / kQuad;
        return (byte_at(codes[sub / 4][q], panel, lane, input) >> sub % 4 * 2 & 3) |
               (byte_at(third[q], panel, lane, input) >> sub & 1) << 2;
    }
};

// Codes of 6 bits, the upper two apart.
struct BlockQ6_K : SignedSuperBlock<BlockQ6_K> {
    static constexpr size_t kFileBytes = 210;
    static constexpr int kMostCode = 63, kZero = 32;
    Quads low[2][2][kQuads];  // of 128 inputs two rows of 32 bytes: subs 0 and 2 share the first, 1 and 3 the second
    Quads high[2][kQuads];    // bits 2j and 2j + 1 are of their sub j

    void take(int panel, int lane, const uint8_t* source) {
        for (int i = 0; i < 4 * kQuads; i++) {
            take_quad(low[i / (2 * kQuads)][i / kQuads % 2][i % kQuads], panel, lane, source + i * kQuad);
        }
        source += 128;
        for (int i = 0; i < 2 * kQuads; i++) take_quad(high[i / kQuads][i % kQuads], panel, lane, source + i * kQuad);
        source += 64;
        for (int i = 0; i < 2 * kSubs; i++) sub_scales[i][panel][lane] = static_cast<int8_t>(source[i]);
        scales[panel][lane] = read_half(source + 16);
    }
    Bytes quad(int panel, int sub, int q, int part) const {
        int which = sub / 4, j = sub % 4;
        return either(bits_of(low[which][j % 2][q], panel, part, j / 2 * 4, 4),
                      bits_of(high[which][q], panel, part, j * 2, 2, 4));
    }
    int code_at(int panel, int lane, int input) const {
        int which = input / 128, j = input / kBlockInputs % 4, q = input % kBlockInputs / kQuad;
        return (byte_at(low[which][j % 2][q], panel, lane, input) >> j / 2 * 4 & 15) |
               (byte_at(high[which][q], panel, lane, input) >> j * 2 & 3) << 4;
    }
};

// A weight is scale x its integer x the value of the code.
struct BlockIQ4_XS : TableCodes<BlockIQ4_XS> {
    static constexpr size_t kFileBytes = 136;
    static constexpr int kInputs = kSuperInputs, kScaleInputs = kBlockInputs, kMostCode = 255, kZero = kWideOffset;
    static constexpr bool kHasScales = true, kHasMinimums = false;
    static constexpr const int8_t (&kValues)[16] = kIq4Values;
    using Scales = SuperScales;
    Halves scales;
    SignedScales sub_scales[kSubs];
    Nibbles codes[kSubs];

    void take(int panel, int lane, const uint8_t* source) {
        scales[panel][lane] = read_half(source);
        int high = source[2] | source[3] << 8;
        for (int s = 0; s < kSubs; s++) {
            int low = source[4 + s / 2] >> s % 2 * 4 & 15;
            sub_scales[s][panel][lane] = static_cast<int8_t>((low | (high >> 2 * s & 3) << 4) - 32);
            codes[s].take(panel, lane, source + 8 + s * 16);
        }
    }
    Bytes quad(int panel, int sub, int q, int part) const { return look_up(table(), codes[sub].quad(panel, q, part)); }
    static Part scale(const BlockIQ4_XS& block, const Scales& common, int panel, int sub, int, int part) {
        return mul(common.scale_, to_part(block.sub_scales[sub][panel] + part * kPartLanes));
    }
    float at(int panel, int lane, int input) const {
        int sub = input / kBlockInputs, code = codes[sub].at(panel, lane, input % kBlockInputs);
        float scale = to_float(scales[panel][lane]) * float(sub_scales[sub][panel][lane]);
        return scale * float(kValues[code]);
    }
};

}  // namespace funitel
