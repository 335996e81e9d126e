// What a caller hands over: a program, the sizes it is for, and a batch; `native.py` says the same in ctypes. All counts
// are of elements.
#pragma once

#include <cstdint>

namespace funitel {

enum Code : int32_t {
    kEmbed,      // x = scale * row of the matrix   a: matrix, b: first token of this rank
    kPositions,  // x += row of the vector          a: vector
    kNorm,       // operand = norm of x             a: norm, c: matrix it is for
    kPrepare,    // operand = a buffer              a: buffer, c: matrix it is for
    kLinear,     // buffer = operand by matrix      a: matrix, b: mode, c: buffer, d: activation,
                 //                                 e: column of the buffer its outputs begin at; scale
    kRotate,     // queries and keys get positions, keys and values go to the pool
                 //                                 a: layer, b, c: their norms or -1, d: turn or -1; scale of queries
    kAttend,     // attended = attention            a: layer, b: window or 0, c: vector of slopes or -1,
                 //                                 d: whether spans are seen whole; cap or 0
    kAdd,        // x += scale * partial
    kReduce,     // sum a buffer over the ranks, or return for the caller to do it   a: buffer, b: elements of a row
    kSelect,     // go on with the tokens that need logits
    kNormalise,  // buffer = norm of it             a: norm, b: buffer
    kClip,       // queries, keys and values stay within +-cap
    kSquares,    // partial = sums of squares of queries and of keys, two for each row; scale of those of keys
    kCap,        // logits *= scale, and are capped; cap or 0
    kHold,       // held = x or norm of it, and so is the operand     a: norm or -1, c: matrix it is for
    kExperts,    // choose experts by the operand, and compute the hidden units that `held` has of them   a: mixture
    kAddExperts,  // buffer = sum of the chosen experts' results      a: mixture, b: mode (store or accumulate), c: buffer;
                  //                                                  scale
    kTurnLatents,  // queries get positions, latents their norm and positions and go to the pool
                   //                               a: layer, b: norm of latents, d: turn or -1; scale of queries
    kAttendLatents,  // attended = attention        a: layer, b: window or 0, c: whether spans are seen whole, d: matrix
                     //                             that takes the first head's queries to latents, then the other heads',
                     //                             then those that take values back; cap or 0
    kEnter,          // x = features, of tokens that have some
    kDeepen,         // x += features that tokens have behind a layer     a: layer, counted from the model's first
};
enum Buffer : int32_t { kX, kQkv, kAttended, kHidden, kPartial, kLogits, kHeld, kQueryLatents, kLatents };
enum Mode : int32_t { kStore, kAccumulate, kActivate, kGate, kMultiply };

// How keys and values are kept; numbered as in precision.py. BFloat16 needs even sizes; of latents there are the first two.
enum KvKind : int32_t { kKvFloat32, kKvFloat16, kKvBFloat16, kKvE4M3, kKvE5M2, kKvInt8, kKvUint4 };

struct Operation {
    int32_t code, a, b, c, d, e;
    float scale, cap;
};

struct Shape {
    int32_t hidden_size, head_dim, num_heads, num_kv_heads, intermediate_size, num_layers, block_size;
    int32_t kv_kind;  // a KvKind
    int32_t num_threads, level_bits;
    // Of latent attention, 0 without: elements of a latent that are a value, and that turn, those of a head's values, and
    // of the latents of queries. There, head_dim is the size of a query.
    int32_t latent_rank, latent_turned, value_dim, query_rank;
};

struct LowRankAdapter;

struct Batch {
    int32_t num_tokens, num_rows, num_logits, logits_stride;
    const int64_t* token_ids;      // [num_tokens]
    const int64_t* logit_indices;  // [num_logits], tokens
    const int32_t* starts;         // [num_rows], position of a row's first token
    const int32_t* lengths;        // [num_rows], tokens
    const int32_t* blocks;         // block tables back to back
    const int32_t* table_starts;   // [num_rows], where a row's begins
    void* pool;
    float* x;        // [num_tokens, hidden_size]
    float* partial;  // [num_tokens, hidden_size]
    float* logits;   // [num_logits, logits_stride]
    const LowRankAdapter* const* adapters;  // [num_rows], null for rows without one; null where no row has one
    const int32_t* rotary;        // [3][num_tokens], positions that turn heads, by axis; null: those in the sequence
    const int32_t* visible_ends;  // [num_tokens], of the context that a token sees in layers that see spans whole; null:
                                  // each token sees those before it and itself
    // [1 + num_deep][num_tokens], each [hidden_size]: what takes the place of a token's embedding, then what is added behind
    // layer 0, layer 1 and so on. Null for tokens without; null where no token has some.
    const float* const* features;
    int32_t num_deep;
};

constexpr int kDone = -1, kNoMemory = -2, kLostRank = -3;

}  // namespace funitel
