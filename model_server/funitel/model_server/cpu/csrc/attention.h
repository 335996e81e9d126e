// Attention straight from the paged pool. Within a block the keys of a head lie input by input, [head_dim][block_size],
// so that one vector holds the same input of sixteen tokens; values lie token by token, [block_size][head_dim].
//
// The context of a query is cut into parts at fixed places; each part is summed in the order of its tokens, and parts
// are merged in their order. So a query's result does not depend on the rows or the chunk it is computed with, nor on
// whether one thread or several took its parts.
#pragma once

#include <algorithm>

#include "activations.h"
#include "memory.h"
#include "vector.h"

namespace funitel {

// Where the keys and values of one layer and one sequence lie.
template <class T>
struct Paged {
    T* pool;
    const int32_t* blocks;
    size_t block_stride;  // elements between blocks
    size_t layer_offset;  // elements from the start of a block to the layer's keys
    size_t half;          // elements of the layer's keys in a block; its values follow
    int block_size;
    int head_dim;

    T* keys(int block, int head) const {
        return pool + size_t(blocks[block]) * block_stride + layer_offset + size_t(head) * block_size * head_dim;
    }
    T* values(int block, int head) const { return keys(block, head) + half; }

    void write(int position, int head, const float* key, const float* value) const {
        int block = position / block_size, offset = position % block_size;
        T* k = keys(block, head) + offset;
        T* v = values(block, head) + size_t(offset) * head_dim;
        for (int d = 0; d < head_dim; d += kLanes) {
            T converted[kLanes];
            int n = std::min(kLanes, head_dim - d);
            store(converted, load(key + d, n));
            for (int i = 0; i < n; i++) k[size_t(d + i) * block_size] = converted[i];
            store(v + d, load(value + d, n), n);
        }
    }
};

// Query heads handled together, so that a key or value is read once for all of them.
#if defined(__AVX512F__)
constexpr int kMaxQueries = 12, kValueQueries = 6, kValueVectors = 4;
#else
constexpr int kMaxQueries = 6, kValueQueries = 3, kValueVectors = 2;
#endif

constexpr int kPartTokens = 256;

// A whole number of blocks near kPartTokens tokens.
inline int part_size(int block_size) { return std::max(1, kPartTokens / block_size) * block_size; }

// What a query has gathered of its context: the largest score, the sum of weights, the weighted values.
struct Gathered {
    float largest;
    float weight;
    float* values;  // [head_dim]
};

// Add a later part to what has been gathered.
inline void merge(Gathered& all, const Gathered& part, int head_dim) {
    if (part.weight == 0.0f) return;
    if (all.weight == 0.0f) {
        all.largest = part.largest;
        all.weight = part.weight;
        std::memcpy(all.values, part.values, head_dim * sizeof(float));
        return;
    }
    float most = std::max(all.largest, part.largest);
    float before = exp(all.largest - most), now = exp(part.largest - most);
    all.largest = most;
    all.weight = std::fma(part.weight, now, all.weight * before);
    for (int d = 0; d < head_dim; d += kLanes) {
        int n = std::min(kLanes, head_dim - d);
        F16 kept = mul(load(all.values + d, n), splat(before));
        store(all.values + d, fma(load(part.values + d, n), splat(now), kept), n);
    }
}

inline void finish(const Gathered& all, float* out, int head_dim) {
    F16 weight = splat(all.weight);
    for (int d = 0; d < head_dim; d += kLanes) {
        int n = std::min(kLanes, head_dim - d);
        store(out + d, div(load(all.values + d, n), weight), n);
    }
}

// One thread's scratch: up to kMaxQueries queries over one part of the context.
struct Scratch {
    Memory memory;
    int stride;       // scores of a query
    float* scores;    // [kMaxQueries][stride]
    float* queries;   // [head_dim][kMaxQueries]
    float* values;    // [kMaxQueries][head_dim], of a part
    float* gathered;  // [kMaxQueries][head_dim]

    bool reserve(int part_tokens, int head_dim, int block_size) {
        stride = (part_tokens + block_size + 2 * kLanes) / kLanes * kLanes;
        size_t width = size_t(head_dim + kLanes) * kMaxQueries;
        if (!memory.grow((size_t(stride) * kMaxQueries + 3 * width) * sizeof(float))) return false;
        scores = memory.as<float>();
        queries = scores + size_t(stride) * kMaxQueries;
        values = queries + width;
        gathered = values + width;
        return true;
    }
};

// Scores of N queries with the n <= 16 tokens that have their keys from `keys` on.
template <class T, int N>
inline void score(const T* keys, int n, int block_size, const float* queries, int head_dim, float* scores, int stride) {
    F16 sums[N];
#pragma GCC unroll 12
    for (int q = 0; q < N; q++) sums[q] = splat(0.0f);
    if (n == kLanes) {
        for (int d = 0; d < head_dim; d++) {
            F16 key = load(keys + size_t(d) * block_size);
#pragma GCC unroll 12
            for (int q = 0; q < N; q++) sums[q] = fma(splat(queries[d * kMaxQueries + q]), key, sums[q]);
        }
    } else {
        for (int d = 0; d < head_dim; d++) {
            F16 key = load(keys + size_t(d) * block_size, n);
#pragma GCC unroll 12
            for (int q = 0; q < N; q++) sums[q] = fma(splat(queries[d * kMaxQueries + q]), key, sums[q]);
        }
    }
#pragma GCC unroll 12
    for (int q = 0; q < N; q++) store(scores + size_t(q) * stride, sums[q]);
}

// Add the values of tokens [first, last), weighted, to V vectors of N queries.
template <class T, int N, int V, bool IsTail>
inline void weigh(const Paged<T>& paged, int head, int first, int last, int from, const float* weights, int stride,
                  float* values, int dim, int tail) {
    const int n = IsTail ? tail : kLanes;
    F16 sums[N][V];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[q][v] = load(values + q * dim + v * kLanes, n);
    }
    for (int token = first; token < last;) {
        int block = token / paged.block_size, offset = token % paged.block_size;
        int end = std::min(last, token - offset + paged.block_size);
        const T* source = paged.values(block, head) + size_t(offset) * dim;
        for (; token < end; token++, source += dim) {
            F16 row[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) row[v] = load(source + v * kLanes, n);
#pragma GCC unroll 6
            for (int q = 0; q < N; q++) {
                F16 weight = splat(weights[size_t(q) * stride + token - from]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) sums[q][v] = fma(weight, row[v], sums[q][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(values + q * dim + v * kLanes, sums[q][v], n);
    }
}

template <class T, int N>
inline void weigh_all(const Paged<T>& paged, int head, int first, int last, int from, const float* weights, int stride,
                      float* values) {
    int dim = paged.head_dim, d = 0;
    Paged<T> shifted = paged;
    for (; d + kLanes * kValueVectors <= dim; d += kLanes * kValueVectors) {
        shifted.pool = paged.pool + d;
        weigh<T, N, kValueVectors, false>(shifted, head, first, last, from, weights, stride, values + d, dim, 0);
    }
    for (; d < dim; d += kLanes) {
        shifted.pool = paged.pool + d;
        weigh<T, N, 1, true>(shifted, head, first, last, from, weights, stride, values + d, dim, std::min(kLanes, dim - d));
    }
}

// Cap the first `count` scores of a query, and some that follow.
inline void cap_scores(float* scores, int count, float cap) {
    F16 most = splat(cap);
    for (int i = 0; i < count; i += kLanes) store(scores + i, soft_cap(load(scores + i), most));
}

// Lower scores by their distance, the first being that of a token `distance` before the query; and some that follow.
inline void slope_scores(float* scores, int count, int distance, float slope) {
    static const float steps[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F16 each = splat(slope), lanes = load(steps);
    for (int i = 0; i < count; i += kLanes) {
        F16 place = add(splat(static_cast<float>(i - distance)), lanes);
        store(scores + i, add(load(scores + i), mul(each, place)));
    }
}

// Turn the scores of tokens [first, last) into weights; the place of token `from` is the first. Returns their sum.
inline float soften(float* scores, int from, int first, int last, float* most) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    int count = last - from, padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int i = 0; i < first - from; i++) scores[i] = none;
    for (int i = count; i < padded; i++) scores[i] = none;
    F16 top = splat(none);
    for (int i = 0; i < padded; i += kLanes) top = max(top, load(scores + i));
    *most = largest(top);
    F16 total = splat(0.0f), offset = splat(*most);
    for (int i = 0; i < padded; i += kLanes) {
        F16 weight = exp(sub(load(scores + i), offset));
        store(scores + i, weight);
        total = add(total, weight);
    }
    return sum(total);
}

// Queries that attend to the same KV head, the tokens each of them sees, and what becomes of their scores.
struct Queries {
    int count;
    int low[kMaxQueries], high[kMaxQueries];  // tokens [low, high)
    float cap;                                // scores become cap * tanh(score / cap); 0: they stay
    bool has_slopes;
    float slopes[kMaxQueries];  // scores grow by slope * (token - own token)
};

template <class T>
inline void score_block(const Paged<T>& paged, const T* keys, int n, const Scratch& s, int count, float* scores) {
    switch (count) {
#define FUNITEL_CASE(N) \
    case N: return score<T, N>(keys, n, paged.block_size, s.queries, paged.head_dim, scores, s.stride);
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

template <class T>
inline void weigh_some(const Paged<T>& paged, int head, int first, int last, int from, const Scratch& s, int q, int n) {
    if (first >= last) return;
    const float* weights = s.scores + size_t(q) * s.stride;
    float* values = s.values + size_t(q) * paged.head_dim;
    switch (n) {
#define FUNITEL_CASE(N) \
    case N: return weigh_all<T, N>(paged, head, first, last, from, weights, s.stride, values);
        FUNITEL_CASE(1)
        FUNITEL_CASE(2)
        FUNITEL_CASE(3)
#if defined(__AVX512F__)
        FUNITEL_CASE(4)
        FUNITEL_CASE(5)
        FUNITEL_CASE(6)
#endif
#undef FUNITEL_CASE
    }
}

// Attend queries, laid out in s.queries, to part [from, to) of their context; results per query in `parts`.
template <class T>
inline void attend_part(const Paged<T>& paged, int head, int from, int to, const Queries& all, Scratch& s,
                        Gathered* parts) {
    int low[kMaxQueries], high[kMaxQueries], lowest = to, highest = from;
    for (int q = 0; q < all.count; q++) {
        low[q] = std::max(from, all.low[q]);
        high[q] = std::max(low[q], std::min(to, all.high[q]));
        if (low[q] < high[q]) {
            lowest = std::min(lowest, low[q]);
            highest = std::max(highest, high[q]);
        }
        parts[q] = {0.0f, 0.0f, s.values + size_t(q) * paged.head_dim};
    }
    if (lowest >= highest) return;
    int size = paged.block_size;
    for (int block = lowest / size; block * size < highest; block++) {
        const T* keys = paged.keys(block, head);
        for (int offset = 0; offset < size; offset += kLanes) {
            int token = block * size + offset;
            if (token >= highest) break;
            score_block(paged, keys + offset, std::min(kLanes, size - offset), s, all.count, s.scores + (token - from));
        }
    }
    std::memset(s.values, 0, size_t(all.count) * paged.head_dim * sizeof(float));
    for (int q = 0; q < all.count; q++) {
        if (low[q] >= high[q]) continue;
        float* scores = s.scores + size_t(q) * s.stride;
        if (all.cap > 0.0f) cap_scores(scores, high[q] - from, all.cap);
        if (all.has_slopes) slope_scores(scores, high[q] - from, all.high[q] - 1 - from, all.slopes[q]);
        parts[q].weight = soften(scores, from, low[q], high[q], &parts[q].largest);
    }
    // Queries share the tokens all of them see; the rest each one adds alone, before and after, in the same order.
    for (int q = 0; q < all.count;) {
        int n = std::min(kValueQueries, all.count - q), latest_low = from, earliest_high = to;
        for (int i = q; i < q + n; i++) {
            latest_low = std::max(latest_low, low[i]);
            earliest_high = std::min(earliest_high, high[i]);
        }
        bool is_shared = latest_low < earliest_high;
        for (int i = q; i < q + n; i++) {
            weigh_some(paged, head, low[i], is_shared ? latest_low : high[i], from, s, i, 1);
        }
        if (is_shared) {
            weigh_some(paged, head, latest_low, earliest_high, from, s, q, n);
            for (int i = q; i < q + n; i++) weigh_some(paged, head, earliest_high, high[i], from, s, i, 1);
        }
        q += n;
    }
}

}  // namespace funitel
