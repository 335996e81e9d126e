// What sampling does to whole rows of scores: forbid tokens, warp, find the best, draw. A row is one thread's work from
// end to end, so its result depends on nothing else. The same steps in torch, to compare with: scores.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "vector.h"

namespace funitel {

constexpr float kNever = -std::numeric_limits<float>::infinity(), kMost = std::numeric_limits<float>::max();

// One row's parameters; a top_k of 0 and a p of 1 keep everything, `min_score` is the logarithm of min_p.
struct Warp {
    float temperature, top_p, min_score, typical_p;
    int32_t top_k;
};

// The best of a row and the logarithm of the sum of its exponentials; -inf where nothing is allowed.
struct Best {
    int32_t token;
    float normaliser;
};

// Sixteen numbers as the compiler's own vectors, for arithmetic on integers and choices lane by lane.
typedef uint32_t U16 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I16 __attribute__((vector_size(kLanes * 4)));
typedef float V16 __attribute__((vector_size(kLanes * 4)));

constexpr U16 kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline void allow_sixteen(float* scores, size_t size, uint32_t bits) {
    V16 values = {};
    std::memcpy(&values, scores, size);
    auto is_allowed = (values == values) & (((U16{} + bits) >> kLaneNumbers & 1) != 0);
    values = is_allowed ? values : V16{} + kNever;
    values = values > kMost ? V16{} + kMost : values;
    std::memcpy(scores, &values, size);
}

inline F16 sixteen(V16 x) {
    F16 same;
    std::memcpy(&same, &x, sizeof same);
    return same;
}

// What is not a number can never be chosen, nor can tokens without their bit, if bits are given. Scores become finite
// or -inf.
inline void allow_scores(float* scores, int count, const uint32_t* bits) {
    auto word = [bits](int i) { return bits == nullptr ? ~0u : bits[i / 32] >> i % 32; };
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) allow_sixteen(scores + i, sizeof(V16), word(i));
    if (i < count) allow_sixteen(scores + i, (count - i) * sizeof(float), word(i));
}

// Whether there is a score that is not a number, or +inf.
inline bool is_broken(const float* scores, int count) {
    F16 most = splat(kMost);
    unsigned fine = 0xffff;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) fine &= at_most(load(scores + i), most);
    bool found = fine != 0xffff;
    for (; i < count; i++) found |= !(scores[i] <= kMost);
    return found;
}

// The first place of a row's largest score.
inline int first_of(const float* scores, int count, float most) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        unsigned there = at_most(splat(most), load(scores + i));
        if (there != 0) return i + __builtin_ctz(there);
    }
    return static_cast<int>(std::find(scores + i, scores + count, most) - scores);
}

inline float largest_score(const float* scores, int count) {
    F16 most = splat(kNever);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) most = max(most, load(scores + i));
    float found = largest(most);
    for (; i < count; i++) found = std::max(found, scores[i]);
    return found;
}

constexpr float kNothing = 87.5f;  // `exp` of its negative is 0

inline Best best_score(const float* scores, int count) {
    float most = largest_score(scores, count);
    if (most == kNever) return {0, kNever};
    const F16 shift = splat(most), least = splat(most - kNothing);
    F16 sums = splat(0.0f);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        F16 row = load(scores + i);
        if (at_most(least, row) != 0) sums = add(sums, exp(sub(row, shift)));
    }
    float total = sum(sums);
    for (; i < count; i++) total += exp(scores[i] - most);
    return {first_of(scores, count, most), most + std::log(total)};
}

// The best of a row of which all is allowed that is a number, and its log-probability, which is not a number where some
// score was not, or was +inf.
inline int32_t likeliest_score(float* scores, int count, float& logprob) {
    bool spoils = is_broken(scores, count);
    allow_scores(scores, count, nullptr);
    Best found = best_score(scores, count);
    logprob = spoils ? std::numeric_limits<float>::quiet_NaN() : scores[found.token] - found.normaliser;
    return found.token;
}

// Tokens by a key that is not negative, smallest first, ties by token: the order in which a warp keeps them.
class Ranking {
  public:
    // Drop what comes after the first tokens that together weigh `enough`, which is more than nothing, but with
    // `keeps_ties` not what has the last one's key.
    void keep(float* scores, const float* keys, const float* weights, int count, double enough, bool keeps_ties) {
        weigh_buckets(keys, weights, count, enough);
        double before = 0.0;
        int last = 0;
        while (last < kBuckets - 1 && !(before + weight_[last] >= enough)) before += weight_[last++];
        if (last == kBuckets - 1) return;  // all weigh less than enough, by rounding
        drop_behind(scores, keys, count, last);
        std::sort(tied_.begin(), tied_.end(), [keys](int32_t a, int32_t b) {
            return keys[a] != keys[b] ? keys[a] < keys[b] : a < b;
        });
        float last_key = 0.0f;
        for (int32_t i : tied_) {
            bool is_kept = before < enough || (keeps_ties && keys[i] == last_key);
            if (is_kept) last_key = keys[i];
            before += weights == nullptr ? 1.0 : weights[i];
            if (!is_kept) scores[i] = kNever;
        }
    }

    void make_room(int count) { tied_.reserve(count); }

  private:
    // Sixteen buckets for each power of two: the order of the bits of a number that is not negative is its own.
    static constexpr int kShift = 19, kBuckets = 1 << (31 - kShift);
    static constexpr float kNear = 8.0f;  // where a bucket begins

    // Add up what the tokens of each bucket weigh: of the near ones alone where these weigh more than enough, as they do
    // in most rows, of which they are few.
    void weigh_buckets(const float* keys, const float* weights, int count, double enough) {
        std::fill(std::begin(weight_), std::end(weight_), 0.0);
        const int whole = count - count % kLanes;
        const bool near_will_do = weight_of_near(keys, weights, whole) > enough * 1.001;
        const F16 limit = splat(kNear);
        for (int i = 0; near_will_do && i < whole; i += kLanes) {
            unsigned near = ~at_most(limit, load(keys + i)) & 0xffff;
            for (; near != 0; near &= near - 1) weigh_one(keys, weights, i + __builtin_ctz(near));
        }
        for (int i = near_will_do ? whole : 0; i < count; i++) weigh_one(keys, weights, i);
    }

    void weigh_one(const float* keys, const float* weights, int i) {
        weight_[bucket_of(keys[i])] += weights == nullptr ? 1.0 : weights[i];
    }

    // What the tokens of keys below `kNear` weigh together, to three digits.
    static float weight_of_near(const float* keys, const float* weights, int count) {
        V16 sums = {};
        for (int i = 0; i < count; i += kLanes) {
            V16 lanes, each = V16{} + 1.0f;
            std::memcpy(&lanes, keys + i, sizeof lanes);
            if (weights != nullptr) std::memcpy(&each, weights + i, sizeof each);
            sums += lanes < kNear ? each : V16{};
        }
        return sum(sixteen(sums));
    }

    // Drop the tokens of buckets behind one, and note those in it.
    void drop_behind(float* scores, const float* keys, int count, int bucket) {
        const float first = least_of(bucket), limit = least_of(bucket + 1);
        tied_.clear();
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) {
            V16 lanes, kept;
            std::memcpy(&lanes, keys + i, sizeof lanes);
            std::memcpy(&kept, scores + i, sizeof kept);
            kept = lanes >= limit ? V16{} + kNever : kept;
            std::memcpy(scores + i, &kept, sizeof kept);
            unsigned tied = at_most(splat(first), load(keys + i)) & ~at_most(splat(limit), load(keys + i));
            for (; tied != 0; tied &= tied - 1) tied_.push_back(i + __builtin_ctz(tied));
        }
        for (; i < count; i++) {
            if (keys[i] >= limit) scores[i] = kNever;
            else if (keys[i] >= first) tied_.push_back(i);
        }
    }

    // The smallest key of a bucket.
    static float least_of(int bucket) {
        uint32_t bits = static_cast<uint32_t>(bucket) << kShift;
        float key;
        std::memcpy(&key, &bits, sizeof key);
        return key;
    }

    static int bucket_of(float key) {
        uint32_t bits;
        std::memcpy(&bits, &key, sizeof bits);
        return static_cast<int>(bits >> kShift);
    }

    double weight_[kBuckets];
    std::vector<int32_t> tied_;
};

// Temperature, top-k, top-p, min-p, typical-p, in this order; the best score becomes 0.
class Warper {
  public:
    // To be called before rows of so many scores are run: `run` takes no memory, so it cannot fail.
    void make_room(int count) {
        keys_.resize(count);
        weights_.resize(count);
        ranking_.make_room(count);
    }

    void run(float* scores, int count, const Warp& warp) {
        float most = largest_score(scores, count);
        if (most == kNever) return;
        const F16 shift = splat(most), temperature = splat(warp.temperature);
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store(scores + i, div(sub(load(scores + i), shift), temperature));
        for (; i < count; i++) scores[i] = (scores[i] - most) / warp.temperature;
        if (warp.top_k > 0 && warp.top_k < count) {
            rank_by_score(scores, count);
            ranking_.keep(scores, keys_.data(), nullptr, count, warp.top_k, true);
        }
        if (warp.top_p < 1.0f) {
            rank_by_score(scores, count);
            double total = weigh(scores, count);
            ranking_.keep(scores, keys_.data(), weights_.data(), count, warp.top_p * total, false);
        }
        if (warp.min_score > kNever) {
            for (int i = 0; i < count; i++) scores[i] = scores[i] < warp.min_score ? kNever : scores[i];
        }
        if (warp.typical_p < 1.0f) {
            double total = weigh(scores, count);
            rank_by_surprise(scores, count, total);
            ranking_.keep(scores, keys_.data(), weights_.data(), count, warp.typical_p * total, false);
        }
    }

  private:
    void rank_by_score(const float* scores, int count) {
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store(keys_.data() + i, sub(splat(0.0f), load(scores + i)));
        for (; i < count; i++) keys_[i] = 0.0f - scores[i];
    }

    // Distance of each token's surprise from the mean, which is the entropy.
    void rank_by_surprise(const float* scores, int count, double total) {
        double weighted = 0.0;
        for (int i = 0; i < count; i++) weighted += weights_[i] > 0.0f ? double(weights_[i]) * scores[i] : 0.0;
        float mean = static_cast<float>(weighted / total);
        for (int i = 0; i < count; i++) keys_[i] = std::fabs(mean - scores[i]);
    }

    double weigh(const float* scores, int count) {
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store(weights_.data() + i, exp(load(scores + i)));
        for (; i < count; i++) weights_[i] = exp(scores[i]);
        double totals[4] = {};  // one addition would wait for another
        for (i = 0; i + 4 <= count; i += 4) {
            for (int k = 0; k < 4; k++) totals[k] += weights_[i + k];
        }
        for (; i < count; i++) totals[0] += weights_[i];
        return (totals[0] + totals[1]) + (totals[2] + totals[3]);
    }

    std::vector<float> keys_, weights_;
    Ranking ranking_;
};

// Sixteen of the numbers that noise is made of; see noise.py for the rounds and where they are from.
inline U16 mixed(U16 tokens, uint32_t first, uint32_t second) {
    U16 x = (tokens * 0x9E3779B1u) ^ first;
    x = (x ^ (x >> 17)) * 0xED5AD4BBu + second;
    x = (x ^ (x >> 11)) * 0xAC4C1B51u;
    x = (x ^ (x >> 15)) * 0x31848BABu;
    return (x ^ (x >> 14)) & 0x7FFFFFFFu;
}

// The token of the largest score plus Gumbel noise. Noise as large as a token needs to win is rare: only where the
// uniform number is small enough, by a bound, is the noise itself computed.
inline int32_t draw_score(const float* scores, int count, uint64_t key) {
    constexpr float kLargest = 1.0f - 1.0f / (1 << 24), kSlack = 1.001f;
    constexpr float kFar = 22.25f;  // so far behind the best sum the least uniform number is too large
    float best = kNever;
    int32_t chosen = 0;
    U16 tokens = kLaneNumbers;
    for (int i = 0; i < count; i += kLanes, tokens += kLanes) {
        F16 row = load(scores + i, std::min(kLanes, count - i));
        if (at_most(splat(best - kFar), row) == 0) continue;
        U16 x = mixed(tokens, static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key));
        V16 uniforms = (__builtin_convertvector((I16)x, V16) + 0.5f) * 0x1p-31f;
        uniforms = uniforms > kLargest ? V16{} + kLargest : uniforms;
        F16 bounds = mul(exp(sub(row, splat(best))), splat(kSlack));  // not a number where both are -inf
        unsigned left = best == kNever ? 0xffff : at_most(sixteen(uniforms), bounds);
        for (; left != 0; left &= left - 1) {
            int lane = __builtin_ctz(left);
            if (i + lane >= count) break;
            float sum = scores[i + lane] - std::log(-std::log1p(-uniforms[lane]));
            if (sum > best) {
                best = sum;
                chosen = i + lane;
            }
        }
    }
    return chosen;
}

}  // namespace funitel
