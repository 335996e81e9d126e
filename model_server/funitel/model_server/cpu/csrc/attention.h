// Attention straight from the paged pool. Within a block the keys of a head lie input by input, [head_dim][block_size],
// so that one vector holds the same input of sixteen tokens; values lie token by token, [block_size][head_dim]. In bfloat16
// two inputs of a key and two tokens of a value lie together, and are multiplied by pairs of queries and of weights.
//
// The context of a query is cut into parts at fixed places; each part is summed in the order of its tokens, and parts
// are merged in their order. So a query's result does not depend on the rows or the chunk it is computed with, nor on
// whether one thread or several took its parts.
#pragma once

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "dense_products.h"
#include "dot_products.h"
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
    size_t key_size() const { return size_t(block_size) * head_dim * sizeof(T); }  // bytes that a head's keys take in a block
    size_t value_size() const { return key_size(); }

    void write(int position, int head, const float* key, const float* value) const {
        constexpr int together = kTogether<T>;
        int block = position / block_size, offset = position % block_size;
        T* k = keys(block, head) + offset * together;
        T* v = values(block, head) + size_t(offset / together) * together * head_dim + offset % together;
        for (int d = 0; d < head_dim; d += kLanes) {
            T converted[kLanes];
            int n = std::min(kLanes, head_dim - d);
            store(converted, load(key + d, n));
            for (int i = 0; i < n; i += together) {
                std::memcpy(k + size_t(d + i) * block_size, converted + i, together * sizeof(T));
            }
            store(converted, load(value + d, n));
            if constexpr (together == 1) {
                std::memcpy(v + d, converted, n * sizeof(T));
            } else {
                for (int i = 0; i < n; i++) v[size_t(d + i) * together] = converted[i];
            }
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

// A query as levels of 16 bits, and what of its scores does not come of them: see kv_codes.h.
struct LevelQuery {
    float size, sum;    // of a level; of all levels, as numbers
    float shift;        // of all scores
    float first_shift;  // of the score of the first token, besides
    int32_t totals[2];  // negative sums of low and of high levels
};

// The weights of a part of the context as such levels, and the weighted sum of the zeros of values.
struct LevelWeights {
    float size, zeros;
    int32_t totals[2];
};

// One thread's scratch: up to kMaxQueries queries over one part of the context.
struct Scratch {
    Memory memory, words;
    LevelQuery level_queries[kMaxQueries];
    LevelWeights level_weights[kMaxQueries];
    int num_weight_words;  // of a plane of weights
    int stride;       // scores of a query
    float* scores;    // [kMaxQueries][stride]
    float* queries;   // [head_dim][kMaxQueries], or pairs of bfloat16, [head_dim / 2][kMaxQueries]
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
        num_weight_words = part_tokens / block_size * divide_up(block_size, kQuad);
        return words.grow(size_t(num_weight_words) * 2 * kMaxQueries * sizeof(int32_t));
    }

    // Low levels of a query's weights, then the high ones.
    int32_t* weight_words(int place) const { return words.as<int32_t>() + size_t(place) * 2 * num_weight_words; }
    void clear_weights(int place) {
        level_weights[place] = {};
        std::fill_n(weight_words(place), 2 * num_weight_words, 0);
    }
};

// Lay out query `place` of those that are handled together.
template <class Kernel>
inline void set_query(const Scratch& s, int place, const float* query, int head_dim) {
    using Activation = typename Kernel::Activation;
    constexpr int together = kTogether<typename Kernel::Number>;
    auto* target = reinterpret_cast<Activation*>(s.queries) + place;
    if constexpr (together == 1) {
        for (int d = 0; d < head_dim; d++) target[d * kMaxQueries] = query[d];
    } else {
        for (int d = 0; d < head_dim; d += kLanes) {
            Pairs pairs(query + d, std::min(kLanes, head_dim - d));
            for (int i = 0; i < pairs.count; i++) target[(d / 2 + i) * kMaxQueries] = pairs.words[i];
        }
    }
}

// `Kernel::take` of the first n <= 16 words; nothing past them is read.
template <class Kernel>
inline typename Kernel::Weights take(const typename Kernel::Number* source, int n) {
    using Number = typename Kernel::Number;
    constexpr int together = kTogether<Number>;
    if (n >= kLanes) return Kernel::take(source);
    Number some[kLanes * together] = {};
    std::memcpy(some, source, size_t(n) * together * sizeof(Number));
    return Kernel::take(some);
}

// Scores of N queries with the n <= 16 tokens that have their keys from `keys` on.
template <class Kernel, int N>
inline void score(const typename Kernel::Number* keys, int n, int block_size, const float* queries, int head_dim,
                  float* scores, int stride) {
    constexpr int together = kTogether<typename Kernel::Number>;
    const auto* x = reinterpret_cast<const typename Kernel::Activation*>(queries);
    const int count = head_dim / together;
    F16 sums[N];
#pragma GCC unroll 12
    for (int q = 0; q < N; q++) sums[q] = splat(0.0f);
    auto add = [&](int i, const typename Kernel::Weights& key) {
#pragma GCC unroll 12
        for (int q = 0; q < N; q++) sums[q] = Kernel::add(sums[q], key, x + i * kMaxQueries + q);
    };
    const size_t step = size_t(block_size) * together;
    if (n == kLanes) {
        for (int i = 0; i < count; i++) add(i, Kernel::take(keys + i * step));
    } else {
        for (int i = 0; i < count; i++) add(i, take<Kernel>(keys + i * step, n));
    }
#pragma GCC unroll 12
    for (int q = 0; q < N; q++) store(scores + size_t(q) * stride, sums[q]);
}

// The weight of a token, or of the pair that begins with it, of a query whose weights are those from token `from` on.
template <class Kernel>
inline const typename Kernel::Activation* weight_of(const float* weights, int token, int from) {
    return reinterpret_cast<const typename Kernel::Activation*>(weights) +
           (token - from) / kTogether<typename Kernel::Number>;
}

// Add the values of tokens [first, last), weighted, to V vectors of N queries. Of tokens that lie together all N see all
// or, where N is 1, some.
template <class Kernel, int N, int V, bool IsTail>
inline void weigh(const Paged<typename Kernel::Number>& paged, int head, int first, int last, int from,
                  const float* weights, int stride, float* values, int dim, int tail) {
    using Number = typename Kernel::Number;
    constexpr int together = kTogether<Number>;
    const int n = IsTail ? tail : kLanes;
    F16 sums[N][V];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[q][v] = load(values + q * dim + v * kLanes, n);
    }
    auto add = [&](int token, const Number* source) {
        typename Kernel::Weights row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) row[v] = take<Kernel>(source + v * kLanes * together, n);
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) {
            const auto* weight = weight_of<Kernel>(weights + size_t(q) * stride, token, from);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[q][v] = Kernel::add(sums[q][v], row[v], weight);
        }
    };
    // One token of a pair: what the other half holds may be anything, even no number.
    auto add_half = [&](int token, const Number* source) {
        if constexpr (together == 2 && N == 1) {
            const bool is_second = token % 2 != 0;
            const F16 weight = splat(number_of(reinterpret_cast<const Brain*>(weights)[token - from]));
            for (int v = 0; v < V; v++) {
                Brain some[kLanes * together] = {};
                std::memcpy(some, source + v * kLanes * together, size_t(n) * together * sizeof(Brain));
                sums[0][v] = fma(weight, is_second ? load_second(some) : load_first(some), sums[0][v]);
            }
        }
    };
    for (int token = first; token < last;) {
        int block = token / paged.block_size, offset = token % paged.block_size;
        int end = std::min(last, token - offset + paged.block_size);
        const Number* source = paged.values(block, head) + size_t(offset / together) * together * dim;
        if (token % together != 0) {
            add_half(token++, source);
            source += size_t(dim) * together;
        }
        for (; token + together <= end; token += together, source += size_t(dim) * together) add(token, source);
        if (token < end) add_half(token++, source);
    }
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(values + q * dim + v * kLanes, sums[q][v], n);
    }
}

template <class Kernel, int N>
inline void weigh_all(const Paged<typename Kernel::Number>& paged, int head, int first, int last, int from,
                      const float* weights, int stride, float* values) {
    int dim = paged.head_dim, d = 0;
    auto shifted = paged;
    for (; d + kLanes * kValueVectors <= dim; d += kLanes * kValueVectors) {
        shifted.pool = paged.pool + d * kTogether<typename Kernel::Number>;
        weigh<Kernel, N, kValueVectors, false>(shifted, head, first, last, from, weights, stride, values + d, dim, 0);
    }
    for (; d < dim; d += kLanes) {
        shifted.pool = paged.pool + d * kTogether<typename Kernel::Number>;
        int tail = std::min(kLanes, dim - d);
        weigh<Kernel, N, 1, true>(shifted, head, first, last, from, weights, stride, values + d, dim, tail);
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

// Turn the scores of tokens [first, last) into weights; the place of token `from` is the first. Returns their sum. Weights
// are of the type T, in place: those of bfloat16 lie in the first half of the scores, and their sum is of what they became.
template <class T = float>
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
        if constexpr (std::is_same_v<T, Brain>) {
            Brain* rounded = reinterpret_cast<Brain*>(scores) + i;
            store(rounded, weight);
            weight = load(rounded);
        } else {
            store(scores + i, weight);
        }
        total = add(total, weight);
    }
    return sum(total);
}

// Queries that attend to the same KV head, the tokens each of them sees, and what becomes of their scores.
struct Queries {
    int count;
    int low[kMaxQueries], high[kMaxQueries];  // tokens [low, high)
    int begin, end;                           // this part of the context and those that the same thread attends to next
    float cap;                                // scores become cap * tanh(score / cap); 0: they stay
    bool has_slopes;
    float slopes[kMaxQueries];  // scores grow by slope * (token - own token)
    int own[kMaxQueries];       // of queries with slopes

    // Cap and slope the scores of query `q`, and turn those of tokens [first, last) into weights, as `soften` does.
    template <class T>
    float weights(float* scores, int q, int from, int first, int last, float* most) const {
        if (cap > 0.0f) cap_scores(scores, last - from, cap);
        if (has_slopes) slope_scores(scores, last - from, own[q] - from, slopes[q]);
        return soften<T>(scores, from, first, last, most);
    }
};

// What queries see of a part [from, to) of their context: each the tokens [low, high), together [lowest, highest).
struct Seen {
    int low[kMaxQueries], high[kMaxQueries], lowest, highest;

    Seen(const Queries& all, int from, int to) : lowest(to), highest(from) {
        for (int q = 0; q < all.count; q++) {
            low[q] = std::max(from, all.low[q]);
            high[q] = std::max(low[q], std::min(to, all.high[q]));
            if (low[q] < high[q]) {
                lowest = std::min(lowest, low[q]);
                highest = std::max(highest, high[q]);
            }
        }
    }
};

// Have memory read that is needed later. In assembly because g++ leaves out the call of a function that does nothing else.
inline void prefetch(const void* start, size_t size) {
    const char* from = static_cast<const char*>(start);
    for (size_t i = 0; i < size; i += 64) asm volatile("prefetcht1 %0" ::"m"(from[i]));
}

constexpr size_t kAheadBytes = 4096;

// Have the keys of a block read that follows at a distance and is before `end`. What a head has in a block is too short for
// the processor's own prefetching. On two cores of an AMD EPYC (Zen 5, a virtual machine) attention to float16, its values
// read ahead too, reads 24 GB/s, and 14 without.
template <class Pages>
inline void read_keys_ahead(const Pages& pages, int head, int block, int end) {
    const int later = block + std::max(1, static_cast<int>(kAheadBytes / pages.key_size()));
    if (later < end) prefetch(pages.keys(later, head), pages.key_size());
}

template <class Kernel>
inline void score_block(const Paged<typename Kernel::Number>& paged, const typename Kernel::Number* keys, int n,
                        const Scratch& s, int count, float* scores) {
    switch (count) {
#define FUNITEL_CASE(N) \
    case N: return score<Kernel, N>(keys, n, paged.block_size, s.queries, paged.head_dim, scores, s.stride);
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

template <class Kernel>
inline void weigh_some(const Paged<typename Kernel::Number>& paged, int head, int first, int last, int from,
                       const Scratch& s, int q, int n) {
    if (first >= last) return;
    const float* weights = s.scores + size_t(q) * s.stride;
    float* values = s.values + size_t(q) * paged.head_dim;
    switch (n) {
#define FUNITEL_CASE(N) \
    case N: return weigh_all<Kernel, N>(paged, head, first, last, from, weights, s.stride, values);
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
template <class Kernel>
inline void attend_part(const Paged<typename Kernel::Number>& paged, int head, int from, int to, const Queries& all,
                        Scratch& s, Gathered* parts) {
    using Number = typename Kernel::Number;
    constexpr int together = kTogether<Number>;
    using Weight = std::conditional_t<together == 2, Brain, float>;
    const Seen seen(all, from, to);
    const int *low = seen.low, *high = seen.high;
    for (int q = 0; q < all.count; q++) parts[q] = {0.0f, 0.0f, s.values + size_t(q) * paged.head_dim};
    if (seen.lowest >= seen.highest) return;
    const int size = paged.block_size, num_blocks = divide_up(all.end, size);
    for (int block = seen.lowest / size; block * size < seen.highest; block++) {
        const Number* keys = paged.keys(block, head);
        read_keys_ahead(paged, head, block, num_blocks);
        prefetch(paged.values(block, head), paged.value_size());
        for (int offset = 0; offset < size; offset += kLanes) {
            int token = block * size + offset;
            if (token >= seen.highest) break;
            score_block<Kernel>(paged, keys + offset * together, std::min(kLanes, size - offset), s, all.count, s.scores + (token - from));
        }
    }
    std::memset(s.values, 0, size_t(all.count) * paged.head_dim * sizeof(float));
    for (int q = 0; q < all.count; q++) {
        if (low[q] >= high[q]) continue;
        float* scores = s.scores + size_t(q) * s.stride;
        parts[q].weight = all.weights<Weight>(scores, q, from, low[q], high[q], &parts[q].largest);
    }
    // Queries share the tokens all of them see; the rest each one adds alone, before and after, in the same order.
    for (int q = 0; q < all.count;) {
        int n = std::min(kValueQueries, all.count - q), latest_low = from, earliest_high = to;
        for (int i = q; i < q + n; i++) {
            latest_low = std::max(latest_low, low[i]);
            earliest_high = std::min(earliest_high, high[i]);
        }
        // What lies together is shared by all or by none.
        latest_low = divide_up(latest_low, together) * together;
        earliest_high = earliest_high / together * together;
        bool is_shared = latest_low < earliest_high;
        for (int i = q; i < q + n; i++) {
            weigh_some<Kernel>(paged, head, low[i], is_shared ? latest_low : high[i], from, s, i, 1);
        }
        if (is_shared) {
            weigh_some<Kernel>(paged, head, latest_low, earliest_high, from, s, q, n);
            for (int i = q; i < q + n; i++) weigh_some<Kernel>(paged, head, earliest_high, high[i], from, s, i, 1);
        }
        q += n;
    }
}

// What is taken away from keys before they become codes, and maps of keys and of queries that leave their products what
// they are. The first token of a sequence has a shift of its own: its key is much the same whatever it is, large, and far
// from all others, as it takes what attention is left over. Source: Xiao et al., Efficient Streaming Language Models with
// Attention Sinks, arXiv 2309.17453. Of one layer, [num_kv_heads][dim] and [num_kv_heads][dim][dim]; null for none.
struct KeyFrame {
    const float *shift = nullptr, *first_shift = nullptr, *key_map = nullptr, *query_map = nullptr;

    KeyFrame of_head(int head, int dim) const {
        if (shift == nullptr) return {};
        const size_t first = size_t(head) * dim, map = first * dim;
        return {shift + first, first_shift + first, key_map + map, query_map + map};
    }
};

// Numbers as keys and values, for the engine: how they are written, and how queries attend to them.
template <class Kernel>
struct NumberKeys {
    using Number = typename Kernel::Number;
    using Pages = Paged<Number>;

    static Pages pages(void* pool, const int32_t* blocks, int block_size, int num_kv_heads, int head_dim, int num_layers,
                       int layer, const KeyFrame&) {
        const size_t half = size_t(block_size) * num_kv_heads * head_dim;
        return {static_cast<Number*>(pool), blocks, 2 * half * num_layers, 2 * half * layer, half, block_size, head_dim};
    }
    static void set_query(const Pages& pages, int, Scratch& s, int place, const float* query) {
        funitel::set_query<Kernel>(s, place, query, pages.head_dim);
    }
    static void attend(const Pages& pages, int head, int from, int to, const Queries& all, Scratch& s, Gathered* parts) {
        attend_part<Kernel>(pages, head, from, to, all, s, parts);
    }
    static void leave(float*, int) {}
};

}  // namespace funitel
