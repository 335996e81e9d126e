// Products of codes, which are bytes, with levels of activations, which are signed bytes: four inputs of an output at a
// time, sixteen outputs side by side. All sums are exact integers, so every instruction set gives the same.
//
// Codes are unsigned in the registers of VNNI. Without VNNI a product of bytes is summed in 16 bits, which codes of seven
// bits and more would overflow (255 x 127 x 2 > 32767): those are signed there, and their signs are moved to the levels.
#pragma once

#include <algorithm>
#include <cstring>

#include "vector.h"

namespace funitel {

constexpr int kQuad = 4;                    // inputs that are multiplied together
constexpr int kQuadBytes = kLanes * kQuad;  // of codes, [output][input of the quad]
constexpr int kMostLevel = 127;             // of activations, either sign

#if defined(__AVX512F__)

using Bytes = __m512i;
using Part = __m512;        // outputs of a register
constexpr int kParts = 1;   // registers of sixteen outputs
constexpr int kRegisters = 32;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes splat_bytes(uint8_t value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline Bytes splat_words(int32_t value) { return _mm512_set1_epi32(value); }
inline Bytes both(Bytes x, Bytes y) { return _mm512_and_si512(x, y); }
inline Bytes either(Bytes x, Bytes y) { return _mm512_or_si512(x, y); }
// Shift within pairs of bytes: what crosses from a byte into the other must be masked.
inline Bytes shift_right(Bytes x, int bits) { return _mm512_srl_epi16(x, _mm_cvtsi32_si128(bits)); }
inline Bytes shift_left(Bytes x, int bits) { return _mm512_sll_epi16(x, _mm_cvtsi32_si128(bits)); }
template <int Bits>
inline Bytes shift_words_left(Bytes x) {
    return _mm512_slli_epi32(x, Bits);
}
inline Bytes look_up(__m128i table, Bytes places) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), places); }
inline Part to_part(Bytes sums) { return _mm512_cvtepi32_ps(sums); }
inline Part to_part(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Part to_part(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Of bytes the lower four bits, and the upper ones.
inline Part low_bits_part(const uint8_t* p) {
    __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(15)));
}
inline Part high_bits_part(const uint8_t* p) {
    __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(words, 4));
}
// 2^(byte - 127); 0 for 0.
inline Part power_of_two_part(const uint8_t* p) {
    __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 23));
}
inline Bytes splat_halves(int value) { return _mm512_set1_epi16(static_cast<int16_t>(value)); }
// Of unsigned halves of words: the upper and the lower 16 bits of products, and sums.
inline Bytes multiply_high(Bytes x, Bytes y) { return _mm512_mulhi_epu16(x, y); }
inline Bytes multiply_low(Bytes x, Bytes y) { return _mm512_mullo_epi16(x, y); }
inline Bytes add_words16(Bytes x, Bytes y) { return _mm512_add_epi16(x, y); }
inline Part sub_part(Part x, Part y) { return _mm512_sub_ps(x, y); }
inline Part to_part(const Half* p) { return load(p).v; }
inline Part splat_part(float x) { return _mm512_set1_ps(x); }
inline Part mul(Part x, Part y) { return _mm512_mul_ps(x, y); }
inline Part fma(Part x, Part y, Part z) { return _mm512_fmadd_ps(x, y, z); }
inline Part& part_of(F16& x, int) { return x.v; }

#else

using Bytes = __m256i;
using Part = __m256;
constexpr int kParts = 2;
constexpr int kRegisters = 16;
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes splat_bytes(uint8_t value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline Bytes splat_words(int32_t value) { return _mm256_set1_epi32(value); }
inline Bytes both(Bytes x, Bytes y) { return _mm256_and_si256(x, y); }
inline Bytes either(Bytes x, Bytes y) { return _mm256_or_si256(x, y); }
// Shift within pairs of bytes: what crosses from a byte into the other must be masked.
inline Bytes shift_right(Bytes x, int bits) { return _mm256_srl_epi16(x, _mm_cvtsi32_si128(bits)); }
inline Bytes shift_left(Bytes x, int bits) { return _mm256_sll_epi16(x, _mm_cvtsi32_si128(bits)); }
template <int Bits>
inline Bytes shift_words_left(Bytes x) {
    return _mm256_slli_epi32(x, Bits);
}
inline Bytes look_up(__m128i table, Bytes places) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), places);
}
inline Part to_part(Bytes sums) { return _mm256_cvtepi32_ps(sums); }
inline Part to_part(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Part to_part(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Part low_bits_part(const uint8_t* p) {
    __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15)));
}
inline Part high_bits_part(const uint8_t* p) {
    __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 4));
}
inline Part power_of_two_part(const uint8_t* p) {
    __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 23));
}
inline Bytes splat_halves(int value) { return _mm256_set1_epi16(static_cast<int16_t>(value)); }
// Of unsigned halves of words: the upper and the lower 16 bits of products, and sums.
inline Bytes multiply_high(Bytes x, Bytes y) { return _mm256_mulhi_epu16(x, y); }
inline Bytes multiply_low(Bytes x, Bytes y) { return _mm256_mullo_epi16(x, y); }
inline Bytes add_words16(Bytes x, Bytes y) { return _mm256_add_epi16(x, y); }
inline Part sub_part(Part x, Part y) { return _mm256_sub_ps(x, y); }
inline Part to_part(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Part splat_part(float x) { return _mm256_set1_ps(x); }
inline Part mul(Part x, Part y) { return _mm256_mul_ps(x, y); }
inline Part fma(Part x, Part y, Part z) { return _mm256_fmadd_ps(x, y, z); }
inline Part& part_of(F16& x, int part) { return part == 0 ? x.a : x.b; }

#endif

constexpr int kPartLanes = kLanes / kParts, kPartBytes = kQuadBytes / kParts;

template <int Factor>
inline Bytes times_power_of_two(Bytes words) {
    static_assert(Factor == 0 || (Factor & (Factor - 1)) == 0, "the zero of codes is a shift");
    return Factor == 0 ? splat_words(0) : shift_words_left<__builtin_ctz(Factor | 1 << 30)>(words);
}

// What of a code's magnitude fits in the byte of a sum of two products.
constexpr int kMostNarrow = 127;
constexpr bool is_wide(int most_code) { return most_code > kMostNarrow; }

#if defined(__AVX512VNNI__)

// What is added to a signed code of eight bits, to make it unsigned.
constexpr int kWideOffset = 128;

template <int MostCode>
struct Codes {
    Bytes bytes;
    explicit Codes(Bytes codes) : bytes(codes) {}
};

// A sum of products of codes less their zero with levels, for each output; -`total` is the sum of the levels.
template <int MostCode, int Zero>
class DotSum {
  public:
    void start(const int32_t* total) { total_ = times_power_of_two<Zero>(splat_words(*total)); }

    // In assembly because g++ would keep the sums in memory.
    void add(const Codes<MostCode>& codes, const int32_t* levels) {
#if defined(__AVX512F__)
        asm("vpdpbusd %[levels]%{1to16%}, %[codes], %[total]"
            : [total] "+v"(total_)
            : [codes] "v"(codes.bytes), [levels] "m"(*levels));
#else
        total_ = _mm256_dpbusd_epi32(total_, codes.bytes, splat_words(*levels));
#endif
    }

    // With four levels in every word. g++ keeps sums in registers throughout a loop if no assembly in it names memory.
    void add(const Codes<MostCode>& codes, Bytes levels) {
#if defined(__AVX512F__)
        Bytes total = total_;
        asm("vpdpbusd %[levels], %[codes], %[total]" : [total] "+v"(total) : [codes] "v"(codes.bytes), [levels] "v"(levels));
        total_ = total;
#else
        total_ = _mm256_dpbusd_epi32(total_, codes.bytes, levels);
#endif
    }

    // After so many quads of codes, counted from the start.
    void settle(int) {}
    Bytes total() const { return total_; }

  private:
    Bytes total_;
};

#else

constexpr int kWideOffset = 0;

#if defined(__AVX512F__)

inline Bytes add_words(Bytes x, Bytes y) { return _mm512_add_epi32(x, y); }
inline Bytes add_halves(Bytes x, Bytes y) { return _mm512_add_epi16(x, y); }
inline Bytes pair_products(Bytes codes, Bytes levels) { return _mm512_maddubs_epi16(codes, levels); }
inline Bytes sum_pairs(Bytes halves) { return _mm512_madd_epi16(halves, _mm512_set1_epi16(1)); }

template <int MostCode>
struct Codes {
    Bytes bytes;
    __mmask64 is_negative = 0;
    explicit Codes(Bytes codes) : bytes(codes) {
        if (!is_wide(MostCode)) return;
        is_negative = _mm512_movepi8_mask(codes);
        bytes = _mm512_abs_epi8(codes);
    }
    Bytes signed_levels(Bytes levels) const {
        return _mm512_mask_sub_epi8(levels, is_negative, _mm512_setzero_si512(), levels);
    }
};

#else

inline Bytes add_words(Bytes x, Bytes y) { return _mm256_add_epi32(x, y); }
inline Bytes add_halves(Bytes x, Bytes y) { return _mm256_add_epi16(x, y); }
inline Bytes pair_products(Bytes codes, Bytes levels) { return _mm256_maddubs_epi16(codes, levels); }
inline Bytes sum_pairs(Bytes halves) { return _mm256_madd_epi16(halves, _mm256_set1_epi16(1)); }

template <int MostCode>
struct Codes {
    Bytes bytes, signs;
    explicit Codes(Bytes codes) : bytes(is_wide(MostCode) ? _mm256_abs_epi8(codes) : codes), signs(codes) {}
    Bytes signed_levels(Bytes levels) const { return _mm256_sign_epi8(levels, signs); }
};

#endif

// Quads whose sums of two products fit in 16 bits together.
constexpr int quads_fitting(int most_code) {
    const int most = is_wide(most_code) ? 1 : 32767 / (2 * most_code * kMostLevel);
    return most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

template <int MostCode, int Zero>
class DotSum {
  public:
    void start(const int32_t* total) {
        total_ = times_power_of_two<Zero>(splat_words(*total));
        recent_ = splat_words(0);
    }

    void add(const Codes<MostCode>& codes, const int32_t* levels) { add(codes, splat_words(*levels)); }

    // With four levels in every word.
    void add(const Codes<MostCode>& codes, Bytes levels) {
        if (is_wide(MostCode)) levels = codes.signed_levels(levels);
        Bytes products = pair_products(codes.bytes, levels);
        if (kQuadsEach == 1) {
            total_ = add_words(total_, sum_pairs(products));
        } else {
            recent_ = add_halves(recent_, products);
        }
    }

    void settle(int num_quads) {
        if (kQuadsEach == 1 || num_quads % kQuadsEach != 0) return;
        total_ = add_words(total_, sum_pairs(recent_));
        recent_ = splat_words(0);
    }

    Bytes total() const { return total_; }

  private:
    // Four at most: so many quads have a scale of their own in some blocks.
    static constexpr int kQuadsEach = std::min(quads_fitting(MostCode), 4);

    Bytes total_, recent_;
};

#endif

}  // namespace funitel
