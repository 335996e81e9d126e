// The product of rows of activations with panels of blocks of codes. Within a block sums are exact integers; blocks are added
// in order, so that a row's result does not depend on what shares the batch.
//
// Types of blocks take one or two seconds each to compile: engine_*.cpp have them, side by side.
#pragma once

#include "matrix.h"
#include "operand.h"
#include "vector.h"

namespace funitel {

// sums[r][p] = the products of row r of `count` rows `x` of levels with panel p of a pair. `is_cold`: the blocks are not in a
// cache yet.
template <class Block>
void multiply_all_rows(const Block* w, int num_blocks, bool is_cold, const RowBlock* x, int count, F16 (*sums)[kPair]);

}  // namespace funitel
