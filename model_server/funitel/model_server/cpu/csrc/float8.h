// Floats of eight bits as torch has them: float8_e4m3fn and float8_e5m2. What is beyond the range becomes the largest
// number; what is no number stays so.
#pragma once

#include <algorithm>

#include "vector.h"

namespace funitel {

struct E4M3 {
    static constexpr int kMantissa = 3, kBias = 7, kNone = 0x7f;
    static constexpr float kMost = 448.0f;
    uint8_t bits;
};

struct E5M2 {
    static constexpr int kMantissa = 2, kBias = 15, kNone = 0x7f;
    static constexpr float kMost = 57344.0f;
    uint8_t bits;
};

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The nearest number of T, of two the even one.
template <class T>
inline T to_float8(float value) {
    constexpr int dropped = 23 - T::kMantissa;
    const uint32_t bits = bits_of(value), sign = bits >> 24 & 0x80;
    uint32_t size = bits & 0x7fffffff;
    if (size > 0x7f800000) return {static_cast<uint8_t>(sign | T::kNone)};
    size = std::min(size, bits_of(T::kMost));
    constexpr uint32_t smallest_normal = uint32_t(127 + 1 - T::kBias) << 23;
    if (size < smallest_normal) {  // a multiple of the smallest number: the sum rounds to one
        constexpr uint32_t large = uint32_t(127 + 1 - T::kBias - T::kMantissa + 23) << 23;
        return {static_cast<uint8_t>(sign | (bits_of(of_bits(size) + of_bits(large)) - large))};
    }
    size += (1u << (dropped - 1)) - 1 + (size >> dropped & 1);
    return {static_cast<uint8_t>(sign | ((size >> dropped) - (uint32_t(127 - T::kBias) << T::kMantissa)))};
}

template <class T>
inline void store_float8(T* p, F16 x) {
    float values[kLanes];
    store(values, x);
    for (int i = 0; i < kLanes; i++) p[i] = to_float8<T>(values[i]);
}

inline void store(E4M3* p, F16 x) { store_float8(p, x); }
inline void store(E5M2* p, F16 x) { store_float8(p, x); }

// Sixteen numbers that are the upper halves of float16.
inline F16 load(const E5M2* p) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    Half halves[kLanes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves), _mm256_slli_epi16(words, 8));
    return load(halves);
}

// Sixteen numbers whose bits in a float16 stand for their 256th part.
inline F16 load(const E4M3* p) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i size = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)), 7);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8);
    const __m256i is_none = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(E4M3::kNone << 7));
    const __m256i none = _mm256_and_si256(is_none, _mm256_set1_epi16(0x7e00));
    Half halves[kLanes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves), _mm256_or_si256(_mm256_or_si256(size, sign), none));
    return mul(load(halves), splat(256.0f));
}

}  // namespace funitel
