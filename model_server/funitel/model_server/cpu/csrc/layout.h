// The tokens of a batch: which row and position each has, and how their attention is divided into items of work.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "program.h"

namespace funitel {

struct Layout {
    // A piece of attention: some tokens of one row, over all parts of their context or one.
    struct Item {
        int row, first, count, part, slot;
    };
    // Tokens with a context that is cut between items, to be merged: token, first slot, number of parts.
    struct Split {
        int token, slot, num_parts;
    };

    std::vector<int> positions, rows_of;  // of each token
    std::vector<Item> items;
    std::vector<Split> splits;
    int num_slots = 0;

    // `part` tokens of context are a part, `group` query heads share a key head.
    void lay_out(const Batch& batch, int part, int group) {
        positions.resize(batch.num_tokens);
        rows_of.resize(batch.num_tokens);
        items.clear();
        splits.clear();
        num_slots = 0;
        int token = 0, tile = std::max(1, kMaxQueries / group);
        for (int row = 0; row < batch.num_rows; row++) {
            int length = batch.lengths[row], start = batch.starts[row];
            for (int i = 0; i < length; i++) {
                positions[token + i] = start + i;
                rows_of[token + i] = row;
            }
            int num_parts = start / part + 1;
            if (length == 1 && num_parts > 1) {
                splits.push_back({token, num_slots, num_parts});
                for (int i = 0; i < num_parts; i++) items.push_back({row, token, 1, i, num_slots + i});
                num_slots += num_parts;
            } else {
                for (int i = 0; i < length; i += tile) {
                    items.push_back({row, token + i, std::min(tile, length - i), -1, -1});
                }
            }
            token += length;
        }
    }
};

}  // namespace funitel
