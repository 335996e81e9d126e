// Keys and values as codes of 8 or 4 bits, with a scale and a zero of each token and head, and attention to them as they
// are. A number is scale x code + zero. Codes of 8 bits are signed, those of 4 bits are not.
//
// Heads are transformed before they are rounded, see hadamard.h: keys and queries alike, so that scores stay what they
// were, and values, so that what a query gathers is transformed back. Keys may have a frame besides, see KeyFrame.
//
// A block has of each head its keys, then their scales and zeros; the values of all heads follow the same way. Keys lie in
// quads of inputs, [quad][token][4], values in quads of tokens, [quad][input][4]. Where codes have 4 bits, the first half
// of 8 inputs of a key is in the low halves of 4 bytes, of 32 inputs of values the first 16 are. Heads are filled up with
// zeros to whole bytes.
//
// Queries, and weights times the scales of values, are levels of 16 bits, as in levels.h: a high and a low byte, each
// multiplied by itself. Sums of a part of the context are exact integers, so that a query's result depends neither on what
// shares the batch nor on which queries are computed together.
#pragma once

#include <algorithm>

#include "attention.h"
#include "dot_products.h"
#include "hadamard.h"
#include "levels.h"
#include "vector.h"

namespace funitel {

// target[i] = the product of row i of a map [dim][dim], stored input by input, with x.
inline void apply_map(const float* map, const float* x, int dim, float* target) {
    for (int i = 0; i < dim; i += kLanes) {
        const int n = dim - i;
        F16 sum = splat(0.0f);
        for (int j = 0; j < dim; j++) sum = fma(splat(x[j]), load(map + size_t(j) * dim + i, n), sum);
        store(target + i, sum, n);
    }
}

// A number is scale x code + zero.
template <int Bits>
struct HeadCodes {
    static constexpr int kLevels = 1 << Bits;
    static constexpr int kOffset = Bits == 8 ? 128 : 0;  // of the code that stands for the smallest number
    // What the smallest and the largest number come nearer to each other by, tried for the least error: few levels are
    // worth more near the middle.
    static constexpr float kShares[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};
    static constexpr int kTried = Bits == 8 ? 1 : 5;

    int8_t codes[kMostDim];
    Half scale, zero;

    // Numbers that follow the first `dim` are zeros, up to `padded`.
    HeadCodes(const float* x, int dim, int padded) {
        F16 low = splat(std::numeric_limits<float>::infinity()), high = sub(splat(0.0f), low), check = splat(0.0f);
        for (int i = 0; i < padded; i += kLanes) {
            const int n = dim - i;
            const F16 values = load(x + i);
            check = fma(values, splat(0.0f), check);  // no number where one is none, or infinite
            if (n <= 0) break;
            low = min(n < kLanes ? head_of(x + i, n) : values, low);
            high = max(n < kLanes ? head_of(x + i, n) : values, high);
        }
        const float least = smallest(low), most = largest(high), none = sum(check);
        float best = std::numeric_limits<float>::infinity();
        float chosen_scale = 0.0f, chosen_zero = 0.0f;
        for (int i = 0; i < kTried; i++) {
            const float middle = 0.5f * (least + most), reach = (most - middle) * kShares[i];
            set_number(scale, 2.0f * reach / (kLevels - 1) + none);
            set_number(zero, middle - reach + kOffset * to_float(scale) + none);
            const float error = kTried == 1 ? 0.0f : round(x, dim, nullptr);
            if (i > 0 && !(error < best)) continue;
            best = error;
            chosen_scale = to_float(scale);
            chosen_zero = to_float(zero);
        }
        set_number(scale, chosen_scale);
        set_number(zero, chosen_zero);
        round(x, padded, codes);
    }

  private:
    // The first n < 16 values, and the first one again in place of the others.
    static F16 head_of(const float* x, int n) {
        float some[kLanes];
        for (int i = 0; i < kLanes; i++) some[i] = x[i < n ? i : 0];
        return load(some);
    }

    // Round to codes; the sum of the squares of the errors.
    float round(const float* x, int count, int8_t* target) const {
        const float size = to_float(scale);
        const F16 s = splat(size), z = splat(to_float(zero)), inverse = splat(size > 0.0f ? 1.0f / size : 0.0f);
        const F16 lowest = splat(float(-kOffset)), highest = splat(float(kLevels - 1 - kOffset));
        static constexpr float ones[kLanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        F16 errors = splat(0.0f);
        for (int i = 0; i < count; i += kLanes) {
            const F16 values = load(x + i);
            const F16 code = min(highest, max(lowest, nearest(mul(sub(values, z), inverse))));
            if (target != nullptr) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), to_bytes(code));
            } else {
                const F16 error = mul(sub(fma(code, s, z), values), load(ones, count - i));
                errors = fma(error, error, errors);
            }
        }
        return sum(errors);
    }
};

// Where the codes of one layer and one sequence lie.
template <int Bits>
struct CodePages {
    static constexpr int kUnit = Bits == 8 ? kLanes : 2 * kLanes;  // inputs of a head are filled up to a multiple
    static constexpr int kZero = Bits == 8 ? kWideOffset : 0, kMostCode = (1 << Bits) - 1;
    static constexpr int kPerByte = 8 / Bits;

    uint8_t* pool;
    const int32_t* blocks;
    size_t block_stride, layer_offset;  // bytes
    int block_size, num_kv_heads, head_dim;
    KeyFrame frame;

    int padded_dim() const { return divide_up(head_dim, kUnit) * kUnit; }
    int rows() const { return divide_up(block_size, kQuad); }  // quads of tokens of a block
    size_t scales_bytes() const { return 2 * sizeof(Half) * size_t(block_size); }
    size_t key_bytes() const { return size_t(padded_dim()) / kPerByte * block_size; }
    size_t value_bytes() const { return size_t(padded_dim()) / kPerByte * rows() * kQuad; }
    size_t key_size() const { return key_bytes() + scales_bytes(); }  // of a head, with scales and zeros
    size_t value_size() const { return value_bytes() + scales_bytes(); }
    size_t layer_bytes() const { return num_kv_heads * (key_size() + value_size()); }

    CodePages(void* pool, const int32_t* blocks, int block_size, int num_kv_heads, int head_dim, int num_layers, int layer,
              const KeyFrame& frame)
        : pool(static_cast<uint8_t*>(pool)), blocks(blocks), block_size(block_size), num_kv_heads(num_kv_heads),
          head_dim(head_dim), frame(frame) {
        block_stride = layer_bytes() * num_layers;
        layer_offset = layer_bytes() * layer;
    }

    uint8_t* keys(int block, int head) const {
        return pool + size_t(blocks[block]) * block_stride + layer_offset + head * key_size();
    }
    uint8_t* values(int block, int head) const {
        return keys(block, 0) + num_kv_heads * key_size() + head * value_size();
    }
    // The scales of a block's tokens, which the zeros follow, behind codes of so many bytes.
    static Half* scales(uint8_t* codes, size_t num_bytes) { return reinterpret_cast<Half*>(codes + num_bytes); }

    void write(int position, int head, const float* key, const float* value) const {
        const int block = position / block_size, offset = position % block_size, padded = padded_dim();
        alignas(64) float x[kMostDim];
        enter_key(position, head, key, x);
        write_key(keys(block, head), offset, HeadCodes<Bits>(x, head_dim, padded), padded);
        std::copy_n(value, head_dim, x);
        std::fill(x + head_dim, x + padded, 0.0f);
        transform(x, head_dim);
        write_value(values(block, head), offset, HeadCodes<Bits>(x, head_dim, padded), padded);
    }

    // What a query is multiplied with keys as, [padded_dim].
    void enter_query(int head, const float* query, float* target) const {
        const KeyFrame own = frame.of_head(head, head_dim);
        if (own.query_map == nullptr) {
            std::copy_n(query, head_dim, target);
        } else {
            apply_map(own.query_map, query, head_dim, target);
        }
        std::fill(target + head_dim, target + padded_dim(), 0.0f);
        transform(target, head_dim);
    }

  private:
    void enter_key(int position, int head, const float* key, float* target) const {
        const KeyFrame own = frame.of_head(head, head_dim);
        if (own.key_map == nullptr) {
            std::copy_n(key, head_dim, target);
        } else {
            const float* shift = position == 0 ? own.first_shift : own.shift;
            float moved[kMostDim];
            for (int d = 0; d < head_dim; d++) moved[d] = key[d] - shift[d];
            apply_map(own.key_map, moved, head_dim, target);
        }
        std::fill(target + head_dim, target + padded_dim(), 0.0f);
        transform(target, head_dim);
    }

    void write_key(uint8_t* target, int offset, const HeadCodes<Bits>& head, int padded) const {
        set_scales(scales(target, key_bytes()), offset, head);
        constexpr int each = kQuad * kPerByte;
        for (int d = 0; d < padded; d += each) {
            uint8_t* place = target + (size_t(d / each) * block_size + offset) * kQuad;
            for (int i = 0; i < kQuad; i++) place[i] = byte_of(head.codes + d + i, kQuad);
        }
    }

    void write_value(uint8_t* target, int offset, const HeadCodes<Bits>& head, int padded) const {
        set_scales(scales(target, value_bytes()), offset, head);
        target += size_t(offset / kQuad) * padded / kPerByte * kQuad + offset % kQuad;
        for (int d = 0; d < padded; d += kUnit, target += kLanes * kQuad) {
            for (int i = 0; i < kLanes; i++) target[i * kQuad] = byte_of(head.codes + d + i, kLanes);
        }
    }

    // A code, or with 4 bits two of them, the second `step` behind.
    static uint8_t byte_of(const int8_t* codes, int step) {
        if constexpr (Bits == 8) return static_cast<uint8_t>(codes[0] + kWideOffset);
        return static_cast<uint8_t>(codes[0] | codes[step] << 4);
    }

    void set_scales(Half* target, int offset, const HeadCodes<Bits>& head) const {
        target[offset] = head.scale;
        target[block_size + offset] = head.zero;
    }
};

// Sixteen levels as two planes of signed bytes: level = high x kPlaneBase + low.
struct PlaneBytes {
    F16 lower, upper;
    __m128i low, high;

    explicit PlaneBytes(F16 levels) {
        const F16 whole = nearest(levels);
        upper = nearest(mul(whole, splat(1.0f / kPlaneBase)));
        lower = fma(upper, splat(-float(kPlaneBase)), whole);
        low = to_bytes(lower);
        high = to_bytes(upper);
    }
};

constexpr int kMostFineLevel = kMostLevel * kPlaneBase;

// What turns numbers up to `most` into levels, and levels back. `most` that is no number stays so.
inline F16 inverse_level(float most) { return splat(most > kSmallest ? kMostFineLevel / most : 0.0f); }
inline float level_size(float most) { return most / kMostFineLevel; }

// Queries that are multiplied together, and values that are summed together; sums of both planes stay in registers.
constexpr int kCodeQueries = kRegisters == 32 ? 6 : 3, kCodeValueQueries = kRegisters == 32 ? 3 : 2;

// The words of query `place`, of quad `quad`: low levels, then high ones.
inline int32_t* query_words(const Scratch& s, int quad, int place) {
    return reinterpret_cast<int32_t*>(s.queries) + (size_t(quad) * kMaxQueries + place) * 2;
}

// Lay out a query as levels.
template <int Bits>
inline void set_query_levels(const CodePages<Bits>& pages, int head, Scratch& s, int place, const float* query) {
    const int dim = pages.head_dim, padded = pages.padded_dim();
    alignas(64) float x[kMostDim];
    pages.enter_query(head, query, x);
    F16 top = splat(0.0f), check = splat(0.0f);
    for (int d = 0; d < padded; d += kLanes) {
        top = max(magnitude(load(x + d)), top);
        check = fma(load(x + d), splat(0.0f), check);
    }
    const float most = largest(top) + sum(check);
    const F16 inverse = inverse_level(most);
    int low_total = 0, high_total = 0;
    for (int d = 0; d < padded; d += kLanes) {
        const PlaneBytes planes(mul(load(x + d), inverse));
        alignas(16) int32_t low[kQuad], high[kQuad];
        _mm_store_si128(reinterpret_cast<__m128i*>(low), planes.low);
        _mm_store_si128(reinterpret_cast<__m128i*>(high), planes.high);
        for (int i = 0; i < kQuad; i++) {
            int32_t* words = query_words(s, d / kQuad + i, place);
            words[0] = low[i];
            words[1] = high[i];
        }
        low_total += sum(planes.low);
        high_total += sum(planes.high);
    }
    LevelQuery& own = s.level_queries[place];
    own.size = level_size(most);
    own.sum = own.size * static_cast<float>(high_total * kPlaneBase + low_total);
    own.totals[0] = -low_total;
    own.totals[1] = -high_total;
    own.shift = own.first_shift = 0.0f;
    const KeyFrame frame = pages.frame.of_head(head, dim);
    if (frame.shift != nullptr) {
        F16 product = splat(0.0f), first = splat(0.0f);
        for (int d = 0; d < dim; d += kLanes) {
            const F16 some = load(query + d, dim - d), shift = load(frame.shift + d, dim - d);
            product = fma(some, shift, product);
            first = fma(some, sub(load(frame.first_shift + d, dim - d), shift), first);
        }
        own.shift = sum(product);
        own.first_shift = sum(first);
    }
}

// Both planes of a sum of products of codes with levels.
template <int Bits>
struct PlaneSums {
    using Sum = DotSum<CodePages<Bits>::kMostCode, CodePages<Bits>::kZero>;
    Sum low, high;

    void start(const int32_t* totals) {
        low.start(totals);
        high.start(totals + 1);
    }
    void add(const Codes<CodePages<Bits>::kMostCode>& codes, Bytes low_levels, Bytes high_levels) {
        low.add(codes, low_levels);
        high.add(codes, high_levels);
    }
    void settle(int num_quads) {
        low.settle(num_quads);
        high.settle(num_quads);
    }
    Part total() const { return fma(to_part(high.total()), splat_part(kPlaneBase), to_part(low.total())); }
};

// Scores of N queries from `place` on with the n <= 16 tokens that have their codes, scales and zeros here.
template <int Bits, int N>
inline void score_codes(const uint8_t* codes, const Half* scales, const Half* zeros, int n, int block_size, int quads,
                        const Scratch& s, int place, float* scores) {
    using Code = Codes<CodePages<Bits>::kMostCode>;
    F16 out[N];
    for (int part = 0; part < kParts; part++) {
        PlaneSums<Bits> sums[N];
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) sums[q].start(s.level_queries[place + q].totals);
        auto add = [&](int quad, Bytes bytes) __attribute__((always_inline)) {
            const Code code(bytes);
#pragma GCC unroll 6
            for (int q = 0; q < N; q++) {
                const int32_t* words = query_words(s, quad, place + q);
                sums[q].add(code, splat_words(words[0]), splat_words(words[1]));
                sums[q].settle(quad + 1);
            }
        };
        auto add_bytes = [&](int i, const uint8_t* source) __attribute__((always_inline)) {
            const Bytes bytes = load_bytes(source);
            if constexpr (Bits == 8) {
                add(i, bytes);
            } else {
                const Bytes lower = splat_bytes(15);
                add(2 * i, both(bytes, lower));
                add(2 * i + 1, both(shift_right(bytes, 4), lower));
            }
        };
        const int count = quads / CodePages<Bits>::kPerByte;
        const size_t step = size_t(block_size) * kQuad;
        if (n == kLanes) {
            for (int i = 0; i < count; i++) add_bytes(i, codes + i * step + part * kPartBytes);
        } else {
            for (int i = 0; i < count; i++) {
                alignas(64) uint8_t some[kQuadBytes] = {};
                std::memcpy(some, codes + i * step, size_t(n) * kQuad);
                add_bytes(i, some + part * kPartBytes);
            }
        }
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) {
            sums[q].settle(0);
            part_of(out[q], part) = sums[q].total();
        }
    }
    const F16 scale = load(scales, n), zero = load(zeros, n);
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
        const LevelQuery& own = s.level_queries[place + q];
        const F16 rest = fma(zero, splat(own.sum), splat(own.shift));
        store(scores + size_t(place + q) * s.stride, fma(scale, mul(out[q], splat(own.size)), rest));
    }
}

// The same for `count` queries, some at a time.
template <int Bits>
inline void score_code_queries(const CodePages<Bits>& pages, const uint8_t* keys, int offset, int n, const Scratch& s,
                               int count, float* scores) {
    const Half* scales = CodePages<Bits>::scales(const_cast<uint8_t*>(keys), pages.key_bytes()) + offset;
    const Half* zeros = scales + pages.block_size;
    const uint8_t* codes = keys + size_t(offset) * kQuad;
    const int quads = pages.padded_dim() / kQuad;
    auto some = [&](auto of, int place) {
        score_codes<Bits, decltype(of)::value>(codes, scales, zeros, n, pages.block_size, quads, s, place, scores);
    };
    for (int place = 0; place < count;) {
        const int left = count - place;
        if constexpr (kCodeQueries >= 6) {
            if (left >= 6) {
                some(std::integral_constant<int, 6>(), place);
                place += 6;
                continue;
            }
            if (left == 4) {
                some(std::integral_constant<int, 4>(), place);
                place += 4;
                continue;
            }
        }
        if (left >= 3) {
            some(std::integral_constant<int, 3>(), place);
            place += 3;
        } else if (left == 2) {
            some(std::integral_constant<int, 2>(), place);
            place += 2;
        } else {
            some(std::integral_constant<int, 1>(), place++);
        }
    }
}

// Lanes [begin, end), the others zero.
inline F16 between(F16 x, int begin, int end) {
    float some[kLanes];
    store(some, x);
    for (int i = 0; i < kLanes; i++) some[i] = i >= begin && i < end ? some[i] : 0.0f;
    return load(some);
}

// Weights of query `place` for the tokens [low, high) times the scales of their values, as levels, [plane][quad of tokens
// of the part's blocks]; zeros for the others.
template <int Bits>
inline void set_weight_levels(const CodePages<Bits>& pages, int head, int from, int low, int high, Scratch& s, int place) {
    const int size = pages.block_size, rows = pages.rows();
    float* weights = s.scores + size_t(place) * s.stride;
    const int first = low / size, end = divide_up(high, size);
    F16 top = splat(0.0f), check = splat(0.0f), zeros = splat(0.0f);
    auto each = [&](auto function) __attribute__((always_inline)) {
        for (int block = first; block < end; block++) {
            for (int offset = 0; offset < size; offset += kLanes) {
                function(block, offset, std::min(kLanes, size - offset), weights + (block * size + offset - from));
            }
        }
    };
    each([&](int block, int offset, int n, float* weight) __attribute__((always_inline)) {
        const Half* scale = CodePages<Bits>::scales(pages.values(block, head), pages.value_bytes()) + offset;
        F16 w = load(weight, n), scales = load(scale, n), zero = load(scale + size, n);
        const int begin = low - block * size - offset, stop = high - block * size - offset;
        if (begin > 0 || stop < n) {  // what is there of tokens that are not seen may be no number
            w = between(w, begin, stop);
            scales = between(scales, begin, stop);
            zero = between(zero, begin, stop);
        }
        const F16 product = mul(w, scales);
        zeros = fma(w, zero, zeros);
        top = max(product, top);
        check = fma(product, splat(0.0f), check);
        store(weight, product, n);
    });
    const float most = largest(top) + sum(check);
    const F16 inverse = inverse_level(most);
    int32_t* words = s.weight_words(place);
    const int num_words = s.num_weight_words;
    F16 low_total = splat(0.0f), high_total = splat(0.0f);  // whole numbers below 2^24
    std::fill(words, words + 2 * num_words, 0);
    each([&](int block, int offset, int n, float* weight) __attribute__((always_inline)) {
        const PlaneBytes planes(mul(load(weight, n), inverse));
        int32_t* word = words + (block - from / size) * rows + offset / kQuad;
        if (n == kLanes) {
            std::memcpy(word, &planes.low, kLanes);
            std::memcpy(word + num_words, &planes.high, kLanes);
        } else {
            const size_t bytes = size_t(divide_up(n, kQuad)) * sizeof(int32_t);
            std::memcpy(word, &planes.low, bytes);
            std::memcpy(word + num_words, &planes.high, bytes);
        }
        low_total = add(low_total, planes.lower);
        high_total = add(high_total, planes.upper);
    });
    LevelWeights& own = s.level_weights[place];
    own.size = level_size(most);
    own.zeros = sum(zeros);
    own.totals[0] = -static_cast<int32_t>(sum(low_total));
    own.totals[1] = -static_cast<int32_t>(sum(high_total));
}

// V vectors of values from input `d` on of N queries from `place` on, gathered from the rows of tokens [low, high). With
// the first of them keys of the next part are read ahead, those of blocks before `end`.
template <int Bits, int N, int V>
inline void weigh_codes(const CodePages<Bits>& pages, int head, int from, int low, int high, int end, const Scratch& s,
                        int place, int d) {
    using Code = Codes<CodePages<Bits>::kMostCode>;
    constexpr int per_byte = CodePages<Bits>::kPerByte;
    const int size = pages.block_size, rows = pages.rows(), dim = pages.head_dim;
    const size_t row_bytes = size_t(pages.padded_dim()) / per_byte * kQuad;
    const int32_t* words[N];
    F16 out[N][V];
#pragma GCC unroll 3
    for (int q = 0; q < N; q++) words[q] = s.weight_words(place + q);
    for (int part = 0; part < kParts; part++) {
        PlaneSums<Bits> sums[N][V];
#pragma GCC unroll 3
        for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[q][v].start(s.level_weights[place + q].totals);
        }
        int count = 0;
        for (int block = low / size; block * size < high; block++) {
            const int later = block + part_size(size) / size;
            if (place == 0 && d == 0 && later < end) prefetch(pages.keys(later, head), pages.key_size());
            const int begin = std::max(0, low - block * size) / kQuad;
            const int last = divide_up(std::min(size, high - block * size), kQuad);
            const uint8_t* source = pages.values(block, head) + begin * row_bytes + size_t(d) / per_byte * kQuad;
            int word = (block - from / size) * rows + begin;
            for (int row = begin; row < last; row++, word++, source += row_bytes) {
                count++;
                auto add = [&](int v, Bytes bytes) __attribute__((always_inline)) {
                    const Code code(bytes);
#pragma GCC unroll 3
                    for (int q = 0; q < N; q++) {
                        sums[q][v].add(code, splat_words(words[q][word]), splat_words(words[q][s.num_weight_words + word]));
                        sums[q][v].settle(count);
                    }
                };
#pragma GCC unroll 4
                for (int v = 0; v < V; v += per_byte) {
                    const Bytes bytes = load_bytes(source + v / per_byte * kQuadBytes + part * kPartBytes);
                    if constexpr (Bits == 8) {
                        add(v, bytes);
                    } else {
                        add(v, both(bytes, splat_bytes(15)));
                        add(v + 1, both(shift_right(bytes, 4), splat_bytes(15)));
                    }
                }
            }
        }
#pragma GCC unroll 3
        for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                sums[q][v].settle(0);
                part_of(out[q][v], part) = sums[q][v].total();
            }
        }
    }
#pragma GCC unroll 3
    for (int q = 0; q < N; q++) {
        const LevelWeights& own = s.level_weights[place + q];
        float* target = s.values + size_t(place + q) * dim;
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const int at = d + v * kLanes;
            if (at < dim) store(target + at, fma(out[q][v], splat(own.size), splat(own.zeros)), dim - at);
        }
    }
}

template <int Bits, int N>
inline void weigh_all_codes(const CodePages<Bits>& pages, int head, int from, int low, int high, int end, const Scratch& s,
                            int place) {
    constexpr int least = CodePages<Bits>::kPerByte, most = kRegisters == 32 ? 4 : 2;
    const int padded = pages.padded_dim();
    int d = 0;
    for (; d + most * kLanes <= padded; d += most * kLanes) {
        weigh_codes<Bits, N, most>(pages, head, from, low, high, end, s, place, d);
    }
    for (; d < padded; d += least * kLanes) weigh_codes<Bits, N, least>(pages, head, from, low, high, end, s, place, d);
}

// As `attend_part` for numbers.
template <int Bits>
inline void attend_codes(const CodePages<Bits>& pages, int head, int from, int to, const Queries& all, Scratch& s,
                         Gathered* parts) {
    const Seen seen(all, from, to);
    for (int q = 0; q < all.count; q++) parts[q] = {0.0f, 0.0f, s.values + size_t(q) * pages.head_dim};
    if (seen.lowest >= seen.highest) return;
    const int size = pages.block_size, end = divide_up(all.end, size);
    for (int block = seen.lowest / size; block * size < seen.highest; block++) {
        const uint8_t* keys = pages.keys(block, head);
        if (from <= all.begin) read_keys_ahead(pages, head, block, std::min(end, to / size));
        prefetch(pages.values(block, head), pages.value_size());
        for (int offset = 0; offset < size; offset += kLanes) {
            const int token = block * size + offset;
            if (token >= seen.highest) break;
            score_code_queries(pages, keys, offset, std::min(kLanes, size - offset), s, all.count, s.scores + (token - from));
        }
    }
    if (seen.lowest == 0) {
        for (int q = 0; q < all.count; q++) s.scores[size_t(q) * s.stride] += s.level_queries[q].first_shift;
    }
    std::memset(s.values, 0, size_t(all.count) * pages.head_dim * sizeof(float));
    for (int q = 0; q < all.count; q++) {
        const int low = seen.low[q], high = seen.high[q];
        if (low >= high) {
            s.clear_weights(q);
            continue;
        }
        parts[q].weight = all.weights<float>(s.scores + size_t(q) * s.stride, q, from, low, high, &parts[q].largest);
        set_weight_levels(pages, head, from, low, high, s, q);
    }
    for (int q = 0; q < all.count;) {
        const int n = std::min(kCodeValueQueries, all.count - q);
        int low = to, high = from;
        for (int i = q; i < q + n; i++) {
            if (seen.low[i] >= seen.high[i]) continue;
            low = std::min(low, seen.low[i]);
            high = std::max(high, seen.high[i]);
        }
        if (low < high) {
            if (n == 1) weigh_all_codes<Bits, 1>(pages, head, from, low, high, end, s, q);
            if (n == 2) weigh_all_codes<Bits, 2>(pages, head, from, low, high, end, s, q);
            if constexpr (kCodeValueQueries >= 3) {
                if (n == 3) weigh_all_codes<Bits, 3>(pages, head, from, low, high, end, s, q);
            }
        }
        q += n;
    }
}

// Codes as keys and values, for the engine.
template <int Bits>
struct CodeKeys {
    using Pages = CodePages<Bits>;

    static Pages pages(void* pool, const int32_t* blocks, int block_size, int num_kv_heads, int head_dim, int num_layers,
                       int layer, const KeyFrame& frame) {
        return Pages(pool, blocks, block_size, num_kv_heads, head_dim, num_layers, layer, frame);
    }
    static void set_query(const Pages& pages, int head, Scratch& s, int place, const float* query) {
        set_query_levels(pages, head, s, place, query);
    }
    static void attend(const Pages& pages, int head, int from, int to, const Queries& all, Scratch& s, Gathered* parts) {
        attend_codes(pages, head, from, to, all, s, parts);
    }
    static void leave(float* attended, int head_dim) { transform(attended, head_dim); }
};

}  // namespace funitel
