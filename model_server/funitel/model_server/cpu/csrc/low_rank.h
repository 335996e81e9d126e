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

// Outputs [first, first + count) of a part of a matrix grow by `rank` of the site's ranks; `native.py` says the same of
// this and the next three in ctypes, as records.
struct LowRankPiece {
    const void* b;  // [rank][count]
    float scale;    // of the product
    int32_t first_rank, rank, part, first, count;
};

// What an adapter has of a matrix; num_ranks is 0 where it has nothing.
struct LowRankSite {
    const void* a;  // [num_ranks][inputs]
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
        added_.assign(num_rows, nullptr);
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

    // What rows add to the product of a matrix, in the order of its panels: null for those that add nothing.
    const float* const* add(const Matrix& matrix, int index) {
        const size_t width = size_t(matrix.num_panels) * kLanes;
        int most = 0;
        size_t num_rows = 0;
        active_.clear();
        for (const Group& group : groups_) {
            const LowRankSite& site = group.adapter->sites[index];
            if (site.num_ranks == 0) continue;
            active_.push_back({&group, &site, static_cast<int>(num_rows), 0});
            most = std::max(most, site.num_ranks);
            num_rows += group.rows.size();
        }
        if (active_.empty()) return nullptr;
        grow(shrunk_, num_rows * most);
        grow(sums_, num_rows * width);
        std::fill(added_.begin(), added_.end(), nullptr);
        for (const Active& active : active_) {
            for (size_t i = 0; i < active.group->rows.size(); i++) {
                added_[active.group->rows[i]] = sums_.as<float>() + (active.first_row + i) * width;
            }
        }
        shrink(most);
        expand(matrix, width, most);
        return added_.data();
    }

    // Replace the results of rows whose adapter has a weight of its own in place of a matrix.
    void replace(const Matrix& matrix, int index, const float* const* added, float* target, size_t stride) {
        constexpr int each = 64;
        const int pieces = divide_up(matrix.num_outputs, each);
        for (const Group& group : groups_) {
            if (group.adapter->sites[index].whole == nullptr) continue;
            with_float(static_cast<Kind>(group.adapter->kind), [&](auto of) {
                using Number = typename decltype(of)::Type;
                const auto* whole = static_cast<const Number*>(group.adapter->sites[index].whole);
                for_each(threads_, pieces, [&](int piece, int) {
                    int end = std::min(matrix.num_outputs, (piece + 1) * each);
                    for (int output = piece * each; output < end; output += kAtOnce) {
                        int count = std::min(kAtOnce, end - output);
                        for (int row : group.rows) {
                            float* values = target + row * stride + output;
                            multiply<1>(whole + size_t(output) * num_inputs_, count, {input(row)}, {values});
                            if (added == nullptr || added[row] == nullptr) continue;
                            for (int i = 0; i < count; i++) values[i] += added[row][output + i];
                        }
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
    // A group with something for the matrix at hand: where its rows begin among those of all such groups, and its first
    // chunk of the phase.
    struct Active {
        const Group* group;
        const LowRankSite* site;
        int first_row, first_chunk;
    };

    static constexpr int kAtOnce = 4;  // sums: the next is begun before the last is done
#if defined(__AVX512F__)
    static constexpr int kRowsAtOnce = 2;  // for each weight that is loaded
#else
    static constexpr int kRowsAtOnce = 1;  // the registers hold the sums of no more
#endif
    static constexpr int kRanksEach = 2 * kAtOnce, kOutputsEach = 2 * kAtOnce * kLanes, kRowsEach = 32;

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
        for (auto& row : totals) {
            for (F16& total : row) total = splat(0.0f);
        }
        auto add_lanes = [&](int i, auto... n) {
            F16 values[kRows];
            for (int k = 0; k < kRows; k++) values[k] = load(x[k] + i, n...);
            for (int j = 0; j < kCount; j++) {
                F16 weight = load(weights + size_t(j) * num_inputs_ + i, n...);
                for (int k = 0; k < kRows; k++) totals[k][j] = fma(weight, values[k], totals[k][j]);
            }
        };
        int i = 0;
        for (; i + kLanes <= num_inputs_; i += kLanes) add_lanes(i);
        if (i < num_inputs_) add_lanes(i, num_inputs_ - i);
        for (int k = 0; k < kRows; k++) {
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
            with_float(static_cast<Kind>(active.group->adapter->kind), [&](auto of) {
                const auto* a = static_cast<const typename decltype(of)::Type*>(active.site->a);
                const auto* begin = a + size_t(chunk) * kRanksEach * num_inputs_;
                touch(begin, size_t(end - chunk * kRanksEach) * num_inputs_ * sizeof *a);
                for_rows(first, last, [&](auto rows, int i) {
                    const float* x[rows];
                    float* target[rows];
                    for (int rank = chunk * kRanksEach; rank < end; rank += kAtOnce) {
                        for (int k = 0; k < rows; k++) {
                            x[k] = input(active.group->rows[i + k]);
                            target[k] = shrunk_.as<float>() + size_t(active.first_row + i + k) * stride + rank;
                        }
                        multiply<rows>(a + size_t(rank) * num_inputs_, std::min(kAtOnce, end - rank), x, target);
                    }
                });
            });
        });
    }

    // Some outputs of each piece, and zeros first where pieces leave outputs out: a chunk is all of a piece's outputs
    // within a range.
    void expand(const Matrix& matrix, size_t width, int stride) {
        const int num_ranges = divide_up(matrix.num_outputs, kOutputsEach);
        auto count = [&](const Active&) { return num_ranges; };
        for_chunks(count, [&](const Active& active, int first, int last, int chunk) {
            int begin = chunk * kOutputsEach, end = std::min(matrix.num_outputs, begin + kOutputsEach);
            touch_pieces(*active.site, static_cast<Kind>(active.group->adapter->kind), begin, end);
            for_rows(first, last, [&](auto rows, int i) {
                float* target[rows];
                const float* shrunk[rows];
                for (int k = 0; k < rows; k++) {
                    target[k] = sums_.as<float>() + size_t(active.first_row + i + k) * width;
                    shrunk[k] = shrunk_.as<float>() + size_t(active.first_row + i + k) * stride;
                    clear(matrix, begin, end, target[k]);
                }
                for (int p = 0; p < active.site->num_pieces; p++) {
                    const LowRankPiece& piece = active.site->pieces[p];
                    with_float(static_cast<Kind>(active.group->adapter->kind), [&](auto of) {
                        const auto* b = static_cast<const typename decltype(of)::Type*>(piece.b);
                        add_piece<rows>(matrix, piece, b, begin, end, shrunk, target);
                    });
                }
            });
        });
    }

    static void touch_pieces(const LowRankSite& site, Kind kind, int begin, int end) {
        for (int p = 0; p < site.num_pieces; p++) {
            const LowRankPiece& piece = site.pieces[p];
            int from = std::max(begin, piece.first) - piece.first, to = std::min(end, piece.first + piece.count) - piece.first;
            if (from >= to) continue;
            with_float(kind, [&](auto of) {
                const auto* b = static_cast<const typename decltype(of)::Type*>(piece.b);
                for (int r = 0; r < piece.rank; r++) touch(b + size_t(r) * piece.count + from, (to - from) * sizeof *b);
            });
        }
    }

    static void clear(const Matrix& matrix, int begin, int end, float* target) {
        for (int part = 0; part < matrix.num_parts; part++) {
            for (int output = begin; output < end; output += kLanes) {
                store(target + size_t(matrix.panel_of(part, output)) * kLanes, splat(0.0f));
            }
        }
    }

    // Outputs of a piece within [begin, end); a panel of the target that it begins or ends in has others' too.
    template <int kRows, class Number>
    static void add_piece(const Matrix& matrix, const LowRankPiece& piece, const Number* b, int begin, int end,
                          const float* const (&shrunk)[kRows], float* const (&target)[kRows]) {
        int output = std::max(begin, piece.first), to = std::min(end, piece.first + piece.count);
        while (output < to) {
            const Number* weights = b + (output - piece.first);
            if (output % kLanes == 0 && output + kAtOnce * kLanes <= to) {
                add_panels<kAtOnce, kRows>(matrix, piece, weights, output, kLanes, shrunk, target);
                output += kAtOnce * kLanes;
            } else {
                int n = std::min(to, (output / kLanes + 1) * kLanes) - output;
                add_panels<1, kRows>(matrix, piece, weights, output, n, shrunk, target);
                output += n;
            }
        }
    }

    // The sums of so many panels of outputs, of which one alone may have n outputs.
    template <int kCount, int kRows, class Number>
    static void add_panels(const Matrix& matrix, const LowRankPiece& piece, const Number* weights, int output, int n,
                           const float* const (&shrunk)[kRows], float* const (&target)[kRows]) {
        F16 totals[kRows][kCount];
        for (auto& row : totals) {
            for (F16& total : row) total = splat(0.0f);
        }
        for (int r = 0; r < piece.rank; r++) {
            const Number* of_rank = weights + size_t(r) * piece.count;
            F16 factors[kRows];
            for (int k = 0; k < kRows; k++) factors[k] = splat(shrunk[k][piece.first_rank + r] * piece.scale);
            for (int j = 0; j < kCount; j++) {
                F16 weight = n == kLanes ? load(of_rank + j * kLanes) : load(of_rank + j * kLanes, n);
                for (int k = 0; k < kRows; k++) totals[k][j] = fma(weight, factors[k], totals[k][j]);
            }
        }
        for (int j = 0; j < kCount; j++) {
            int first = output + j * kLanes;
            size_t place = size_t(matrix.panel_of(piece.part, first)) * kLanes + first % kLanes;
            for (int k = 0; k < kRows; k++) store(target[k] + place, totals[k][j], n);
        }
    }

    static void grow(Memory& memory, size_t count) {
        if (!memory.grow(count * sizeof(float))) throw std::bad_alloc();
    }

    Threads& threads_;
    std::vector<Group> groups_;
    std::vector<Active> active_;
    std::vector<uint8_t> has_adapter_;   // of each row
    std::vector<const float*> added_;    // to each row, or null
    int num_inputs_ = 0;                 // of the operand
    Memory inputs_;                      // [rows][num_inputs], of rows with adapters
    Memory shrunk_;                      // [rows of active groups][most ranks]
    Memory sums_;                        // [rows of active groups][panels * kLanes]
};

}  // namespace funitel
