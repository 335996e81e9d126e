// Sixteen floats at a time: one 512-bit register, or two of 256 bits. Both give the same bits: every sum below has one
// order, and every product that is added is a fused multiply-add.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define FUNITEL_INLINE __attribute__((always_inline))

namespace funitel {

constexpr int kLanes = 16;

// Activations none of which is larger count as zeros: the inverse of a level's size would be infinite.
constexpr float kSmallest = 1e-30f;

struct Half {
    uint16_t bits;
};

// The upper half of a float.
struct Brain {
    uint16_t bits;
};

// Numbers that are multiplied in one go: vdpbf16ps takes pairs of bfloat16.
template <class W>
constexpr int kTogether = 1;
template <>
constexpr int kTogether<Brain> = 2;

// The nearest bfloat16, of two the even one; what is no number stays so.
inline Brain to_brain(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#if defined(__AVX512F__)

struct F16 {
    __m512 v;
};

inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load(const Half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Of sixteen words, each two numbers, the first numbers and the second ones.
inline F16 load_first(const Brain* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline F16 load_second(const Brain* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))))};
}
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline void store(Half* p, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F16 load(const Brain* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
// As `to_brain` does.
inline void store(Brain* p, F16 x) {
    const __m512i bits = _mm512_castps_si512(x.v), upper = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 is_none = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    const __m512i all = _mm512_mask_or_epi32(rounded, is_none, upper, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(all));
}
inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand is returned where either is not a number: pass the value that may be one second.
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 magnitude(F16 a) { return {_mm512_abs_ps(a.v)}; }
inline F16 nearest(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F16 zero_below(F16 x, F16 limit, F16 y) {
    return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}
inline F16 power_of_two(F16 n) {
    __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_castsi512_ps(bits)};
}
inline __m256 fold(F16 a) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
}
inline __m256 fold_max(F16 a) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    return _mm256_max_ps(_mm512_castps512_ps256(a.v), high);
}
// A bit for each lane, set where x <= y.
inline unsigned at_most(F16 x, F16 y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_LE_OQ); }
// Round to signed bytes, with saturation.
inline __m128i to_bytes(F16 x) { return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)); }
// Each lane gets the value of the one `Step` away, of pairs of runs of so many lanes: 1, 2, 4 or 8.
template <int Step>
inline F16 partner(F16 x) {
    if constexpr (Step == 1) return {_mm512_permute_ps(x.v, 0xb1)};
    if constexpr (Step == 2) return {_mm512_permute_ps(x.v, 0x4e)};
    if constexpr (Step == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xb1)};
    if constexpr (Step == 8) return {_mm512_shuffle_f32x4(x.v, x.v, 0x4e)};
}

#else

struct F16 {
    __m256 a, b;
};

inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F16 load(const Half* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
// Of sixteen words, each two numbers, the first numbers and the second ones.
inline F16 load_first(const Brain* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
inline F16 load_second(const Brain* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), upper)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), upper))};
}
inline void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline void store(Half* p, F16 x) {
    __m128i* q = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 to_floats(__m128i brains) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(brains), 16));
}
inline F16 load(const Brain* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {to_floats(_mm_loadu_si128(q)), to_floats(_mm_loadu_si128(q + 1))};
}
// As `to_brain` does; the number is in the lower half of each lane.
inline __m256i to_brain(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i none = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, none, is_none);
}
inline void store(Brain* p, F16 x) {
    const __m256i words = _mm256_packus_epi32(to_brain(x.a), to_brain(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
}
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
// The second operand is returned where either is not a number: pass the value that may be one second.
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 magnitude(F16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F16 nearest(F16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline F16 zero_below(F16 x, F16 limit, F16 y) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ), y.a),
            _mm256_andnot_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ), y.b)};
}
inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F16 power_of_two(F16 n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline __m256 fold(F16 x) { return _mm256_add_ps(x.a, x.b); }
inline __m256 fold_max(F16 x) { return _mm256_max_ps(x.a, x.b); }
inline unsigned at_most(F16 x, F16 y) {
    int low = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LE_OQ));
    int high = _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_LE_OQ));
    return static_cast<unsigned>(low | high << 8);
}
// Round to signed bytes, with saturation.
inline __m128i to_bytes(F16 x) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
// Each lane gets the value of the one `Step` away, of pairs of runs of so many lanes: 1, 2, 4 or 8.
template <int Step>
inline F16 partner(F16 x) {
    if constexpr (Step == 1) return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
    if constexpr (Step == 2) return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
    if constexpr (Step == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    if constexpr (Step == 8) return {x.b, x.a};
}

#endif

inline float sum(F16 x) {
    __m256 v = fold(x);
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

inline float largest(F16 x) {
    __m256 v = fold_max(x);
    __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_max_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}

inline float smallest(F16 x) { return -largest(sub(splat(0.0f), x)); }

// Of sixteen signed bytes.
inline int sum(__m128i bytes) {
    __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 128 * kLanes;
}

// The first n of sixteen values, the others zero; nothing past them is read.
template <class T>
inline F16 load(const T* p, int n) {
    if (n >= kLanes) return load(p);
    T some[kLanes] = {};
    std::memcpy(some, p, n * sizeof(T));
    return load(some);
}

template <class T>
inline void store(T* p, F16 x, int n) {
    if (n >= kLanes) return store(p, x);
    T some[kLanes];
    store(some, x);
    std::memcpy(p, some, n * sizeof(T));
}

// Up to sixteen floats as pairs of bfloat16; a last one alone has a zero beside it.
struct Pairs {
    uint32_t words[kLanes / 2];
    int count;

    Pairs(const float* source, int n) : count((n + 1) / 2) {
        Brain numbers[kLanes];
        store(numbers, load(source, n));
        std::memcpy(words, numbers, sizeof words);
    }
};

// e^x within 2 units in the last place; 0 below -87.3, clamped above 88, exactly 1 at 0, not a number stays so.
inline F16 exp(F16 x) {
    const F16 lowest = splat(-87.3f);
    F16 t = min(splat(88.0f), max(lowest, x));
    F16 n = nearest(mul(t, splat(1.44269504088896341f)));
    F16 r = fma(n, splat(-0.693359375f), t);
    r = fma(n, splat(2.12194440e-4f), r);
    F16 p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), splat(1.0f));
    return zero_below(x, lowest, mul(p, power_of_two(n)));
}

inline float exp(float x) {
    float all[kLanes];
    store(all, exp(splat(x)));
    return all[0];
}

}  // namespace funitel
