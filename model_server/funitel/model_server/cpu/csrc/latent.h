// Attention in the space of latents: the pool keeps one vector of a token, which is the key of all heads and begins with
// their value. Vectors lie token by token, [block_size][width]. A head's queries are taken to that space by a matrix, and
// what it attends to is taken back by another.
//
// The parts of a context are those of attention.h, and so is the order of every sum: a query's result does not depend on
// the rows, the chunk or the heads it is computed with.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "layout.h"
#include "products.h"
#include "rotary.h"
#include "vector.h"

namespace funitel {

#if defined(__AVX512F__)
constexpr int kDotQueries = 6, kDotTokens = 4;
#else
constexpr int kDotQueries = 2, kDotTokens = 2;
#endif

// Where the latents of one layer and one sequence lie.
template <class T>
struct PagedLatents {
    T* pool;
    const int32_t* blocks;
    size_t block_stride;  // elements between blocks
    size_t layer_offset;  // elements from the start of a block to the layer's latents
    int block_size;
    int width;  // elements of a latent
    int rank;   // of them those of a value

    T* at(int position) const {
        return pool + size_t(blocks[position / block_size]) * block_stride + layer_offset +
               size_t(position % block_size) * width;
    }

    void write(int position, const float* latent) const {
        T* target = at(position);
        for (int d = 0; d < width; d += kLanes) store(target + d, load(latent + d, width - d), width - d);
    }
};

// Scores of N queries with M tokens.
template <class T, int N, int M>
inline void dot(const float* const* queries, const T* const* tokens, int width, float* scores, int stride) {
    F16 sums[N][M];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
        for (int t = 0; t < M; t++) sums[q][t] = splat(0.0f);
    }
    for (int d = 0; d < width; d += kLanes) {
        const int n = width - d;
        F16 keys[M];
#pragma GCC unroll 4
        for (int t = 0; t < M; t++) keys[t] = n >= kLanes ? load(tokens[t] + d) : load(tokens[t] + d, n);
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) {
            F16 query = n >= kLanes ? load(queries[q] + d) : load(queries[q] + d, n);
#pragma GCC unroll 4
            for (int t = 0; t < M; t++) sums[q][t] = fma(query, keys[t], sums[q][t]);
        }
    }
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
        for (int t = 0; t < M; t++) scores[size_t(q) * stride + t] = sum(sums[q][t]);
    }
}

template <class T, int N>
inline void dot_all(const PagedLatents<T>& paged, int first, int last, const float* const* queries, float* scores,
                    int stride) {
    int token = first;
    for (; token + kDotTokens <= last; token += kDotTokens) {
        const T* tokens[kDotTokens];
        for (int t = 0; t < kDotTokens; t++) tokens[t] = paged.at(token + t);
        dot<T, N, kDotTokens>(queries, tokens, paged.width, scores + (token - first), stride);
    }
    for (; token < last; token++) {
        const T* tokens[1] = {paged.at(token)};
        dot<T, N, 1>(queries, tokens, paged.width, scores + (token - first), stride);
    }
}

// Add the values of tokens [first, last), weighted, to V vectors of N queries, from element `d` on. Rows of `weights` are
// `stride` apart and begin with token `first`; rows of `values` are `rank` apart.
template <class T, int N, int V>
inline void weigh_latents(const PagedLatents<T>& paged, int first, int last, const float* weights, int stride,
                          float* values, int d) {
    const int n = paged.rank - d;
    F16 sums[N][V];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[q][v] = load(values + size_t(q) * paged.rank + d + v * kLanes, n - v * kLanes);
    }
    for (int token = first; token < last; token++) {
        const T* source = paged.at(token) + d;
        F16 row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) row[v] = load(source + v * kLanes, n - v * kLanes);
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) {
            F16 weight = splat(weights[size_t(q) * stride + token - first]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[q][v] = fma(weight, row[v], sums[q][v]);
        }
    }
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(values + size_t(q) * paged.rank + d + v * kLanes, sums[q][v], n - v * kLanes);
    }
}

template <class T, int N>
inline void weigh_all(const PagedLatents<T>& paged, int first, int last, const float* weights, int stride,
                      float* values) {
    int d = 0;
    for (; d + kLanes * kValueVectors <= paged.rank; d += kLanes * kValueVectors) {
        weigh_latents<T, N, kValueVectors>(paged, first, last, weights, stride, values, d);
    }
    for (; d < paged.rank; d += kLanes) weigh_latents<T, N, 1>(paged, first, last, weights, stride, values, d);
}

// Attend queries to part [from, to) of their context; results per query in `parts`. `s.scores` and `s.values` are used.
template <class T>
inline void attend_latents(const PagedLatents<T>& paged, int from, int to, const Queries& all,
                           const float* const* queries, Scratch& s, Gathered* parts) {
    const Seen seen(all, from, to);
    const int *low = seen.low, *high = seen.high, lowest = seen.lowest, highest = seen.highest;
    for (int q = 0; q < all.count; q++) parts[q] = {0.0f, 0.0f, s.values + size_t(q) * paged.rank};
    if (lowest >= highest) return;
    for (int q = 0; q < all.count;) {
        float* scores = s.scores + size_t(q) * s.stride + (lowest - from);
        if (q + kDotQueries <= all.count) {
            dot_all<T, kDotQueries>(paged, lowest, highest, queries + q, scores, s.stride);
            q += kDotQueries;
        } else {
            dot_all<T, 1>(paged, lowest, highest, queries + q, scores, s.stride);
            q++;
        }
    }
    std::memset(s.values, 0, size_t(all.count) * paged.rank * sizeof(float));
    for (int q = 0; q < all.count; q++) {
        if (low[q] >= high[q]) continue;
        float* scores = s.scores + size_t(q) * s.stride;
        if (all.cap > 0.0f) cap_scores(scores, high[q] - from, all.cap);
        parts[q].weight = soften(scores, from, low[q], high[q], &parts[q].largest);
    }
    auto weigh = [&](int q, int n, int first, int last) {
        if (first >= last) return;
        const float* weights = s.scores + size_t(q) * s.stride + (first - from);
        float* values = s.values + size_t(q) * paged.rank;
        if (n == kValueQueries) return weigh_all<T, kValueQueries>(paged, first, last, weights, s.stride, values);
        for (int i = 0; i < n; i++) {
            weigh_all<T, 1>(paged, first, last, weights + size_t(i) * s.stride, s.stride, values + size_t(i) * paged.rank);
        }
    };
    // Queries share the tokens all of them see; the rest each one adds alone, before and after, in the same order.
    for (int q = 0; q < all.count; q += kValueQueries) {
        int n = std::min(kValueQueries, all.count - q);
        int latest_low = *std::max_element(low + q, low + q + n), earliest_high = *std::min_element(high + q, high + q + n);
        bool is_shared = latest_low < earliest_high;
        for (int i = q; i < q + n; i++) weigh(i, 1, low[i], is_shared ? latest_low : high[i]);
        if (!is_shared) continue;
        weigh(q, n, latest_low, earliest_high);
        for (int i = q; i < q + n; i++) weigh(i, 1, earliest_high, high[i]);
    }
}

// What a model with latents has of them on this rank.
struct LatentShape {
    int num_heads;
    int head_dim;   // elements of a query
    int rank;       // elements of a latent that are a value
    int num_turned;  // elements of queries and keys that turn, the last ones
    int value_dim;  // elements of a head's values
    int num_layers, block_size;

    int num_still() const { return head_dim - num_turned; }
    int width() const { return rank + num_turned; }
};

// What tokens see of their context: a window of it, or all with 0, and spans whole; scores are capped, or not with 0.
struct Sight {
    int window;
    bool is_whole;
    float cap;
};

// The attention of a step.
class LatentAttention {
  public:
    using Matrices = std::vector<std::unique_ptr<Matrix>>;

    LatentAttention(Threads& threads, const Matrices& matrices, const Layout& layout, const LatentShape& shape,
                    int level_bits)
        : threads_(threads), matrices_(matrices), layout_(layout), shape_(shape), products_(level_bits) {}

    // When a step begins, once its layout is known.
    bool reserve(int num_tokens) {
        const size_t heads = size_t(num_tokens) * shape_.num_heads, size = sizeof(float);
        return queries_.grow(heads * shape_.width() * size) && gathered_.grow(heads * shape_.rank * size) &&
               partials_.grow(size_t(layout_.num_slots) * shape_.num_heads * partial_size() * size);
    }

    // Write a token's latent to the pool.
    template <class T>
    void keep(const Batch& batch, int token, int layer, const float* latent) const {
        paged<T>(batch, layout_.rows_of[token], layer).write(layout_.positions[token], latent);
    }

    // Turn and scale a token's queries [heads, head_dim]. `angles` are null where nothing turns.
    void turn(int token, float* queries, const Turn* turn, const float* angles, float scale) const {
        const int still = shape_.num_still(), turned = shape_.num_turned;
        for (int h = 0; h < shape_.num_heads; h++, queries += shape_.head_dim) {
            for (int i = 0; i < still; i++) queries[i] *= scale;
            float* target = query(token, h) + shape_.rank;
            std::copy_n(queries + still, turned, target);
            if (turn != nullptr) {
                turn->rotate(target, angles, turned, scale);
            } else {
                for (int i = 0; i < turned; i++) target[i] *= scale;
            }
        }
    }

    // Attend queries [num_tokens, heads, head_dim] that were turned; `attended` are [num_tokens, heads, value_dim]. The
    // matrices that take a head's queries to latents are those from `first` on, and those that take values back follow.
    template <class T>
    void attend(const Batch& batch, int layer, const Sight& sight, int first, const float* queries, float* attended,
                const std::vector<Scratch*>& scratch) {
        const size_t heads = shape_.num_heads;
        per_head(batch.num_tokens, first, queries_.as<float>(), heads * shape_.width(), shape_.width(),
                 queries, heads * shape_.head_dim, shape_.head_dim);
        gather<T>(batch, layer, sight, scratch);
        per_head(batch.num_tokens, first + shape_.num_heads, attended, heads * shape_.value_dim, shape_.value_dim,
                 gathered_.as<float>(), heads * shape_.rank, shape_.rank);
    }

    // Bytes of the weights of the last step's products.
    size_t bytes_read = 0;

  private:
    int partial_size() const { return shape_.rank + 2; }
    float* query(int token, int head) const {
        return queries_.as<float>() + (size_t(token) * shape_.num_heads + head) * shape_.width();
    }

    // Multiply each head's part of rows by a matrix of its own.
    void per_head(int num_rows, int first, float* target, size_t target_row, size_t target_head, const float* source,
                  size_t source_row, size_t source_head) {
        products_.clear();
        for (int h = 0; h < shape_.num_heads; h++) {
            products_.add(*matrices_[first + h], num_rows, kStore, kSilu, target + h * target_head, target_row);
        }
        bytes_read += products_.num_bytes();
        products_.run(threads_, [&](int h, int row) { return source + row * source_row + h * source_head; });
    }

    template <class T>
    void gather(const Batch& batch, int layer, const Sight& sight, const std::vector<Scratch*>& scratch) {
        const int heads = shape_.num_heads, num_pieces = divide_up(heads, kMaxQueries);
        const int each = divide_up(heads, num_pieces), num_items = static_cast<int>(layout_.items.size());
        for_each(threads_, num_items * num_pieces, [&](int chunk, int thread) {
            int index = num_items * num_pieces - 1 - chunk, head = index % num_pieces * each;  // longest contexts first
            const Layout::Item& item = layout_.items[index / num_pieces];
            gather_item(paged<T>(batch, item.row, layer), item, head, std::min(each, heads - head), sight, *scratch[thread]);
        });
        if (layout_.splits.empty()) return;
        for_each(threads_, static_cast<int>(layout_.splits.size()) * heads, [&](int chunk, int thread) {
            const Layout::Split& split = layout_.splits[chunk / heads];
            int head = chunk % heads;
            Gathered all = {0.0f, 0.0f, scratch[thread]->gathered};
            for (int part = 0; part < split.num_parts; part++) {
                float* source = partial(split.slot + part, head);
                merge(all, {source[0], source[1], source + 2}, shape_.rank);
            }
            finish(all, result(split.token, head), shape_.rank);
        });
    }

    template <class T>
    PagedLatents<T> paged(const Batch& batch, int row, int layer) const {
        size_t size = size_t(shape_.block_size) * shape_.width();
        return {static_cast<T*>(batch.pool), batch.blocks + batch.table_starts[row], size * shape_.num_layers,
                size * layer, shape_.block_size, shape_.width(), shape_.rank};
    }

    float* partial(int slot, int head) const {
        return partials_.as<float>() + (size_t(slot) * shape_.num_heads + head) * partial_size();
    }
    float* result(int token, int head) const {
        return gathered_.as<float>() + (size_t(token) * shape_.num_heads + head) * shape_.rank;
    }

    // Some heads of an item.
    template <class T>
    void gather_item(const PagedLatents<T>& source, const Layout::Item& item, int first_head, int num_heads,
                     const Sight& sight, Scratch& s) {
        // Of few heads an item has several tokens, of many one.
        for (int t = 0; t < item.count; t += std::max(1, kMaxQueries / num_heads)) {
            int count = std::min(item.count - t, std::max(1, kMaxQueries / num_heads));
            gather_tokens(source, item, item.first + t, count, first_head, num_heads, sight, s);
        }
    }

    template <class T>
    void gather_tokens(const PagedLatents<T>& source, const Layout::Item& item, int token, int num_tokens,
                       int first_head, int num_heads, const Sight& sight, Scratch& s) {
        Queries all;
        const float* queries[kMaxQueries];
        all.count = num_tokens * num_heads;
        all.cap = sight.cap;
        all.has_slopes = false;
        const int* ends = sight.is_whole ? layout_.ends_from(token) : nullptr;
        for (int q = 0; q < all.count; q++) {
            int position = layout_.positions[token + q / num_heads];
            all.low[q] = sight.window > 0 ? std::max(0, position + 1 - sight.window) : 0;
            all.high[q] = ends == nullptr ? position + 1 : ends[q / num_heads];
            queries[q] = query(token + q / num_heads, first_head + q % num_heads);
        }
        Gathered parts[kMaxQueries], gathered[kMaxQueries];
        const int size = part_size(shape_.block_size), rank = shape_.rank;
        if (item.part >= 0) {
            attend_latents(source, item.part * size, (item.part + 1) * size, all, queries, s, parts);
            for (int q = 0; q < all.count; q++) {
                float* target = partial(item.slot, first_head + q);
                target[0] = parts[q].largest;
                target[1] = parts[q].weight;
                std::memcpy(target + 2, parts[q].values, rank * sizeof(float));
            }
            return;
        }
        for (int q = 0; q < all.count; q++) gathered[q] = {0.0f, 0.0f, s.gathered + size_t(q) * rank};
        for (int part = all.low[0] / size; part * size < all.high[all.count - 1]; part++) {
            attend_latents(source, part * size, (part + 1) * size, all, queries, s, parts);
            for (int q = 0; q < all.count; q++) merge(gathered[q], parts[q], rank);
        }
        for (int q = 0; q < all.count; q++) {
            finish(gathered[q], result(token + q / num_heads, first_head + q % num_heads), rank);
        }
    }

    Threads& threads_;
    const Matrices& matrices_;
    const Layout& layout_;
    const LatentShape shape_;
    Memory queries_, gathered_, partials_;
    Products products_;
};

}  // namespace funitel
