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
    std::vector<int> visible_ends;        // of each token's context where it sees spans whole; empty: positions + 1
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
        visible_ends.clear();
        if (batch.visible_ends != nullptr) {
            visible_ends.assign(batch.visible_ends, batch.visible_ends + batch.num_tokens);
        }
        int token = 0, tile = std::max(1, kMaxQueries / group);
        for (int row = 0; row < batch.num_rows; row++) {
            int length = batch.lengths[row], start = batch.starts[row];
            for (int i = 0; i < length; i++) {
                positions[token + i] = start + i;
                rows_of[token + i] = row;
            }
            // No token sees what the step has not computed, whatever a caller says.
            for (int i = 0; i < length && !visible_ends.empty(); i++) {
                visible_ends[token + i] = std::clamp(visible_ends[token + i], start + i + 1, start + length);
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

    // The ends of the contexts that tokens from `token` on see where spans are seen whole; null: positions + 1.
    const int* ends_from(int token) const { return visible_ends.empty() ? nullptr : &visible_ends[token]; }
};

}  // namespace funitel
