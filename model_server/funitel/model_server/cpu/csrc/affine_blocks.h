// Blocks of weights with a scale and a base, in the formats of `block_formats.py`: a weight is scale x code + base. They have
// what block types have in blocks.h.
#pragma once

#include "blocks.h"

namespace funitel {

// Some bits of each of 32 codes. Of `kBits` rows of quads, row r has those of quads r, r + kBits and so on, at bit 0, kBits
// and so on of each byte.
template <int Bits>
struct CodeField {
    Quads rows[Bits];

    void set(int panel, int lane, int input, int value) {  // was zero
        const int q = input / kQuad;
        rows[q % Bits][panel][lane * kQuad + input % kQuad] |= static_cast<uint8_t>(value << q / Bits * Bits);
    }
    Bytes quad(int panel, int q, int part, int target = 0) const {
        return bits_of(rows[q % Bits], panel, part, q / Bits * Bits, Bits, target);
    }
    int at(int panel, int lane, int input) const {
        const int q = input / kQuad;
        return byte_at(rows[q % Bits], panel, lane, input) >> q / Bits * Bits & ((1 << Bits) - 1);
    }
};

// Bits [input * bits, + bits) of bytes, the first in the lowest.
inline int field_of(const uint8_t* bytes, int bits, int input) {
    return bytes[input * bits / 8] >> input * bits % 8 & ((1 << bits) - 1);
}

// How a format lies in a file: `High` upper bits of all codes, then `Low` lower ones; neighbours together.
template <int Inputs, int High, int Low, bool HasZero = false>
struct Fields {
    static constexpr int kInputs = Inputs, kHigh = High, kLow = Low;
    static constexpr bool kHasZero = HasZero;
    static int high(const uint8_t* bytes, int input) { return field_of(bytes, High, input); }
    static int low(const uint8_t* bytes, int input) { return field_of(bytes + Inputs * High / 8, Low, input); }
};

// Scale and base of a block, of one register of outputs. Where the file has a zero in place of the base, that is taken away
// from codes. Codes of eight bits are kept as in WideCodes, 128 less than in the file.
template <class Block>
struct AffineScales {
    Part scale_, minimum_;

    AffineScales(const Block& block, int panel, int part) {
        scale_ = to_part(block.scales[panel] + part * kPartLanes);
        const Part base = to_part(block.bases[panel] + part * kPartLanes);
        constexpr float offset = Block::kIsWide ? 128.0f : 0.0f;
        if constexpr (Block::kHasZero) {
            minimum_ = mul(scale_, sub_part(splat_part(offset), base));
        } else {
            minimum_ = fma(scale_, splat_part(offset), base);
        }
    }
};

// What blocks of `Inputs` inputs with one scale and base have in common; Block has `code_at`.
template <class Block, int Inputs, bool HasZero, int CodeBits>
struct AffineBlock {
    static constexpr int kInputs = Inputs, kScaleInputs = kBlockInputs;
    static constexpr bool kHasScales = true, kHasMinimums = true, kHasZero = HasZero, kIsWide = CodeBits == 8;
    static constexpr int kMostCode = (1 << CodeBits) - 1, kZero = kIsWide ? kWideOffset : 0;
    using Scales = AffineScales<Block>;
    Halves scales, bases;

    static Part scale(const Block&, const Scales& common, int, int, int, int) { return common.scale_; }
    static Part minimum(const Block&, const Scales& common, int, int, int, int) { return common.minimum_; }
    void take_scales(int panel, int lane, const uint8_t* source) {
        bases[panel][lane] = read_half(source);
        scales[panel][lane] = read_half(source + 2);
    }
    float at(int panel, int lane, int input) const {
        const float code = float(static_cast<const Block*>(this)->code_at(panel, lane, input));
        const float scale = to_float(scales[panel][lane]), base = to_float(bases[panel][lane]);
        return HasZero ? scale * (code - base) : std::fma(scale, code, base);
    }
};

template <class F>
struct FieldBlock : AffineBlock<FieldBlock<F>, F::kInputs, F::kHasZero, F::kHigh + F::kLow> {
    using Base = AffineBlock<FieldBlock<F>, F::kInputs, F::kHasZero, F::kHigh + F::kLow>;
    static constexpr int kParts32 = F::kInputs / kBlockInputs;
    static constexpr size_t kFileBytes = 4 + F::kInputs * (F::kHigh + F::kLow) / 8;
    CodeField<F::kLow> low[kParts32];
    CodeField<F::kHigh == 0 ? 1 : F::kHigh> high[F::kHigh == 0 ? 0 : kParts32];

    void take(int panel, int lane, const uint8_t* source) {
        this->take_scales(panel, lane, source);
        const uint8_t* bytes = source + 4;
        for (int i = 0; i < F::kInputs; i++) {
            const int sub = i / kBlockInputs, input = i % kBlockInputs;
            int code = F::low(bytes, i);
            if constexpr (Base::kIsWide) code = static_cast<uint8_t>(code - 128 + kWideOffset);
            low[sub].set(panel, lane, input, code);
            if constexpr (F::kHigh > 0) high[sub].set(panel, lane, input, F::high(bytes, i));
        }
    }
    Bytes quad(int panel, int sub, int q, int part) const {
        if constexpr (Base::kIsWide) {
            return load_quad(low[sub].rows[q], panel, part);
        } else if constexpr (F::kHigh > 0) {
            return either(low[sub].quad(panel, q, part), high[sub].quad(panel, q, part, F::kLow));
        } else {
            return low[sub].quad(panel, q, part);
        }
    }
    int code_at(int panel, int lane, int i) const {
        const int sub = i / kBlockInputs, input = i % kBlockInputs;
        int code = low[sub].at(panel, lane, input);
        if constexpr (Base::kIsWide) return static_cast<uint8_t>(code + 128 - kWideOffset);
        if constexpr (F::kHigh > 0) code |= high[sub].at(panel, lane, input) << F::kLow;
        return code;
    }
};

using BlockQ8_B32T1 = FieldBlock<Fields<32, 0, 8>>;
using BlockQ6_B64T1 = FieldBlock<Fields<64, 2, 4>>;
using BlockQ5_B64T1 = FieldBlock<Fields<64, 1, 4>>;
using BlockQ4_B32T1 = FieldBlock<Fields<32, 0, 4>>;
using BlockQ4_B64T1 = FieldBlock<Fields<64, 0, 4>>;
using BlockQ3_B32T1 = FieldBlock<Fields<32, 1, 2>>;
using BlockQ2_B32T1 = FieldBlock<Fields<32, 0, 2>>;
template <int Inputs, int Bits>
using BlockA16 = FieldBlock<Fields<Inputs, 0, Bits, true>>;
using BlockA16W8_G32 = BlockA16<32, 8>;
using BlockA16W8_G64 = BlockA16<64, 8>;
using BlockA16W8_G128 = BlockA16<128, 8>;
using BlockA16W8_G256 = BlockA16<256, 8>;
using BlockA16W4_G32 = BlockA16<32, 4>;
using BlockA16W4_G64 = BlockA16<64, 4>;
using BlockA16W4_G128 = BlockA16<128, 4>;
using BlockA16W4_G256 = BlockA16<256, 4>;

// Codes of 11 levels, pairs of them as numbers of 7 bits: even + 11 x odd. A quad has two pairs, each in the place of its two
// bytes, from which both codes are computed.
struct BlockQ3H_B64T1 : AffineBlock<BlockQ3H_B64T1, 64, false, 4> {
    static constexpr size_t kFileBytes = 32;
    static constexpr int kLevels = 11, kAllQuads = 64 / kQuad;
    // Of quad q, which has two words of 16 bits for an output: four bits of each at 4 x (q % 4) of row q / 4, and so on.
    Quads low[kAllQuads / 4], middle[kAllQuads / 8], high[kAllQuads / 16];

    void take(int panel, int lane, const uint8_t* source) {
        take_scales(panel, lane, source);
        const uint8_t *highs = source + 4, *middles = highs + 4, *lows = middles + 8;
        for (int pair = 0; pair < 32; pair++) {
            const int q = pair / 2;
            put(low[q / 4], panel, lane, pair, field_of(lows, 4, pair) << q % 4 * 4);
            put(middle[q / 8], panel, lane, pair, field_of(middles, 2, pair) << q % 8 * 2);
            put(high[q / 16], panel, lane, pair, field_of(highs, 1, pair) << q % 16);
        }
    }
    Bytes quad(int panel, int sub, int q, int part) const {
        q += sub * kQuads;
        const Bytes pairs = either(either(word_bits(low[q / 4], panel, part, q % 4 * 4, 4, 0),
                                          word_bits(middle[q / 8], panel, part, q % 8 * 2, 2, 4)),
                                   word_bits(high[q / 16], panel, part, q % 16, 1, 6));
        // odd = pair / 11, and even + 256 x odd = pair + (256 - 11) x odd
        const Bytes odd = multiply_high(pairs, splat_halves(65536 / kLevels + 1));
        return add_words16(pairs, multiply_low(odd, splat_halves(256 - kLevels)));
    }
    int code_at(int panel, int lane, int input) const {
        const int pair = input / 2, q = pair / 2;
        const int number = (word_at(low[q / 4], panel, lane, pair) >> q % 4 * 4 & 15) |
                           (word_at(middle[q / 8], panel, lane, pair) >> q % 8 * 2 & 3) << 4 |
                           (word_at(high[q / 16], panel, lane, pair) >> q % 16 & 1) << 6;
        return input % 2 == 0 ? number % kLevels : number / kLevels;
    }

  private:
    static void put(Quads& row, int panel, int lane, int pair, int bits) {
        uint8_t* place = row[panel] + lane * kQuad + pair % 2 * 2;
        place[0] |= static_cast<uint8_t>(bits);
        place[1] |= static_cast<uint8_t>(bits >> 8);
    }
    static int word_at(const Quads& row, int panel, int lane, int pair) {
        const uint8_t* place = row[panel] + lane * kQuad + pair % 2 * 2;
        return place[0] | place[1] << 8;
    }
    static Bytes word_bits(const Quads& row, int panel, int part, int first, int count, int target) {
        Bytes words = load_quad(row, panel, part);
        if (first > target) words = shift_right(words, first - target);
        if (first < target) words = shift_left(words, target - first);
        return both(words, splat_halves(((1 << count) - 1) << target));
    }
};

}  // namespace funitel
