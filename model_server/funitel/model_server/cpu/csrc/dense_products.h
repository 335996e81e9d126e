// The product of a few rows of activations with panels of floating-point weights. Sums have a fixed order, so that a row's
// result does not depend on what shares the batch.
#pragma once

#include <algorithm>

#include "matrix.h"
#include "memory.h"
#include "vector.h"

namespace funitel {

// Inputs summed in one go by the float kinds; the sums of such runs are then added in order. Rounding errors grow with
// the length of a sum, so two short levels lose less than one long one.
constexpr int kRun = 128;

// How weights of type W are multiplied: `kTogether` inputs at once, of which a tile has an Activation for each row.
template <class W>
struct DenseProduct {
    using Number = W;
    using Activation = float;
    using Weights = F16;

    static Weights take(const W* source) { return load(source); }
    static F16 add(F16 sum, const Weights& weights, const float* x) { return fma(splat(*x), weights, sum); }
};

// The product of pairs of bfloat16 in float32, which has no rounding of its own: the second number's is added first, as
// vdpbf16ps does. Only products or sums below 2^-126 differ from its.
struct PairProduct {
    using Number = Brain;
    using Activation = uint32_t;
    struct Weights {
        F16 first, second;
    };

    static Weights take(const Brain* source) { return {load_first(source), load_second(source)}; }
    static F16 add(F16 sum, const Weights& weights, const uint32_t* x) {
        sum = fma(splat(number_of_bits(*x & 0xffff0000)), weights.second, sum);
        return fma(splat(number_of_bits(*x << 16)), weights.first, sum);
    }

  private:
    static float number_of_bits(uint32_t bits) {
        float number;
        std::memcpy(&number, &bits, sizeof number);
        return number;
    }
};

#if defined(__AVX512VNNI__)

// The same by the processor's instruction, where it has one.
struct FastPairProduct {
    using Number = Brain;
    using Activation = uint32_t;
    using Weights = __m512i;

    static Weights take(const Brain* source) { return _mm512_loadu_si512(source); }
    static F16 add(F16 sum, const Weights& weights, const uint32_t* x) {
        asm("vdpbf16ps %[x]%{1to16%}, %[weights], %[sum]" : [sum] "+v"(sum.v) : [weights] "v"(weights), [x] "m"(*x));
        return sum;
    }
};

inline bool has_pair_products() {
    static const bool has = __builtin_cpu_supports("avx512bf16");
    return has;
}

#endif

// out[r][p] = the products of row r of a tile with panel p. `x` is the tile, `w` the first panel.
template <class Kernel, int R, int P>
inline void multiply(const typename Kernel::Number* w, const typename Kernel::Activation* x, int depth, F16 (&out)[R][P]) {
    constexpr int together = kTogether<typename Kernel::Number>, run = kRun / together;
    const int count = divide_up(depth, together);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) out[r][p] = splat(0.0f);
    }
    for (int begin = 0; begin < count; begin += run) {
        const int end = std::min(count, begin + run);
        F16 sums[R][P];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sums[r][p] = splat(0.0f);
        }
        for (int i = begin; i < end; i++) {
            typename Kernel::Weights weights[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const auto* source = w + (size_t(i) * kPair + p) * kLanes * together;
                fetch(source);
                weights[p] = Kernel::take(source);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) sums[r][p] = Kernel::add(sums[r][p], weights[p], x + size_t(i) * R + r);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) out[r][p] = add(out[r][p], sums[r][p]);
        }
    }
}

// Panels of a pair multiplied at a time, so that the accumulators fit in the registers.
constexpr int dense_panels_at_once(int rows) { return kRegisters == 32 || rows <= 3 ? kPair : 1; }

// sums[r][p] = the products of row r of a tile of R rows with panel p of a pair.
template <class Kernel, int R>
void multiply_tile(const typename Kernel::Number* w, int depth, const uint8_t* tile, F16 (*sums)[kPair]) {
    constexpr int P = dense_panels_at_once(R);
    const auto* x = reinterpret_cast<const typename Kernel::Activation*>(tile);
    for (int panel = 0; panel < kPair; panel += P) {
        F16 found[R][P];
        multiply<Kernel, R, P>(w + panel * kLanes * kTogether<typename Kernel::Number>, x, depth, found);
        for (int r = 0; r < R; r++) {
            for (int p = 0; p < P; p++) sums[r][panel + p] = found[r][p];
        }
    }
}

template <class Kernel>
void multiply_by(const typename Kernel::Number* w, int depth, const uint8_t* tile, int count, F16 (*sums)[kPair]) {
    switch (count) {
#define FUNITEL_CASE(R) \
    case R: return multiply_tile<Kernel, R>(w, depth, tile, sums);
        FUNITEL_CASE(1)
        FUNITEL_CASE(2)
        FUNITEL_CASE(3)
        FUNITEL_CASE(4)
        FUNITEL_CASE(5)
        FUNITEL_CASE(6)
#if defined(__AVX512F__)
        FUNITEL_CASE(7)
        FUNITEL_CASE(8)
        FUNITEL_CASE(9)
        FUNITEL_CASE(10)
        FUNITEL_CASE(11)
        FUNITEL_CASE(12)
#endif
#undef FUNITEL_CASE
    }
}

template <class W>
void multiply_dense(const W* w, int depth, const uint8_t* tile, int count, F16 (*sums)[kPair]) {
    multiply_by<DenseProduct<W>>(w, depth, tile, count, sums);
}

inline void multiply_dense(const Brain* w, int depth, const uint8_t* tile, int count, F16 (*sums)[kPair]) {
#if defined(__AVX512VNNI__)
    if (has_pair_products()) return multiply_by<FastPairProduct>(w, depth, tile, count, sums);
#endif
    multiply_by<PairProduct>(w, depth, tile, count, sums);
}

}  // namespace funitel
