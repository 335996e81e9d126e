// LoRA adapters: what rows of a step that have one add to the product with a matrix. Rows of an adapter are computed
// together, so that its matrices are read once for all of them.
//
// Every number is a sum in a fixed order: a row's result does not depend on what shares the batch.
#pragma once

#include <algorithm>
#include <new>
#include <type_traits>
#include <vector>

#include "matrix.h"
#include "memory.h"
#include "operand.h"
#include "threads.h"
#include "vector.h"

namespace funitel {

// Numbers of an adapter are as in its file: kFloat32, kFloat16 or kBFloat16.

// Outputs of `num_panels` panels of a part of a matrix, from `first_panel` of that part on, grow by `rank` of
// the site's ranks; `native.py` says the same of this and the next three in ctypes, as records. Outputs of a first or last
// panel that are not the piece's have zeros.
struct LowRankPiece {
    const void* b;  // [num_panels][rank][16 outputs]
    int32_t first_rank, rank, part, first_panel, num_panels;
};

// What an adapter has of a matrix; num_ranks is 0 where it has nothing.
struct LowRankSite {
    const void* a;        // [num_ranks][inputs]
    const float* scales;  // [num_ranks], of the products with `a`
    const LowRankPiece* pieces;
    const void* whole;  // [outputs][inputs], in place of the matrix, or null
    int32_t num_ranks, num_pieces;
};

struct LowRankTable {
    const void* a;      // [tokens of this rank][num_ranks]
    const void* b;      // [num_ranks][hidden_size]
    const void* whole;  // [tokens of this rank][hidden_size], in place of the table, or null
    float scale;        // of the product
    int32_t num_ranks;
};

// An adapter: its sites by the index of the matrix, and the embedding.
struct LowRankAdapter {
    const LowRankSite* sites;
    LowRankTable table;
    int32_t kind;
};

// What rows of an operand add to the product with one matrix.
class LowRankSums {
  public:
    // Rows are to follow, none of which adds anything yet. `stride`: floats from a row's products with `a` to the next's.
    void begin(const Matrix& matrix, int num_rows, const float* shrunk, size_t stride) {
        matrix_ = &matrix;
        parts_shift_ = matrix.num_parts - 1;
        shrunk_ = shrunk;
        stride_ = stride;
        has_.assign(num_rows, 0);
        groups_.clear();
    }

    // The rows of an adapter, ascending, which outlive the product.
    void set(const std::vector<int>& rows, const LowRankSite& site, Kind kind) {
        groups_.push_back({rows.data(), rows.data() + rows.size(), &site, kind});
        for (int row : rows) has_[row] = 1;
    }

    bool has(int row) const { return has_[row] != 0; }

    // Write what rows [first, last) add to a pair of panels; what is there of rows without an adapter stays.
    void add(int pair, int first, int last, float (*sums)[kPair][kLanes]) const {
        for (const Group& group : groups_) {
            const int* row = std::lower_bound(group.begin, group.end, first);
            const int* end = std::lower_bound(row, group.end, last);
            for (const int* each = row; each != end; each++) {
                for (float* sum : sums[*each - first]) store(sum, splat(0.0f));
            }
            with_float(group.kind, [&](auto of) {
                using Number = typename decltype(of)::Type;
                for (int p = 0; p < group.site->num_pieces; p++) {
                    const LowRankPiece& piece = group.site->pieces[p];
                    add_piece<Number>(piece, pair, row, end, first, sums);
                }
            });
        }
    }

    // Read what a pair of panels and those after it need, if the pair is the first of so many: read in larger pieces than
    // a pair's, the weights arrive sooner.
    void touch_pairs(int pair) const {
        if (pair % kPairsTouched != 0) return;
        const int first = pair * kPair, end = std::min(matrix_->num_panels, first + kPairsTouched * kPair);
        for (const Group& group : groups_) {
            for (int p = 0; p < group.site->num_pieces; p++) {
                const LowRankPiece& piece = group.site->pieces[p];
                const int from = std::max(first / matrix_->num_parts, piece.first_panel) - piece.first_panel;
                const int to = std::min(divide_up(end, matrix_->num_parts) - piece.first_panel, piece.num_panels);
                const size_t each = size_t(piece.rank) * kLanes * (group.kind == kFloat32 ? 4 : 2);
                if (from < to) touch(static_cast<const char*>(piece.b) + from * each, (to - from) * each);
            }
        }
    }

  private:
    struct Group {
        const int *begin, *end;  // rows
        const LowRankSite* site;
        Kind kind;
    };

    static constexpr int kPairsTouched = 8, kRowsAtOnce = 2;

    // Where a piece has a panel of a pair; null where it has none.
    template <class Number>
    const Number* weights_of(const LowRankPiece& piece, int panel) const {
        const int place = (panel >> parts_shift_) - piece.first_panel;
        if ((panel & parts_shift_) != piece.part || place < 0 || place >= piece.num_panels) return nullptr;
        return static_cast<const Number*>(piece.b) + size_t(place) * piece.rank * kLanes;
    }

    template <class Number>
    void add_piece(const LowRankPiece& piece, int pair, const int* row, const int* end, int first,
                   float (*sums)[kPair][kLanes]) const {
        const Number *left = weights_of<Number>(piece, pair * kPair), *right = weights_of<Number>(piece, pair * kPair + 1);
        if (left != nullptr && right != nullptr) return add_rows<kPair>(piece, left, row, end, 0, first, sums);
        if (left != nullptr) return add_rows<1>(piece, left, row, end, 0, first, sums);
        if (right != nullptr) add_rows<1>(piece, right, row, end, 1, first, sums);
    }

    template <int kPanels, class Number>
    void add_rows(const LowRankPiece& piece, const Number* b, const int* row, const int* end, int panel, int first,
                  float (*sums)[kPair][kLanes]) const {
        for (; end - row >= kRowsAtOnce; row += kRowsAtOnce) {
            add_some<kPanels, kRowsAtOnce>(piece, b, row, panel, first, sums);
        }
        for (; row != end; row++) add_some<kPanels, 1>(piece, b, row, panel, first, sums);
    }

    // Rows of one adapter read its weights once. What is summed does not depend on how many there are.
    template <int kPanels, int kRows, class Number>
    void add_some(const LowRankPiece& piece, const Number* b, const int* row, int panel, int first,
                  float (*sums)[kPair][kLanes]) const {
        F16 totals[kRows][kPanels];
        const float* factors[kRows];
#pragma GCC unroll 2
        for (int k = 0; k < kRows; k++) {
            factors[k] = shrunk_ + row[k] * stride_ + piece.first_rank;
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; p++) totals[k][p] = load(sums[row[k] - first][panel + p]);
        }
        const size_t next = size_t(piece.rank) * kLanes;
        for (int r = 0; r < piece.rank; r++) {
            F16 values[kRows];
#pragma GCC unroll 2
            for (int k = 0; k < kRows; k++) values[k] = splat(factors[k][r]);
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; p++) {
                F16 weight = load(b + p * next + r * kLanes);
#pragma GCC unroll 2
                for (int k = 0; k < kRows; k++) totals[k][p] = fma(weight, values[k], totals[k][p]);
            }
        }
#pragma GCC unroll 2
        for (int k = 0; k < kRows; k++) {
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; p++) store(sums[row[k] - first][panel + p], totals[k][p]);
        }
    }

    const Matrix* matrix_ = nullptr;
    int parts_shift_ = 0;  // of a matrix of one part or two; also the bit that tells a panel's part
    const float* shrunk_ = nullptr;
    size_t stride_ = 0;
    std::vector<uint8_t> has_;  // of each row
    std::vector<Group> groups_;
};

class LowRank {
  public:
    explicit LowRank(Threads& threads) : threads_(threads) {}

    // Whether some row of the step has an adapter.
    bool is_on() const { return !groups_.empty(); }

    // A step, or the part of it behind the choice of tokens with logits, has so many rows of operands, of which
    // `adapter_of` gives the adapter or null.
    template <class Function>
    void begin(int num_rows, Function adapter_of) {
        groups_.clear();
        has_adapter_.assign(num_rows, 0);
        for (int row = 0; row < num_rows; row++) {
            const LowRankAdapter* adapter = adapter_of(row);
            if (adapter == nullptr) continue;
            has_adapter_[row] = 1;
            auto found = std::find_if(groups_.begin(), groups_.end(),
                                      [adapter](const Group& group) { return group.adapter == adapter; });
            if (found == groups_.end()) found = groups_.insert(found, Group{adapter, {}});
            found->rows.push_back(row);
        }
    }

    void end() { groups_.clear(); }

    // Rows of operands are to be kept, of so many numbers each.
    void make_room(int num_inputs) {
        num_inputs_ = num_inputs;
        grow(inputs_, has_adapter_.size() * size_t(num_inputs));
    }

    // Keep the numbers of an operand's row, if the row has an adapter.
    void keep(int row, const float* x) {
        if (has_adapter_[row]) std::copy_n(x, num_inputs_, inputs_.as<float>() + size_t(row) * num_inputs_);
    }

    // What rows add to the product with a matrix; null where none adds anything.
    const LowRankSums* add(const Matrix& matrix, int index) {
        active_.clear();
        int most = 0;
        for (const Group& group : groups_) {
            const LowRankSite& site = group.adapter->sites[index];
            if (site.num_ranks == 0) continue;
            active_.push_back({&group, &site, 0});
            most = std::max(most, site.num_ranks);
        }
        if (active_.empty()) return nullptr;
        grow(shrunk_, has_adapter_.size() * most);
        sums_.begin(matrix, static_cast<int>(has_adapter_.size()), shrunk_.as<float>(), most);
        for (const Active& active : active_) sums_.set(active.group->rows, *active.site, kind_of(*active.group));
        shrink(most);
        return &sums_;
    }

    // Replace the results of rows whose adapter has a weight of its own in place of a matrix, of one part.
    void replace(const Matrix& matrix, int index, const LowRankSums* added, float* target, size_t stride) {
        for (const Group& group : groups_) {
            if (group.adapter->sites[index].whole == nullptr) continue;
            with_float(kind_of(group), [&](auto of) {
                using Number = typename decltype(of)::Type;
                const auto* whole = static_cast<const Number*>(group.adapter->sites[index].whole);
                for_each(threads_, matrix.num_panels, [&](int panel, int) {
                    const int first = panel * kLanes, end = std::min(matrix.num_outputs, first + kLanes);
                    for (int row : group.rows) {
                        float* values = target + row * stride;
                        for (int output = first; output < end; output += kAtOnce) {
                            multiply<1>(whole + size_t(output) * num_inputs_, std::min(kAtOnce, end - output),
                                        {input(row)}, {values + output});
                        }
                        if (added == nullptr || !added->has(row)) continue;
                        float sums[1][kPair][kLanes];
                        added->add(panel / kPair, row, row + 1, sums);
                        for (int i = 0; i < end - first; i++) values[first + i] += sums[0][panel % kPair][i];
                    }
                });
            });
        }
    }

    // The embedding of a token by an adapter's table, `place` among those of this rank; `x` has the base's, times scale.
    static void embed(const LowRankAdapter& adapter, int place, float scale, int width, float* x) {
        const LowRankTable& table = adapter.table;
        with_float(static_cast<Kind>(adapter.kind), [&](auto of) {
            using Number = typename decltype(of)::Type;
            const auto *whole = static_cast<const Number*>(table.whole), *b = static_cast<const Number*>(table.b);
            const auto* a = static_cast<const Number*>(table.a) + size_t(place) * table.num_ranks;
            for (int i = 0; i < width; i += kLanes) {
                const int n = width - i;
                F16 total = whole == nullptr ? load(x + i, n)
                                             : mul(load(whole + size_t(place) * width + i, n), splat(scale));
                for (int r = 0; r < table.num_ranks; r++) {
                    F16 factor = splat(number_of(a[r]) * table.scale * scale);
                    total = fma(load(b + size_t(r) * width + i, n), factor, total);
                }
                store(x + i, total, n);
            }
        });
    }

  private:
    struct Group {
        const LowRankAdapter* adapter;
        std::vector<int> rows;
    };
    // A group with something for the matrix at hand, and its first chunk of the phase.
    struct Active {
        const Group* group;
        const LowRankSite* site;
        int first_chunk;
    };

    static constexpr int kAtOnce = 4;  // sums: the next is begun before the last is done
#if defined(__AVX512F__)
    static constexpr int kRowsAtOnce = 2;  // for each weight that is loaded
#else
    static constexpr int kRowsAtOnce = 1;  // the registers hold the sums of no more
#endif
    static constexpr int kRanksEach = 2 * kAtOnce, kRowsEach = 32;

    static Kind kind_of(const Group& group) { return static_cast<Kind>(group.adapter->kind); }

    const float* input(int row) const { return inputs_.as<float>() + size_t(row) * num_inputs_; }

    // Products of up to kAtOnce rows of weights with inputs of kRows rows. What is summed does not depend on how many
    // there are.
    template <int kRows, class Number>
    void multiply(const Number* weights, int count, const float* const (&x)[kRows], float* const (&target)[kRows]) const {
        if (count == kAtOnce) return multiply_by<kAtOnce, kRows>(weights, x, target);
        for (int j = 0; j < count; j++) {
            float* next[kRows];
            for (int k = 0; k < kRows; k++) next[k] = target[k] + j;
            multiply_by<1, kRows>(weights + size_t(j) * num_inputs_, x, next);
        }
    }

    template <int kCount, int kRows, class Number>
    void multiply_by(const Number* weights, const float* const (&x)[kRows], float* const (&target)[kRows]) const {
        F16 totals[kRows][kCount];
#pragma GCC unroll 2
        for (int k = 0; k < kRows; k++) {
#pragma GCC unroll 4
            for (int j = 0; j < kCount; j++) totals[k][j] = splat(0.0f);
        }
        auto add_lanes = [&](int i, auto... n) {
            F16 values[kRows];
#pragma GCC unroll 2
            for (int k = 0; k < kRows; k++) values[k] = load(x[k] + i, n...);
#pragma GCC unroll 4
            for (int j = 0; j < kCount; j++) {
                F16 weight = load(weights + size_t(j) * num_inputs_ + i, n...);
#pragma GCC unroll 2
                for (int k = 0; k < kRows; k++) totals[k][j] = fma(weight, values[k], totals[k][j]);
            }
        };
        int i = 0;
        for (; i + kLanes <= num_inputs_; i += kLanes) add_lanes(i);
        if (i < num_inputs_) add_lanes(i, num_inputs_ - i);
#pragma GCC unroll 2
        for (int k = 0; k < kRows; k++) {
#pragma GCC unroll 4
            for (int j = 0; j < kCount; j++) target[k][j] = sum(totals[k][j]);
        }
    }

    // Call `work.operator()<rows>(first)` for the rows of a group, kRowsAtOnce at a time while there are so many.
    template <class Work>
    static void for_rows(int first, int last, Work work) {
        int i = first;
        for (; i + kRowsAtOnce <= last; i += kRowsAtOnce) work(std::integral_constant<int, kRowsAtOnce>(), i);
        for (; i < last; i++) work(std::integral_constant<int, 1>(), i);
    }

    // Call `work(active, block of rows, chunk)` for the chunks that each group has, times its blocks of rows.
    template <class Count, class Work>
    void for_chunks(Count count, Work work) {
        int total = 0;
        for (Active& active : active_) {
            active.first_chunk = total;
            total += count(active) * num_blocks(active);
        }
        for_each(threads_, total, [&](int index, int) {
            auto after = std::upper_bound(active_.begin(), active_.end(), index, [](int value, const Active& active) {
                return value < active.first_chunk;
            });
            const Active& active = *(after - 1);
            int chunk = index - active.first_chunk, blocks = num_blocks(active);
            int first = chunk % blocks * kRowsEach;
            int last = std::min(first + kRowsEach, static_cast<int>(active.group->rows.size()));
            work(active, first, last, chunk / blocks);
        });
    }

    static int num_blocks(const Active& active) {
        return divide_up(static_cast<int>(active.group->rows.size()), kRowsEach);
    }

    void shrink(int stride) {
        auto count = [](const Active& active) { return divide_up(active.site->num_ranks, kRanksEach); };
        for_chunks(count, [&](const Active& active, int first, int last, int chunk) {
            int end = std::min(active.site->num_ranks, (chunk + 1) * kRanksEach);
            with_float(kind_of(*active.group), [&](auto of) {
                const auto* a = static_cast<const typename decltype(of)::Type*>(active.site->a);
                const auto* begin = a + size_t(chunk) * kRanksEach * num_inputs_;
                touch(begin, size_t(end - chunk * kRanksEach) * num_inputs_ * sizeof *a);
                for_rows(first, last, [&](auto rows, int i) {
                    const float* x[rows];
                    float* target[rows];
                    for (int rank = chunk * kRanksEach; rank < end; rank += kAtOnce) {
                        for (int k = 0; k < rows; k++) {
                            x[k] = input(active.group->rows[i + k]);
                            target[k] = shrunk_.as<float>() + size_t(active.group->rows[i + k]) * stride + rank;
                        }
                        const int count = std::min(kAtOnce, end - rank);
                        multiply<rows>(a + size_t(rank) * num_inputs_, count, x, target);
                        for (int j = 0; j < count; j++) {
                            for (int k = 0; k < rows; k++) target[k][j] *= active.site->scales[rank + j];
                        }
                    }
                });
            });
        });
    }

    static void grow(Memory& memory, size_t count) {
        if (!memory.grow(count * sizeof(float))) throw std::bad_alloc();
    }

    Threads& threads_;
    std::vector<Group> groups_;
    std::vector<Active> active_;
    std::vector<uint8_t> has_adapter_;  // of each row
    int num_inputs_ = 0;  // of the operand
    Memory inputs_;       // [rows][num_inputs], of rows with adapters
    Memory shrunk_;       // [rows][most ranks], times scales
    LowRankSums sums_;
};

}  // namespace funitel
