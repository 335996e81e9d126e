// Products of several matrices, each with rows of its own, in two phases for all of them: one lays their operands out, the
// other multiplies. Threads claim tiles and chunks across the matrices, so that a few rows of each keep all threads busy.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "product.h"
#include "threads.h"

namespace funitel {

class Products {
  public:
    // Levels of activations have so many bits.
    explicit Products(int level_bits) : level_bits_(level_bits) {}

    void clear() { entries_.clear(); }

    // Multiply so many rows by a matrix; the arguments from `mode` on are those of a Product.
    void add(const Matrix& matrix, int num_rows, Mode mode, Activation activation, float* target, size_t width) {
        Entry entry = {&matrix, {}, mode, activation, target, width, 0, 0};
        entry.operand.level_bits = level_bits_;
        entry.operand.keeps_floats = !matrix.outliers.empty();
        entry.operand.begin(matrix, num_rows);
        entries_.push_back(entry);
    }

    // Bytes of the weights that are multiplied by.
    size_t num_bytes() const {
        size_t total = 0;
        for (const Entry& entry : entries_) total += entry.matrix->num_bytes();
        return total;
    }

    // `source(i, row)` is a row of the i-th product, of which its matrix' inputs, rounded up to 16, can be read.
    template <class Source>
    void run(Threads& threads, Source source) {
        place();
        for_each(threads, num_tiles_, [&](int index, int) {
            const size_t i = find(index, &Entry::first_tile);
            Entry& entry = entries_[i];
            int tile = index - entry.first_tile, first = tile * entry.operand.tile_rows;
            for (int row = first; row < first + entry.operand.rows_of(tile); row++) {
                entry.operand.set_row(*entry.matrix, row, source(static_cast<int>(i), row));
            }
        });
        for_each(threads, num_chunks_, [&](int index, int) {
            const Entry& entry = entries_[find(index, &Entry::first_chunk)];
            product(entry).multiply(index - entry.first_chunk);
        });
    }

  private:
    struct Entry {
        const Matrix* matrix;
        Operand operand;
        Mode mode;
        Activation activation;
        float* target;
        size_t width;
        int first_tile, first_chunk;
    };

    static constexpr size_t kLine = 64;

    static Product product(const Entry& entry) {
        return {*entry.matrix, entry.operand, entry.mode, entry.activation, 1.0f, entry.target, entry.width};
    }

    // Give every operand its memory, and number tiles and chunks.
    void place() {
        size_t num_bytes = 0;
        for (const Entry& entry : entries_) num_bytes += lines(entry.operand.num_bytes(*entry.matrix));
        if (!values_.grow(num_bytes)) throw std::bad_alloc();
        uint8_t* values = values_.as<uint8_t>();
        num_tiles_ = num_chunks_ = 0;
        for (Entry& entry : entries_) {
            entry.operand.values = values;
            entry.first_tile = num_tiles_;
            entry.first_chunk = num_chunks_;
            values += lines(entry.operand.num_bytes(*entry.matrix));
            num_tiles_ += entry.operand.num_tiles();
            num_chunks_ += product(entry).num_chunks();
        }
    }

    static size_t lines(size_t size) { return (size + kLine - 1) / kLine * kLine; }

    // The entry that has a tile or a chunk.
    size_t find(int index, int Entry::*first) const {
        auto after = std::upper_bound(entries_.begin(), entries_.end(), index,
                                      [first](int value, const Entry& entry) { return value < entry.*first; });
        return after - entries_.begin() - 1;
    }

    std::vector<Entry> entries_;
    Memory values_;
    const int level_bits_;
    int num_tiles_ = 0, num_chunks_ = 0;
};

}  // namespace funitel
