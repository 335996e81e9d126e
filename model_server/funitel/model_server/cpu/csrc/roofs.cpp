// What this processor can do at best: read memory, and multiply and add with the instructions of each kind of matrix.
// A library of its own, built when kernels are measured; serving has no use for it.
#include <algorithm>
#include <chrono>
#include <new>
#include <vector>

#include "entry.h"
#include "dense_products.h"
#include "memory.h"
#include "threads.h"
#include "tile_registers.h"

namespace funitel {
namespace {

constexpr size_t kChunk = size_t(1) << 20;  // claimed by a thread at a time
#if defined(__AVX512F__)
constexpr int kRegister = 64;
#else
constexpr int kRegister = 32;
#endif
constexpr int kFetchAhead = 1024;

inline void load_all(const uint8_t* p) {
#if defined(__AVX512F__)
    __m512i value = _mm512_load_si512(p);
    asm volatile("" : : "v"(value));
#else
    __m256i value = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    asm volatile("" : : "x"(value));
#endif
}

enum Fetch { kNoFetch, kFetchNear, kFetchOnce };

// Read a chunk in some streams side by side, as a product reads some panels.
template <int Streams, Fetch How>
void read_chunk(const uint8_t* chunk) {
    constexpr size_t length = kChunk / Streams;
    for (size_t i = 0; i < length; i += 64) {
#pragma GCC unroll 8
        for (int s = 0; s < Streams; s++) {
            const uint8_t* p = chunk + s * length + i;
            if (How == kFetchNear) _mm_prefetch(reinterpret_cast<const char*>(p) + kFetchAhead, _MM_HINT_T0);
            if (How == kFetchOnce) _mm_prefetch(reinterpret_cast<const char*>(p) + kFetchAhead, _MM_HINT_NTA);
            for (int j = 0; j < 64; j += kRegister) load_all(p + j);
        }
    }
}

using Read = void (*)(const uint8_t*);
constexpr Read kReads[] = {
    read_chunk<1, kNoFetch>,   read_chunk<1, kFetchNear>, read_chunk<1, kFetchOnce>, read_chunk<4, kNoFetch>,
    read_chunk<4, kFetchNear>, read_chunk<4, kFetchOnce>, read_chunk<8, kNoFetch>,   read_chunk<8, kFetchNear>,
};

constexpr int kTimes = 20000;

// Keep a value in its register, and the compiler from knowing it: it would compute in advance, and do once what is the
// same for two sums. (An operand in memory would move all sums there.)
#if defined(__AVX512F__)
using Integers = __m512i;
inline void hide(Integers& x) { asm volatile("" : "+v"(x)); }
inline void hide(F16& x) { asm volatile("" : "+v"(x.v)); }
#else
using Integers = __m256i;
inline void hide(Integers& x) { asm volatile("" : "+x"(x)); }
inline void hide(F16& x) { asm volatile("" : "+x"(x.a), "+x"(x.b)); }
#endif

// Add to many sums in turn, so that none waits for itself, again and again; returns how often.
template <class T, int Sums, class Add>
int64_t repeat(T zero, Add add) {
    T sums[Sums];
#pragma GCC unroll 24
    for (int s = 0; s < Sums; s++) hide(sums[s] = zero);
    for (int i = 0; i < kTimes; i++) {
#pragma GCC unroll 24
        for (int s = 0; s < Sums; s++) add(sums[s]);
    }
#pragma GCC unroll 24
    for (int s = 0; s < Sums; s++) hide(sums[s]);
    return int64_t(kTimes) * Sums;
}

// These return the multiply-adds done.

int64_t multiply_float() {
    F16 a = splat(1.0f), b = splat(1e-9f);
    hide(a);
    hide(b);
    // Sixteen floats are two registers of AVX2.
    constexpr int sums = kRegister == 64 ? 24 : 6;
    return kLanes * repeat<F16, sums>(splat(0.0f), [&](F16& sum) { sum = fma(a, b, sum); });
}

// Pairs of bfloat16.
template <class Kernel>
int64_t multiply_pairs() {
    constexpr int sums = kRegister == 64 ? 24 : 4;
    Brain numbers[kLanes * kTogether<Brain>] = {};
    uint32_t x = 0x3f803f80;
    asm volatile("" : "+m"(numbers), "+m"(x));
    const auto weights = Kernel::take(numbers);
    return kLanes * kTogether<Brain> *
           repeat<F16, sums>(splat(0.0f), [&](F16& sum) { sum = Kernel::add(sum, weights, &x); });
}

#if defined(__AVX512VNNI__)

// Of four tiles in turn, as products have them.
FUNITEL_AMX int64_t multiply_pairs_in_registers() {
    TileRegisters registers;
    registers.shape(kRegisterRows);
    for (int i = 0; i < kTimes; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    return int64_t(kTimes) * 4 * kRegisterRows * kLanes * kLanes * kTogether<Brain>;
}

#endif

int64_t multiply_pairs() {
#if defined(__AVX512VNNI__)
    if (has_tile_registers()) return multiply_pairs_in_registers();
    if (has_pair_products()) return multiply_pairs<FastPairProduct>();
#endif
    return multiply_pairs<PairProduct>();
}

// Codes of four bits: the narrowest products of bytes, which every instruction set sums fastest.
int64_t multiply_codes() {
    constexpr int count = kRegister == 32 ? 6 : 12;
    const Codes<15> codes(splat_bytes(3));
    int32_t levels = 0x01020304, starts[count];
    asm volatile("" : "=m"(starts), "+m"(levels));  // not known: what is the same for two sums would be done once
    DotSum<15, 8> sums[count];
#pragma GCC unroll 12
    for (int s = 0; s < count; s++) sums[s].start(starts + s);
    for (int i = 0; i < kTimes; i++) {
#pragma GCC unroll 12
        for (int s = 0; s < count; s++) {
            sums[s].add(codes, &levels);
            sums[s].settle(i & 3);
        }
    }
#pragma GCC unroll 12
    for (int s = 0; s < count; s++) {
        Bytes total = sums[s].total();
        hide(total);
    }
    return int64_t(kTimes) * count * sizeof(Bytes);
}

struct Roofs {
    explicit Roofs(int num_threads) : threads(num_threads) {}
    Threads threads;
    Memory buffer;
    int num_chunks = 0;
};

// Seconds that the threads take for all chunks of a job.
template <class Function>
double timed(Roofs& roofs, int num_chunks, Function function) {
    auto begin = std::chrono::steady_clock::now();
    roofs.threads.begin_step();
    roofs.threads.run([](void* job, int chunk, int) { (*static_cast<Function*>(job))(chunk); }, &function, num_chunks);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace
}  // namespace funitel

using funitel::Roofs;

extern "C" {

// Null where there is no memory for the buffer.
Roofs* ENTRY(funitel_roofs)(int32_t num_threads, int64_t num_bytes) {
    Roofs* roofs = new (std::nothrow) Roofs(num_threads);
    if (roofs == nullptr) return nullptr;
    roofs->num_chunks = static_cast<int>(std::max<int64_t>(1, num_bytes / funitel::kChunk));
    // One chunk more, as the last one is fetched ahead of.
    size_t size = (size_t(roofs->num_chunks) + 1) * funitel::kChunk;
    if (!roofs->buffer.grow(size)) {
        delete roofs;
        return nullptr;
    }
    std::memset(roofs->buffer.as<uint8_t>(), 1, size);
    return roofs;
}

void ENTRY(funitel_roofs_release)(Roofs* roofs) { delete roofs; }

int32_t ENTRY(funitel_roofs_num_reads)() { return static_cast<int32_t>(std::size(funitel::kReads)); }

// Bytes a second of one pass over the buffer, read in one of the ways.
double ENTRY(funitel_roofs_read)(Roofs* roofs, int32_t way) {
    const uint8_t* start = roofs->buffer.as<uint8_t>();
    funitel::Read read = funitel::kReads[way];
    double seconds = funitel::timed(*roofs, roofs->num_chunks, [&](int chunk) { read(start + chunk * funitel::kChunk); });
    return double(roofs->num_chunks) * funitel::kChunk / seconds;
}

// Multiply-adds a second with the instructions for matrices of a kind.
double ENTRY(funitel_roofs_multiply)(Roofs* roofs, int32_t kind) {
    int num_chunks = 16 * roofs->threads.count();
    std::atomic<int64_t> done{0};
    double seconds = funitel::timed(*roofs, num_chunks, [&](int) {
        done += kind >= funitel::kInt8       ? funitel::multiply_codes()
                : kind == funitel::kBFloat16 ? funitel::multiply_pairs()
                                             : funitel::multiply_float();
    });
    return done.load() / seconds;
}

}  // extern "C"
