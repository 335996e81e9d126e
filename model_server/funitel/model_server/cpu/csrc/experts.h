// A mixture of experts: a row passes the few of many MLPs that a router scores highest, and adds them up. Only the weights
// of experts that some row passes are read, each once for all its rows.
//
// A row adds its experts up in their order, so that its result does not depend on what shares the batch.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "products.h"
#include "vector.h"

namespace funitel {

// One layer's; `native.py` says the same in ctypes.
struct Mixture {
    int32_t router;      // matrix: a score for each expert, and with has_share the share of the shared MLP
    int32_t correction;  // vector that is added to scores where experts are chosen, or -1
    int32_t first;       // matrix: the way in of the first expert here, its way out, those of the next, ... of the shared MLP
    int32_t num_experts, num_chosen, num_groups, num_chosen_groups, group_depth;
    int32_t is_sigmoid, is_normalized, has_shared, has_share, is_gated, activation;
    int32_t first_held, num_held;  // experts that are here: all, or this rank's
    float scale;

    int up(int expert) const { return first + 2 * (expert == num_experts ? num_held : expert - first_held); }
    int down(int expert) const { return up(expert) + 1; }
    bool holds(int expert) const { return expert >= first_held && expert < first_held + num_held; }
    int num_scores() const { return num_experts + has_share; }
};

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// Make scores of a router's logits, in place; up to fifteen numbers that follow are lost.
inline void make_scores(const Mixture& mixture, float* logits) {
    const int count = mixture.num_experts;
    if (!mixture.is_sigmoid) {
        float most;
        F16 total = splat(soften(logits, 0, 0, count, &most));
        for (int i = 0; i < count; i += kLanes) store(logits + i, div(load(logits + i), total));
        return;
    }
    const F16 one = splat(1.0f), none = splat(0.0f);
    for (int i = 0; i < count; i += kLanes) {
        store(logits + i, div(one, add(one, exp(sub(none, load(logits + i))))));
    }
}

// The place of the largest of some values; the first of several, and the first where none is a number.
inline int find_largest(const float* values, int count) {
    int best = 0;
    for (int i = 1; i < count; i++) best = values[i] > values[best] ? i : best;
    return best;
}

constexpr float kLeftOut = -std::numeric_limits<float>::infinity();

// Leave only the experts of the best groups in `ranked`, as -inf the others; `spare` has room for twice as many numbers.
inline void keep_best_groups(const Mixture& mixture, float* ranked, float* spare) {
    const int num_groups = mixture.num_groups, size = mixture.num_experts / num_groups;
    float *ranks = spare, *is_kept = spare + num_groups, *members = spare + 2 * num_groups;
    for (int group = 0; group < num_groups; group++) {
        std::copy_n(ranked + group * size, size, members);
        ranks[group] = is_kept[group] = 0.0f;
        for (int i = 0; i < mixture.group_depth; i++) {
            int best = find_largest(members, size);
            ranks[group] += members[best];
            members[best] = kLeftOut;
        }
    }
    for (int i = 0; i < mixture.num_chosen_groups; i++) {
        int best = find_largest(ranks, num_groups);
        ranks[best] = kLeftOut;
        is_kept[best] = 1.0f;
    }
    for (int i = 0; i < mixture.num_experts; i++) {
        if (is_kept[i / size] == 0.0f) ranked[i] = kLeftOut;
    }
}

class Experts {
  public:
    using Matrices = std::vector<std::unique_ptr<Matrix>>;

    Experts(Threads& threads, const Matrices& matrices, int level_bits)
        : threads_(threads), matrices_(matrices), products_(level_bits) {}

    // Choose experts for rows [num_rows, hidden_size] and compute the hidden units of those. `operand` are the rows laid
    // out for the router; `correction` is null for none.
    void enter(const Mixture& mixture, const Operand& operand, const float* rows, const float* correction) {
        mixture_ = &mixture;
        num_rows_ = operand.num_rows;
        choose(operand, correction);
        group();
        const size_t width = matrix(mixture.first).num_inputs;
        multiply(&Mixture::up, mixture.is_gated ? kGate : kActivate, hidden_, [&](const Group& group, int row) {
            return rows + size_t(row_of(group, row)) * width;
        });
    }

    // Add the results of the experts up in rows of `width`, which are stored, or with kAccumulate added `scale` times.
    void leave(Mode mode, float scale, float* target) {
        multiply(&Mixture::down, kStore, results_, [&](const Group& group, int row) {
            return hidden_.as<float>() + group.hidden + size_t(row) * matrix(mixture_->up(group.expert)).num_outputs;
        });
        const int width = matrix(mixture_->first + 1).num_outputs, pieces = divide_up(width, kPiece);
        for_each(threads_, num_rows_ * pieces, [&](int chunk, int) {
            int row = chunk / pieces, begin = chunk % pieces * kPiece;
            add_up(row, begin, std::min(width, begin + kPiece), width, mode, scale, target + size_t(row) * width);
        });
    }

    // Bytes of the weights of the last step's products.
    size_t bytes_read = 0;

  private:
    // The rows that pass an expert, which lie together among those of all.
    struct Group {
        int expert, first, count;
        size_t hidden, result;  // where theirs begin
    };

    static constexpr int kElsewhere = -1;  // in place of a row of an expert that another rank has
    static constexpr int kPiece = 1024;  // elements of a row that are added up at a time

    const Matrix& matrix(int index) const { return *matrices_[index]; }
    int num_chosen() const { return mixture_->num_chosen; }
    int row_of(const Group& group, int row) const {
        return group.expert == mixture_->num_experts ? row : rows_[group.first + row];
    }

    void choose(const Operand& operand, const float* correction) {
        const Mixture& mixture = *mixture_;
        const Matrix& router = matrix(mixture.router);
        const size_t stride = (mixture.num_scores() + 2 * kLanes) / kLanes * kLanes;
        grow(scores_, 4 * stride * num_rows_);
        const Product product = {router, operand, kStore, kSilu, 1.0f, scores_.as<float>(), 4 * stride};
        bytes_read += router.num_bytes();
        for_each(threads_, product.num_chunks(), [&](int chunk, int) { product.multiply(chunk); });
        chosen_.resize(size_t(num_rows_) * num_chosen());
        shares_.resize(chosen_.size());
        shared_shares_.assign(num_rows_, 1.0f);
        for_each(threads_, num_rows_, [&](int row, int) {
            float* scores = scores_.as<float>() + 4 * stride * row;
            if (mixture.has_share) shared_shares_[row] = sigmoid(scores[mixture.num_experts]);
            choose_of(scores, scores + stride, scores + 2 * stride, correction, size_t(row) * num_chosen());
        });
    }

    // The experts of a row and their shares, from `at` on. `ranked` and `spare` have room for scores, twice for `spare`.
    void choose_of(float* scores, float* ranked, float* spare, const float* correction, size_t at) {
        const Mixture& mixture = *mixture_;
        make_scores(mixture, scores);
        for (int i = 0; i < mixture.num_experts; i++) ranked[i] = scores[i] + (correction ? correction[i] : 0.0f);
        if (mixture.num_groups > 1) keep_best_groups(mixture, ranked, spare);
        float total = 0.0f;
        for (int i = 0; i < num_chosen(); i++) {
            int best = find_largest(ranked, mixture.num_experts);
            ranked[best] = kLeftOut;
            total += scores[best];
            chosen_[at + i] = best;
        }
        std::sort(chosen_.begin() + at, chosen_.begin() + at + num_chosen());
        for (int i = 0; i < num_chosen(); i++) {
            float share = scores[chosen_[at + i]];
            if (mixture.is_normalized) share = share / (total + kSmallestTotal);
            shares_[at + i] = share * mixture.scale;
        }
    }

    static constexpr float kSmallestTotal = 1e-20f;

    // Put the rows of an expert together, in their order; of experts that are here.
    void group() {
        const Mixture& mixture = *mixture_;
        starts_.assign(mixture.num_experts + 1, 0);
        for (int expert : chosen_) starts_[expert + 1] += mixture.holds(expert);
        for (int i = 0; i < mixture.num_experts; i++) starts_[i + 1] += starts_[i];
        num_held_rows_ = starts_[mixture.num_experts];
        groups_.clear();
        hidden_size_ = result_size_ = 0;
        for (int i = 0; i < mixture.num_experts; i++) add_group(i, starts_[i], starts_[i + 1] - starts_[i]);
        if (mixture.has_shared) add_group(mixture.num_experts, num_held_rows_, num_rows_);
        grow(hidden_, hidden_size_);
        grow(results_, result_size_);
        places_.resize(chosen_.size());
        rows_.resize(chosen_.size());
        for (size_t i = 0; i < chosen_.size(); i++) {
            if (!mixture.holds(chosen_[i])) {
                places_[i] = kElsewhere;
                continue;
            }
            int place = starts_[chosen_[i]]++;
            places_[i] = place;
            rows_[place] = static_cast<int>(i / num_chosen());
        }
    }

    void add_group(int expert, int first, int count) {
        if (count == 0) return;
        groups_.push_back({expert, first, count, hidden_size_, result_size_});
        hidden_size_ += size_t(count) * matrix(mixture_->up(expert)).num_outputs;
        result_size_ += size_t(count) * matrix(mixture_->down(expert)).num_outputs;
    }

    // Multiply the rows of all groups by one matrix of each expert.
    template <class Source>
    void multiply(int (Mixture::*which)(int) const, Mode mode, const Memory& target, Source source) {
        products_.clear();
        for (const Group& group : groups_) {
            const Matrix& weights = matrix((mixture_->*which)(group.expert));
            float* start = target.as<float>() + (&target == &hidden_ ? group.hidden : group.result);
            Activation activation = static_cast<Activation>(mixture_->activation);
            products_.add(weights, group.count, mode, activation, start, weights.num_outputs);
        }
        bytes_read += products_.num_bytes();
        products_.run(threads_, [&](int i, int row) { return source(groups_[i], row); });
    }

    // Elements [begin, end) of a row.
    void add_up(int row, int begin, int end, size_t width, Mode mode, float scale, float* target) const {
        const float* results = results_.as<float>();
        const size_t at = size_t(row) * num_chosen();
        const F16 factor = splat(scale), shared_share = splat(shared_shares_[row]);
        const float* shared = mixture_->has_shared ? results + (size_t(num_held_rows_) + row) * width : nullptr;
        for (int i = begin; i < end; i += kLanes) {
            const int n = end - i;
            F16 total = splat(0.0f);
            if (shared != nullptr) total = mul(load(shared + i, n), shared_share);
            for (int j = 0; j < num_chosen(); j++) {
                if (places_[at + j] == kElsewhere) continue;
                const float* result = results + places_[at + j] * width;
                total = fma(load(result + i, n), splat(shares_[at + j]), total);
            }
            if (mode == kAccumulate) total = fma(total, factor, load(target + i, n));
            store(target + i, total, n);
        }
    }

    static void grow(Memory& memory, size_t count) {
        if (!memory.grow(count * sizeof(float))) throw std::bad_alloc();
    }

    Threads& threads_;
    const Matrices& matrices_;
    const Mixture* mixture_ = nullptr;  // of the rows that entered last
    int num_rows_ = 0, num_held_rows_ = 0;
    Memory scores_, hidden_, results_;
    std::vector<int> chosen_;            // [num_rows][num_chosen], ascending
    std::vector<float> shares_;          // as chosen_
    std::vector<float> shared_shares_;   // [num_rows], of the shared MLP
    std::vector<int> starts_;            // of each expert's rows
    std::vector<int> places_;            // as chosen_: the row among those of all experts here, or kElsewhere
    std::vector<int> rows_;              // of those: the row of the batch
    std::vector<Group> groups_;
    size_t hidden_size_ = 0, result_size_ = 0;
    Products products_;
};

}  // namespace funitel
