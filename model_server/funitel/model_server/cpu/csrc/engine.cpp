// A decoder step as one call: a program of operations over a batch, run by a few threads. Knows no model by name; the
// program, the weights and the sizes come from `program.py`. Sums over other ranks are taken in memory that all have
// mapped, or are the caller's, between two calls.
#include <algorithm>
#include <memory>
#include <new>

#include "ahead.h"
#include "attention.h"
#include "entry.h"
#include "experts.h"
#include "float8.h"
#include "kv_codes.h"
#include "latent.h"
#include "layout.h"
#include "low_rank.h"
#include "matrix.h"
#include "memory.h"
#include "norms.h"
#include "product.h"
#include "program.h"
#include "ranks.h"
#include "rotary.h"
#include "scores.h"
#include "threads.h"
#include "vector.h"

namespace funitel {

namespace {


}  // namespace

class Engine {
  public:
    explicit Engine(const Shape& shape)
        : shape_(shape), threads_(1, &Engine::fetch_ahead, this), experts_(threads_, matrices, shape.level_bits),
          latents_(threads_, matrices, layout_, latent_shape(shape), shape.level_bits), low_rank_(threads_) {
        part_ = part_size(shape.block_size);
        set_threads(shape.num_threads, Threads::kSpinMicroseconds);
    }

    // Compute on so many threads from the next step on, as `Threads::set` does.
    void set_threads(int num_threads, int spin_microseconds) {
        threads_.set(1, spin_microseconds);  // so that no thread is in `ahead_`
        ahead_.make_room(num_threads);
        scratch_ = std::vector<ThreadScratch>(num_threads);
        scratches_.clear();
        for (ThreadScratch& scratch : scratch_) scratches_.push_back(&scratch);
        threads_.set(num_threads, spin_microseconds);
    }

    Arena weights;  // of the matrices, as far as it goes
    std::vector<std::unique_ptr<Matrix>> matrices;
    std::vector<std::vector<float>> vectors;
    std::vector<Norm> norms;
    std::vector<Turn> turns;
    std::vector<Mixture> mixtures;

    // Of the keys of all layers, [num_layers] times what a KeyFrame has; empty for none.
    struct KeyFrames {
        std::vector<float> shifts, first_shifts, key_maps, query_maps;
    };
    KeyFrames key_frames;

    // Where queries and keys are added up, null for nowhere; see `funitel_observe`.
    double* observed = nullptr;

    // The ranks to sum over, if they meet in memory; they outlive the last step.
    Ranks* ranks = nullptr;

    // Go on with a program from operation `at`. Returns kDone, kNoMemory or kLostRank, or where to go on when the caller
    // has done the kReduce before it: `ranks` is null.
    int run(const Batch& batch, int at) {
        threads_.begin_step();
        batch_ = &batch;
        if (at == 0) bytes_read_ = experts_.bytes_read = latents_.bytes_read = 0;
        if (at == 0 && !begin()) return kNoMemory;
        for (size_t i = at; i < program_.size(); i++) {
            ahead_.aim(following_[i]);
            if (program_[i].code == kReduce) {
                if (ranks == nullptr) return static_cast<int>(i) + 1;
                if (!reduce(buffer(program_[i].a), program_[i].b)) return kLostRank;
                continue;
            }
            if (program_[i].code == kSelect) {
                if (batch.num_logits == 0) break;
                num_rows_ = batch.num_logits;
                selected_ = batch.logit_indices;
                if (batch.adapters != nullptr) begin_adapters();
                continue;
            }
            perform(program_[i]);
        }
        ahead_.aim(nullptr);
        return kDone;
    }

    void set_program(const Operation* operations, int count) {
        program_.assign(operations, operations + count);
        operand_bytes_ = 0;
        operand_.keeps_floats = std::any_of(matrices.begin(), matrices.end(),
                                            [](const auto& matrix) { return !matrix->outliers.empty(); });
        for (const auto& matrix : matrices) {
            operand_bytes_ = std::max(operand_bytes_, Operand::row_bytes(*matrix) + operand_.float_bytes(*matrix));
        }
        following_.assign(count, nullptr);
        for (int i = count - 1; i > 0; i--) following_[i - 1] = first_product(program_[i], following_[i]);
    }

    // Bytes of a layer's keys and values in a block of the pool; of latents there are none.
    size_t layer_bytes() const {
        size_t found = 0;
        const Shape& s = shape_;
        with_keys([&](auto of) {
            using Keys = typename decltype(of)::Type;
            const auto pages = Keys::pages(nullptr, nullptr, s.block_size, s.num_kv_heads, s.head_dim, 1, 0, {});
            found = pages.block_stride * sizeof *pages.pool;
        });
        return found;
    }

    void add_turn(std::vector<float> frequencies, float amplitude, bool is_interleaved, std::vector<int32_t> axes) {
        turns.push_back({std::move(frequencies), amplitude, is_interleaved, std::move(axes), num_angles()});
    }

    int num_threads() const { return threads_.count(); }

    // Bytes of the weights that the products of the last step have read.
    size_t bytes_read() const { return bytes_read_ + experts_.bytes_read + latents_.bytes_read; }

    // Pack some outputs of a matrix.
    void fill(Matrix& matrix, int part, int first, int count, const float* source, size_t row_stride, size_t stride) {
        threads_.begin_step();
        for_each(threads_, divide_up(count, kLanes), [&](int chunk, int) {
            for (int i = chunk * kLanes; i < std::min(count, (chunk + 1) * kLanes); i++) {
                matrix.set_row(part, first + i, source + i * row_stride, stride);
            }
        });
    }

    // The same from GGUF blocks, the outputs `row_bytes` apart.
    void fill_blocks(Matrix& matrix, int part, int first, int count, const uint8_t* source, size_t row_bytes) {
        threads_.begin_step();
        for_each(threads_, divide_up(count, kLanes), [&](int chunk, int) {
            for (int i = chunk * kLanes; i < std::min(count, (chunk + 1) * kLanes); i++) {
                matrix.set_blocks(part, first + i, source + i * row_bytes);
            }
        });
    }

    // What sampling does to rows of `count` scores each, the rows back to back.

    void allow(float* scores, int num_rows, int count, const uint32_t* const* bits) {
        for_scores(num_rows, [&](int i, int) { allow_scores(scores + size_t(i) * count, count, bits[i]); });
    }

    void warp(float* scores, const int64_t* rows, int num_rows, int count, const Warp* warps) {
        for (ThreadScratch& scratch : scratch_) scratch.warper.make_room(count);
        for_scores(num_rows, [&](int i, int thread) {
            scratch_[thread].warper.run(scores + size_t(rows[i]) * count, count, warps[i]);
        });
    }

    void best(const float* scores, int num_rows, int count, int64_t* tokens, float* normalisers) {
        for_scores(num_rows, [&](int i, int) {
            Best found = best_score(scores + size_t(i) * count, count);
            tokens[i] = found.token;
            normalisers[i] = found.normaliser;
        });
    }

    void likeliest(float* scores, int num_rows, int count, int32_t* tokens, float* logprobs) {
        for_scores(num_rows, [&](int i, int) {
            tokens[i] = likeliest_score(scores + size_t(i) * count, count, logprobs[i]);
        });
    }

    void draw(const float* scores, const int64_t* rows, int num_rows, int count, const uint64_t* keys,
              int64_t* tokens) {
        for_scores(num_rows, [&](int i, int) {
            tokens[i] = draw_score(scores + size_t(rows[i]) * count, count, keys[i]);
        });
    }

  private:
    static bool fetch_ahead(void* engine, int thread) { return static_cast<Engine*>(engine)->ahead_.step(thread); }

    template <class Function>
    void for_scores(int num_rows, Function function) {
        threads_.begin_step();
        for_each(threads_, num_rows, function);
    }

    int group() const { return shape_.num_heads / shape_.num_kv_heads; }
    int qkv_size() const {
        return (shape_.num_heads + (has_latents() ? 0 : 2 * shape_.num_kv_heads)) * shape_.head_dim;
    }
    int attended_size() const {
        return shape_.num_heads * (has_latents() ? shape_.value_dim : shape_.head_dim);
    }
    bool has_latents() const { return shape_.latent_rank > 0; }
    static LatentShape latent_shape(const Shape& shape) {
        return {shape.num_heads, shape.head_dim, shape.latent_rank, shape.latent_turned, shape.value_dim,
                shape.num_layers, shape.block_size};
    }
    int num_angles() const { return turns.empty() ? 0 : turns.back().first + turns.back().num_angles(); }
    const float* vector(int index) const { return index < 0 ? nullptr : vectors[index].data(); }
    // The token of a row of the operand.
    int64_t token_of(int row) const { return selected_ == nullptr ? row : selected_[row]; }

    // The matrix of the first product of an operation; null where that is not known, and the next one's where it has none.
    const Matrix* first_product(const Operation& operation, const Matrix* next) const {
        switch (operation.code) {
            case kLinear: return matrices[operation.a].get();
            case kExperts: return matrices[mixtures[operation.a].router].get();
            case kAttendLatents: return matrices[operation.d].get();
            case kAddExperts: return nullptr;
            default: return next;
        }
    }

    bool begin() {
        const Batch& batch = *batch_;
        size_t tokens = batch.num_tokens;
        num_rows_ = batch.num_tokens;
        selected_ = nullptr;
        layout_.lay_out(batch, part_, group());
        int widest = std::max({shape_.hidden_size, shape_.intermediate_size, attended_size(), shape_.query_rank});
        int longest = std::max(batch.num_tokens, batch.num_logits);
        if (!qkv_.grow(tokens * qkv_size() * sizeof(float)) ||
            !attended_.grow(tokens * attended_size() * sizeof(float)) ||
            !hidden_.grow(tokens * shape_.intermediate_size * sizeof(float)) ||
            !held_.grow(mixtures.empty() ? 0 : tokens * shape_.hidden_size * sizeof(float)) ||
            !query_latents_.grow(tokens * shape_.query_rank * sizeof(float)) ||
            !kept_latents_.grow(tokens * stride(kLatents) * sizeof(float)) ||
            (has_latents() && !latents_.reserve(batch.num_tokens)) ||
            !angles_.grow(tokens * num_angles() * sizeof(float)) || !operand_memory_.grow(longest * operand_bytes_) ||
            !partials_.grow(size_t(layout_.num_slots) * shape_.num_heads * partial_size() * sizeof(float))) {
            return false;
        }
        operand_.values = operand_memory_.as<uint8_t>();
        operand_.level_bits = shape_.level_bits;
        for (ThreadScratch& scratch : scratch_) {
            int dim = std::max(shape_.head_dim, shape_.latent_rank);
            if (!scratch.reserve(part_, dim, shape_.block_size)) return false;
            if (!scratch.row.grow((std::max(widest, qkv_size()) + kLanes) * sizeof(float))) return false;
        }
        compute_angles();
        low_rank_.end();
        if (batch.adapters != nullptr) begin_adapters();
        return true;
    }

    void begin_adapters() {
        low_rank_.begin(num_rows_, [this](int row) { return batch_->adapters[layout_.rows_of[token_of(row)]]; });
    }

    void compute_angles() {
        if (turns.empty()) return;
        constexpr int tokens_each = 32;
        for_each(threads_, divide_up(num_rows_, tokens_each), [&](int chunk, int) {
            int end = std::min(num_rows_, (chunk + 1) * tokens_each);
            for (int token = chunk * tokens_each; token < end; token++) {
                for (const Turn& turn : turns) fill_angles(token, turn);
            }
        });
    }

    void fill_angles(int token, const Turn& turn) const {
        if (batch_->rotary == nullptr) return turn.fill(layout_.positions[token], angles(token, turn));
        turn.fill(batch_->rotary + token, batch_->num_tokens, angles(token, turn));
    }

    float* angles(int token, const Turn& turn) const {
        return angles_.as<float>() + size_t(token) * num_angles() + turn.first;
    }

    void perform(const Operation& operation) {
        switch (static_cast<Code>(operation.code)) {
            case kEmbed: return embed(*matrices[operation.a], operation.b, operation.scale);
            case kPositions: return add_positions(vectors[operation.a]);
            case kNorm: return norm(operation);
            case kPrepare: return prepare(operation);
            case kLinear: return linear(operation);
            case kRotate: return rotate_heads(operation);
            case kAttend:
                return with_keys([&](auto keys) { attend<typename decltype(keys)::Type>(operation); });
            case kAdd: return add_partial(operation.scale);
            case kNormalise: return normalise_rows(operation);
            case kClip: return clip(operation.cap);
            case kSquares: return sum_squares(operation.scale);
            case kCap: return cap_logits(operation);
            case kHold: return hold(operation);
            case kExperts: return enter_experts(mixtures[operation.a]);
            case kAddExperts:
                return experts_.leave(static_cast<Mode>(operation.b), operation.scale, buffer(operation.c));
            case kTurnLatents:
                if (shape_.kv_kind == kKvFloat16) return turn_latents<Half>(operation);
                return turn_latents<float>(operation);
            case kAttendLatents:
                if (shape_.kv_kind == kKvFloat16) return attend_latents<Half>(operation);
                return attend_latents<float>(operation);
            case kEnter: return enter();
            case kDeepen: return deepen(operation.a);
            case kReduce:
            case kSelect: return;
        }
    }

    float* buffer(int index) const {
        switch (index) {
            case kX: return batch_->x;
            case kQkv: return qkv_.as<float>();
            case kAttended: return attended_.as<float>();
            case kHidden: return hidden_.as<float>();
            case kPartial: return batch_->partial;
            case kHeld: return held_.as<float>();
            case kQueryLatents: return query_latents_.as<float>();
            case kLatents: return kept_latents_.as<float>();
            default: return batch_->logits;
        }
    }

    size_t stride(int index) const {
        switch (index) {
            case kQkv: return qkv_size();
            case kAttended: return attended_size();
            case kHidden: return shape_.intermediate_size;
            case kLogits: return batch_->logits_stride;
            case kQueryLatents: return shape_.query_rank;
            case kLatents: return shape_.latent_rank + shape_.latent_turned;
            default: return shape_.hidden_size;
        }
    }

    // Call `function(row, thread)` for all rows; few at a time, for they are little work each.
    template <class Function>
    void for_rows(Function function) {
        constexpr int rows_each = 4;
        for_each(threads_, divide_up(num_rows_, rows_each), [&](int chunk, int thread) {
            int end = std::min(num_rows_, (chunk + 1) * rows_each);
            for (int row = chunk * rows_each; row < end; row++) function(row, thread);
        });
    }

    // The same for rows that become the operand: the rows of a tile share cache lines, so one thread lays them all out.
    template <class Function>
    void for_operand(const Matrix& matrix, Function function) {
        operand_.begin(matrix, num_rows_);
        for_each(threads_, operand_.num_tiles(), [&](int tile, int thread) {
            int first = tile * operand_.tile_rows;
            for (int row = first; row < first + operand_.rows_of(tile); row++) function(row, thread);
        });
    }

    void embed(const Matrix& table, int first, float scale) {
        for_rows([&](int row, int) {
            int64_t id = batch_->token_ids[row] - first;
            float* x = batch_->x + size_t(row) * shape_.hidden_size;
            bool is_here = id >= 0 && id < table.num_outputs;
            if (!is_here) return std::fill(x, x + shape_.hidden_size, 0.0f);
            const int place = static_cast<int>(id);
            table.read_row(place, scale, x);
            if (!low_rank_.is_on()) return;
            const LowRankAdapter* adapter = batch_->adapters[layout_.rows_of[row]];
            if (adapter != nullptr) LowRank::embed(*adapter, place, scale, shape_.hidden_size, x);
        });
    }

    void enter() {
        if (batch_->features == nullptr) return;
        for_features(batch_->features, [](float* x, const float* given, int size) { std::copy_n(given, size, x); });
    }

    void deepen(int layer) {
        if (layer >= batch_->num_deep) return;
        const float* const* given = batch_->features + size_t(layer + 1) * batch_->num_tokens;
        for_features(given, [](float* x, const float* added, int size) {
            for (int i = 0; i < size; i++) x[i] += added[i];
        });
    }

    // Call `function(x, features, hidden_size)` for the tokens that have some.
    template <class Function>
    void for_features(const float* const* given, Function function) {
        for_rows([&](int row, int) {
            if (given[row] != nullptr) function(batch_->x + size_t(row) * shape_.hidden_size, given[row], shape_.hidden_size);
        });
    }

    void add_positions(const std::vector<float>& table) {
        for_rows([&](int row, int) {
            float* x = batch_->x + size_t(row) * shape_.hidden_size;
            const float* position = table.data() + size_t(layout_.positions[row]) * shape_.hidden_size;
            for (int i = 0; i < shape_.hidden_size; i++) x[i] += position[i];
        });
    }

    // Lay out row `row` of an operand, and keep it for the adapter of the row.
    void set_operand(const Matrix& matrix, int row, const float* x) {
        operand_.set_row(matrix, row, x);
        if (low_rank_.is_on()) low_rank_.keep(row, x);
    }

    void norm(const Operation& operation) {
        const Matrix& matrix = *matrices[operation.c];
        if (low_rank_.is_on()) low_rank_.make_room(matrix.num_inputs);
        const Norm& norm = norms[operation.a];
        const float *weight = vector(norm.weight), *bias = vector(norm.bias);
        for_operand(matrix, [&](int row, int thread) {
            float* y = scratch_[thread].row.as<float>();
            normalise(norm, batch_->x + token_of(row) * shape_.hidden_size, y, shape_.hidden_size, weight, bias);
            set_operand(matrix, row, y);
        });
    }

    void hold(const Operation& operation) {
        const Matrix& matrix = *matrices[operation.c];
        for_operand(matrix, [&](int row, int) {
            const float* x = batch_->x + token_of(row) * shape_.hidden_size;
            float* held = held_.as<float>() + size_t(row) * shape_.hidden_size;
            if (operation.a < 0) {
                std::copy_n(x, shape_.hidden_size, held);
            } else {
                const Norm& norm = norms[operation.a];
                normalise(norm, x, held, shape_.hidden_size, vector(norm.weight), vector(norm.bias));
            }
            operand_.set_row(matrix, row, held);
        });
    }

    void enter_experts(const Mixture& mixture) {
        experts_.enter(mixture, operand_, held_.as<float>(), vector(mixture.correction));
    }

    template <class T>
    void turn_latents(const Operation& operation) {
        const Norm& norm = norms[operation.b];
        const Turn* turn = operation.d < 0 ? nullptr : &turns[operation.d];
        const float *weight = vector(norm.weight), *bias = vector(norm.bias);
        const int rank = shape_.latent_rank;
        for_rows([&](int token, int) {
            float* latent = kept_latents_.as<float>() + token * stride(kLatents);
            const float* cosines = turn == nullptr ? nullptr : angles(token, *turn);
            normalise(norm, latent, latent, rank, weight, bias);
            if (turn != nullptr) turn->rotate(latent + rank, cosines, shape_.latent_turned, 1.0f);
            latents_.keep<T>(*batch_, token, operation.a, latent);
            latents_.turn(token, qkv_.as<float>() + size_t(token) * qkv_size(), turn, cosines, operation.scale);
        });
    }

    template <class T>
    void attend_latents(const Operation& operation) {
        const Sight sight = {operation.b, operation.c != 0, operation.cap};
        latents_.attend<T>(*batch_, operation.a, sight, operation.d, qkv_.as<float>(), attended_.as<float>(), scratches_);
    }

    void normalise_rows(const Operation& operation) {
        const Norm& norm = norms[operation.a];
        const float *weight = vector(norm.weight), *bias = vector(norm.bias);
        float* rows = buffer(operation.b);
        int width = static_cast<int>(stride(operation.b));
        for_rows([&](int row, int) {
            float* values = rows + size_t(row) * width;
            normalise(norm, values, values, width, weight, bias);
        });
    }

    void prepare(const Operation& operation) {
        const Matrix& matrix = *matrices[operation.c];
        if (low_rank_.is_on()) low_rank_.make_room(matrix.num_inputs);
        const float* source = buffer(operation.a);
        size_t width = stride(operation.a);
        for_operand(matrix, [&](int row, int) { set_operand(matrix, row, source + token_of(row) * width); });
    }

    void add_partial(float scale) {
        int width = shape_.hidden_size;
        F16 factor = splat(scale);
        for_rows([&](int row, int) {
            float* x = batch_->x + size_t(row) * width;
            const float* part = batch_->partial + size_t(row) * width;
            for (int i = 0; i < width; i += kLanes) {
                int n = width - i;
                store(x + i, fma(load(part + i, n), factor, load(x + i, n)), n);
            }
        });
    }

    bool reduce(float* values, size_t width) {
        return ranks->sum(values, num_rows_ * width, [&](size_t count, auto work) {
            constexpr size_t each = 16384;
            for_each(threads_, divide_up(count, each), [&](int chunk, int) {
                work(chunk * each, std::min(count, (chunk + 1) * each));
            });
        });
    }

    void clip(float cap) {
        for_rows([&](int row, int) {
            float* heads = qkv_.as<float>() + size_t(row) * qkv_size();
            for (int i = 0; i < qkv_size(); i++) heads[i] = std::min(std::max(heads[i], -cap), cap);
        });
    }

    void sum_squares(float key_scale) {
        int num_queries = attended_size(), num_keys = shape_.num_kv_heads * shape_.head_dim;
        for_rows([&](int row, int) {
            const float* heads = qkv_.as<float>() + size_t(row) * qkv_size();
            float* sums = batch_->partial + size_t(row) * 2;
            sums[0] = squares(heads, num_queries, 0.0f);
            sums[1] = squares(heads + num_queries, num_keys, 0.0f) * key_scale;
        });
    }

    void cap_logits(const Operation& operation) {
        constexpr int each = 4096;
        int count = batch_->logits_stride, num_pieces = divide_up(count, each);
        F16 scale = splat(operation.scale), cap = splat(operation.cap);
        for_each(threads_, num_rows_ * num_pieces, [&](int chunk, int) {
            int begin = chunk % num_pieces * each, end = std::min(count, begin + each);
            float* logits = batch_->logits + size_t(chunk / num_pieces) * count;
            for (int i = begin; i < end; i += kLanes) {
                F16 value = mul(load(logits + i, end - i), scale);
                store(logits + i, operation.cap > 0.0f ? soft_cap(value, cap) : value, end - i);
            }
        });
    }

    void linear(const Operation& operation) {
        Product product = {*matrices[operation.a], operand_, static_cast<Mode>(operation.b),
                           static_cast<Activation>(operation.d), operation.scale,
                           buffer(operation.c) + operation.e, stride(operation.c)};
        bytes_read_ += product.matrix.num_bytes();
        if (low_rank_.is_on()) product.added = low_rank_.add(product.matrix, operation.a);
        for_each(threads_, product.num_chunks(), [&](int chunk, int) { product.multiply(chunk); });
        if (low_rank_.is_on() && operation.c == kLogits) {
            low_rank_.replace(product.matrix, operation.a, product.added, product.target, product.width);
        }
    }

    // Where the keys and values of a layer and a row lie.
    template <class Keys>
    typename Keys::Pages pages(int row, int layer) const {
        const int32_t* blocks = batch_->blocks + batch_->table_starts[row];
        const Shape& s = shape_;
        return Keys::pages(batch_->pool, blocks, s.block_size, s.num_kv_heads, s.head_dim, s.num_layers, layer,
                           key_frame(layer));
    }

    // What is done to the keys of a layer before they become codes.
    KeyFrame key_frame(int layer) const {
        if (key_frames.shifts.empty()) return {};
        const size_t count = size_t(shape_.num_kv_heads) * shape_.head_dim, first = count * layer;
        const size_t map = first * shape_.head_dim;
        const KeyFrames& all = key_frames;
        return {&all.shifts[first], &all.first_shifts[first], &all.key_maps[map], &all.query_maps[map]};
    }

    void rotate_heads(const Operation& operation) {
        const Norm* q_norm = operation.b < 0 ? nullptr : &norms[operation.b];
        const Norm* k_norm = operation.c < 0 ? nullptr : &norms[operation.c];
        const Turn* turn = operation.d < 0 ? nullptr : &turns[operation.d];
        const int dim = shape_.head_dim;
        for_rows([&](int token, int) {
            float* heads = qkv_.as<float>() + size_t(token) * qkv_size();
            const float* sums = batch_->partial + size_t(token) * 2;  // where whole rows are normalised
            for (int h = 0; h < shape_.num_heads + shape_.num_kv_heads; h++) {
                bool is_query = h < shape_.num_heads;
                const Norm* norm = is_query ? q_norm : k_norm;
                float* head = heads + h * dim;
                float scale = is_query ? operation.scale : 1.0f;
                if (norm != nullptr) normalise_head(*norm, head, is_query ? h : h - shape_.num_heads, sums + !is_query);
                if (turn != nullptr) {
                    turn->rotate(head, angles(token, *turn), dim, scale);
                } else if (is_query) {
                    for (int i = 0; i < dim; i++) head[i] *= scale;
                }
            }
            with_keys([&](auto of) { keep<typename decltype(of)::Type>(token, operation.a, heads); });
        });
        if (observed != nullptr) observe(operation.a);
    }

    // Add up keys, their products with themselves and those of queries, head by head: see `funitel_observe`.
    void observe(int layer) {
        const int dim = shape_.head_dim, num_kv = shape_.num_kv_heads;
        const size_t square = size_t(dim) * dim;
        for_each(threads_, num_kv, [&](int h, int) {
            double* target = observed + (size_t(layer) * num_kv + h) * 2 * (dim + square);
            std::vector<float> first(dim), sum(dim), keys(square + kLanes), queries(square + kLanes);
            for (int token = 0; token < num_rows_; token++) {
                const float* heads = qkv_.as<float>() + size_t(token) * qkv_size();
                const float* key = heads + (shape_.num_heads + h) * dim;
                float* own = layout_.positions[token] == 0 ? first.data() : sum.data();
                for (int i = 0; i < dim; i++) own[i] += key[i];
                if (layout_.positions[token] == 0) continue;
                add_products(key, dim, keys.data());
                for (int g = 0; g < group(); g++) add_products(heads + (h * group() + g) * dim, dim, queries.data());
            }
            auto leave = [&](const std::vector<float>& source, size_t count) {
                for (size_t i = 0; i < count; i++) *target++ += source[i];
            };
            leave(first, dim);
            leave(sum, dim);
            leave(keys, square);
            leave(queries, square);
        });
    }

    static void add_products(const float* x, int dim, float* target) {
        for (int i = 0; i < dim; i++, target += dim) {
            const F16 factor = splat(x[i]);
            for (int j = 0; j < dim; j += kLanes) {
                store(target + j, fma(factor, load(x + j, dim - j), load(target + j, dim - j)), dim - j);
            }
        }
    }

    void normalise_head(const Norm& norm, float* head, int index, const float* sum) const {
        const float *weight = vector(norm.weight), *bias = vector(norm.bias);
        if (weight != nullptr) weight += index * norm.head_stride;
        if (bias != nullptr) bias += index * norm.head_stride;
        if (norm.whole_size == 0) return normalise(norm, head, head, shape_.head_dim, weight, bias);
        float factor = 1.0f / std::sqrt(*sum / norm.whole_size + norm.eps);
        rescale(head, head, shape_.head_dim, 0.0f, factor, weight, bias);
    }

    template <class Keys>
    void keep(int token, int layer, const float* heads) const {
        const auto target = pages<Keys>(layout_.rows_of[token], layer);
        const float* keys = heads + shape_.num_heads * shape_.head_dim;
        const float* values = keys + shape_.num_kv_heads * shape_.head_dim;
        for (int h = 0; h < shape_.num_kv_heads; h++) {
            target.write(layout_.positions[token], h, keys + h * shape_.head_dim, values + h * shape_.head_dim);
        }
    }

    int partial_size() const { return shape_.head_dim + 2; }

    // Call a function with the pool's kind of keys and values.
    template <class Function>
    void with_keys(Function function) const {
        switch (static_cast<KvKind>(shape_.kv_kind)) {
            case kKvFloat16: return function(Of<NumberKeys<DenseProduct<Half>>>());
            case kKvBFloat16:
#if defined(__AVX512VNNI__)
                if (has_pair_products()) return function(Of<NumberKeys<FastPairProduct>>());
#endif
                return function(Of<NumberKeys<PairProduct>>());
            case kKvInt8: return function(Of<CodeKeys<8>>());
            case kKvUint4: return function(Of<CodeKeys<4>>());
            case kKvE4M3: return function(Of<NumberKeys<DenseProduct<E4M3>>>());
            case kKvE5M2: return function(Of<NumberKeys<DenseProduct<E5M2>>>());
            case kKvFloat32: break;
        }
        return function(Of<NumberKeys<DenseProduct<float>>>());
    }

    template <class Keys>
    void attend(const Operation& operation) {
        int num_kv = shape_.num_kv_heads, num_items = static_cast<int>(layout_.items.size()) * num_kv;
        for_each(threads_, num_items, [&](int chunk, int thread) {
            int index = num_items - 1 - chunk;  // the longest contexts come last in a batch: begin with them
            attend_item<Keys>(layout_.items[index / num_kv], index % num_kv, operation, scratch_[thread]);
        });
        if (layout_.splits.empty()) return;
        int heads = shape_.num_heads, dim = shape_.head_dim;
        for_each(threads_, static_cast<int>(layout_.splits.size()) * num_kv, [&](int chunk, int thread) {
            const Layout::Split& split = layout_.splits[chunk / num_kv];
            int first = chunk % num_kv * group();
            for (int h = first; h < first + group(); h++) {
                Gathered all = {0.0f, 0.0f, scratch_[thread].gathered};
                for (int part = 0; part < split.num_parts; part++) {
                    float* source = partials_.as<float>() + (size_t(split.slot + part) * heads + h) * partial_size();
                    merge(all, {source[0], source[1], source + 2}, dim);
                }
                float* out = attended_.as<float>() + size_t(split.token) * attended_size() + h * dim;
                finish(all, out, dim);
                Keys::leave(out, dim);
            }
        });
    }

    template <class Keys>
    void attend_item(const Layout::Item& item, int kv_head, const Operation& operation, Scratch& s) {
        int dim = shape_.head_dim, heads_each = std::min(group(), kMaxQueries), window = operation.b;
        const float* slopes = vector(operation.c);
        const auto source = pages<Keys>(item.row, operation.a);
        for (int g = 0; g < group(); g += heads_each) {
            int heads = std::min(heads_each, group() - g), first_head = kv_head * group() + g;
            Queries queries;
            queries.count = item.count * heads;
            queries.cap = operation.cap;
            queries.has_slopes = slopes != nullptr;
            const int* ends = operation.d != 0 ? layout_.ends_from(item.first) : nullptr;
            int lowest = layout_.positions[item.first], highest = 0;
            for (int t = 0; t < item.count; t++) {
                int position = layout_.positions[item.first + t], end = ends == nullptr ? position + 1 : ends[t];
                int low = window > 0 ? std::max(0, position + 1 - window) : 0;
                const float* q = qkv_.as<float>() + size_t(item.first + t) * qkv_size() + first_head * dim;
                for (int h = 0; h < heads; h++) {
                    int place = t * heads + h;
                    queries.low[place] = low;
                    queries.high[place] = end;
                    if (slopes != nullptr) {
                        queries.slopes[place] = slopes[first_head + h];
                        queries.own[place] = position;
                    }
                    Keys::set_query(source, kv_head, s, place, q + h * dim);
                }
                lowest = std::min(lowest, low);
                highest = std::max(highest, end);
            }
            queries.begin = item.part < 0 ? lowest : item.part * part_;
            queries.end = item.part < 0 ? highest : std::min(highest, (item.part + 1) * part_);
            attend_queries<Keys>(source, kv_head, first_head, heads, item, queries, lowest, highest, s);
        }
    }

    template <class Keys>
    void attend_queries(const typename Keys::Pages& source, int kv_head, int first_head, int heads,
                        const Layout::Item& item, const Queries& queries, int lowest, int highest, Scratch& s) {
        int dim = shape_.head_dim;
        Gathered parts[kMaxQueries], all[kMaxQueries];
        if (item.part >= 0) {
            Keys::attend(source, kv_head, item.part * part_, (item.part + 1) * part_, queries, s, parts);
            for (int h = 0; h < heads; h++) {
                size_t place = size_t(item.slot) * shape_.num_heads + first_head + h;
                float* target = partials_.as<float>() + place * partial_size();
                target[0] = parts[h].largest;
                target[1] = parts[h].weight;
                std::memcpy(target + 2, parts[h].values, dim * sizeof(float));
            }
            return;
        }
        for (int q = 0; q < queries.count; q++) all[q] = {0.0f, 0.0f, s.gathered + size_t(q) * dim};
        for (int part = lowest / part_; part * part_ < highest; part++) {
            Keys::attend(source, kv_head, part * part_, (part + 1) * part_, queries, s, parts);
            for (int q = 0; q < queries.count; q++) merge(all[q], parts[q], dim);
        }
        for (int q = 0; q < queries.count; q++) {
            size_t token = item.first + q / heads;
            float* out = attended_.as<float>() + token * attended_size() + (first_head + q % heads) * dim;
            finish(all[q], out, dim);
            Keys::leave(out, dim);
        }
    }

    struct ThreadScratch : Scratch {
        Memory row;
        Warper warper;
    };

    Shape shape_;
    std::vector<Operation> program_;
    std::vector<const Matrix*> following_;  // of each operation the matrix of the next product, null for none
    Ahead ahead_;
    Threads threads_;
    int part_;
    std::vector<ThreadScratch> scratch_;
    std::vector<Scratch*> scratches_;  // the same
    const Batch* batch_ = nullptr;
    size_t operand_bytes_ = 0;  // of a row, for the matrix that takes most
    int num_rows_ = 0;
    const int64_t* selected_ = nullptr;
    Layout layout_;
    Memory qkv_, attended_, hidden_, angles_, partials_, held_, query_latents_, kept_latents_, operand_memory_;
    Experts experts_;
    LatentAttention latents_;
    LowRank low_rank_;
    size_t bytes_read_ = 0;
    Operand operand_;
};

}  // namespace funitel

using funitel::Engine;

extern "C" {

// Make an engine without weights or program; null when memory is short.
Engine* ENTRY(funitel_engine)(const funitel::Shape* shape) {
    try {
        return new Engine(*shape);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void ENTRY(funitel_release)(Engine* engine) { delete engine; }

int32_t ENTRY(funitel_num_threads)(const Engine* engine) { return engine->num_threads(); }

// Compute on so many threads from the next step on, which spin so long before they sleep. Returns 0 or kNoMemory.
int32_t ENTRY(funitel_set_threads)(Engine* engine, int32_t num_threads, int32_t spin_microseconds) {
    try {
        engine->set_threads(num_threads, spin_microseconds);
        return 0;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// Make room for the weights of all matrices, before the first; what does not fit gets memory of its own.
int32_t ENTRY(funitel_reserve)(Engine* engine, int64_t num_bytes) {
    return engine->weights.reserve(num_bytes) ? 0 : funitel::kNoMemory;
}

// Add a matrix and return its index, or kNoMemory. Fill it with funitel_rows, then funitel_matrix_done.
int32_t ENTRY(funitel_matrix)(Engine* engine, int32_t kind, int32_t num_outputs, int32_t num_inputs,
                              int32_t num_parts) {
    try {
        auto matrix = std::make_unique<funitel::Matrix>(static_cast<funitel::Kind>(kind), num_outputs, num_inputs,
                                                        num_parts);
        if (!matrix->allocate(engine->weights)) return funitel::kNoMemory;
        engine->matrices.push_back(std::move(matrix));
        return static_cast<int32_t>(engine->matrices.size()) - 1;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// Outputs [first, first + count) of a part, from rows `row_stride` apart of inputs `input_stride` apart, in floats.
void ENTRY(funitel_rows)(Engine* engine, int32_t matrix, int32_t part, int32_t first, int32_t count,
                         const float* source, int64_t row_stride, int64_t input_stride, const float* bias) {
    funitel::Matrix& target = *engine->matrices[matrix];
    engine->fill(target, part, first, count, source, row_stride, input_stride);
    for (int32_t i = 0; bias != nullptr && i < count; i++) target.set_bias(part, first + i, bias[i]);
}

// Outputs [first, first + count) of a part of a matrix of blocks, as they lie in a GGUF, `row_bytes` apart.
void ENTRY(funitel_blocks)(Engine* engine, int32_t matrix, int32_t part, int32_t first, int32_t count,
                           const uint8_t* source, int64_t row_bytes, const float* bias) {
    funitel::Matrix& target = *engine->matrices[matrix];
    engine->fill_blocks(target, part, first, count, source, row_bytes);
    for (int32_t i = 0; bias != nullptr && i < count; i++) target.set_bias(part, first + i, bias[i]);
}

// Outliers of outputs [first, first + count) of a part of a matrix of blocks: those of output first + i are
// [starts[i], starts[i + 1]) of `inputs`, ascending, and `deltas`, float16. Returns 0 or kNoMemory.
int32_t ENTRY(funitel_outliers)(Engine* engine, int32_t matrix, int32_t part, int32_t first, int32_t count,
                                const int64_t* starts, const uint16_t* inputs, const uint16_t* deltas) {
    try {
        funitel::Matrix& target = *engine->matrices[matrix];
        for (int32_t i = 0; i < count; i++) {
            const int number = static_cast<int>(starts[i + 1] - starts[i]);
            target.set_outliers(part, first + i, number, inputs + starts[i], deltas + starts[i]);
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// All outliers of a matrix are there. Returns the bytes they take, or kNoMemory.
int64_t ENTRY(funitel_outliers_done)(Engine* engine, int32_t matrix) {
    try {
        if (!engine->matrices[matrix]->finish_outliers(engine->weights)) return funitel::kNoMemory;
        return engine->matrices[matrix]->outliers.num_bytes();
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// The matrix is whole; returns the bytes it takes.
int64_t ENTRY(funitel_matrix_done)(Engine* engine, int32_t matrix) {
    return engine->matrices[matrix]->num_bytes();
}

// Copy a vector (norm weights, position table, slopes) and return its index, or kNoMemory.
int32_t ENTRY(funitel_vector)(Engine* engine, const float* values, int64_t count) {
    try {
        engine->vectors.emplace_back(values, values + count);
        return static_cast<int32_t>(engine->vectors.size()) - 1;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// Add a norm and return its index, or kNoMemory.
int32_t ENTRY(funitel_norm)(Engine* engine, const funitel::Norm* norm) {
    try {
        engine->norms.push_back(*norm);
        return static_cast<int32_t>(engine->norms.size()) - 1;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// Add rotary positions with a frequency for each pair and return their index, or kNoMemory. `axes`: which of its token's
// positions each pair turns by, null where tokens have one.
int32_t ENTRY(funitel_turn)(Engine* engine, const float* frequencies, int32_t count, float amplitude,
                            int32_t is_interleaved, const int32_t* axes) {
    try {
        std::vector<int32_t> own(axes, axes + (axes == nullptr ? 0 : count));
        engine->add_turn({frequencies, frequencies + count}, amplitude, is_interleaved != 0, std::move(own));
        return static_cast<int32_t>(engine->turns.size()) - 1;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// Add a mixture of experts, its matrices being there, and return its index, or kNoMemory.
int32_t ENTRY(funitel_mixture)(Engine* engine, const funitel::Mixture* mixture) {
    try {
        engine->mixtures.push_back(*mixture);
        return static_cast<int32_t>(engine->mixtures.size()) - 1;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// Add up queries and keys of the steps to come, for each layer and KV head: keys of the first tokens of sequences
// [head_dim]; and of the other tokens keys [head_dim], their products with themselves [head_dim, head_dim], and those of
// queries. Null to stop.
void ENTRY(funitel_observe)(Engine* engine, double* target) { engine->observed = target; }

// Change keys before they become codes: see KeyFrame, of all layers one after the other. Maps lie input by input.
// Returns 0 or kNoMemory.
int32_t ENTRY(funitel_key_frames)(Engine* engine, const float* shifts, const float* first_shifts, const float* key_maps,
                                  const float* query_maps, int64_t num_shifts, int64_t num_maps) {
    try {
        engine->key_frames = {{shifts, shifts + num_shifts}, {first_shifts, first_shifts + num_shifts},
                              {key_maps, key_maps + num_maps}, {query_maps, query_maps + num_maps}};
        return 0;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// Bytes of a layer in a block of the pool, of the engine's kind of keys and values.
int64_t ENTRY(funitel_layer_bytes)(const Engine* engine) { return engine->layer_bytes(); }

// See Engine::bytes_read.
int64_t ENTRY(funitel_bytes_read)(const Engine* engine) { return engine->bytes_read(); }

void ENTRY(funitel_program)(Engine* engine, const funitel::Operation* operations, int32_t count) {
    engine->set_program(operations, count);
}

void ENTRY(funitel_join)(Engine* engine, funitel::Ranks* ranks) { engine->ranks = ranks; }

// See Engine::run.
int32_t ENTRY(funitel_run)(Engine* engine, const funitel::Batch* batch, int32_t at) {
    try {
        return engine->run(*batch, at);
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

// See scores.h. `bits`: a pointer for each row, null where everything is allowed.
void ENTRY(funitel_allow_scores)(Engine* engine, float* scores, int32_t num_rows, int32_t count,
                                 const uint32_t* const* bits) {
    engine->allow(scores, num_rows, count, bits);
}

// Returns 0 or kNoMemory.
int32_t ENTRY(funitel_warp_scores)(Engine* engine, float* scores, const int64_t* rows, int32_t num_rows, int32_t count,
                                   const funitel::Warp* warps) {
    try {
        engine->warp(scores, rows, num_rows, count, warps);
        return 0;
    } catch (const std::bad_alloc&) {
        return funitel::kNoMemory;
    }
}

void ENTRY(funitel_best_scores)(Engine* engine, const float* scores, int32_t num_rows, int32_t count, int64_t* tokens,
                                float* normalisers) {
    engine->best(scores, num_rows, count, tokens, normalisers);
}

void ENTRY(funitel_likeliest)(Engine* engine, float* scores, int32_t num_rows, int32_t count, int32_t* tokens,
                              float* logprobs) {
    engine->likeliest(scores, num_rows, count, tokens, logprobs);
}

void ENTRY(funitel_draw_scores)(Engine* engine, const float* scores, const int64_t* rows, int32_t num_rows,
                                int32_t count, const uint64_t* keys, int64_t* tokens) {
    engine->draw(scores, rows, num_rows, count, keys, tokens);
}

}  // extern "C"
