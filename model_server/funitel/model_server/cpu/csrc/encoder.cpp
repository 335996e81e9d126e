// The layers of an encoder such as BERT on AMX: what lies between one attention and the next is computed row by row, so a
// thread takes some rows through all of it. A library of its own, built for encoders on processors that have tiles.
#pragma GCC target("amx-tile,amx-bf16,avx512bf16")

#include <algorithm>
#include <new>
#include <vector>

#include "activations.h"
#include "entry.h"
#include "norms.h"
#include "threads.h"
#include "tiles.h"

namespace funitel {
namespace {

// Sizes of an encoder. Mirrored in Python.
struct EncoderShape {
    int32_t hidden_size, intermediate_size, num_layers, activation, num_threads;
    float eps;
};

// erf within 1.5e-7. Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
inline F16 erf(F16 x) {
    F16 one = splat(1.0f), size = magnitude(x);
    F16 t = div(one, fma(splat(0.3275911f), size, one));
    F16 p = fma(splat(1.061405429f), t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = mul(fma(p, t, splat(0.254829592f)), t);
    F16 value = sub(one, mul(p, exp(mul(splat(-1.0f), mul(x, x)))));
    const __m512 sign = _mm512_and_ps(x.v, _mm512_set1_ps(-0.0f));
    return {_mm512_or_ps(value.v, sign)};
}

inline F16 activated(Activation activation, F16 x) {
    if (activation != kGelu) return activate(activation, x);
    F16 half = mul(splat(0.5f), x);
    return fma(half, erf(mul(x, splat(0.7071067811865476f))), half);
}

enum Dense { kQkv, kOut, kUp, kDown };

struct Layer {
    TileMatrix dense[4];
    std::vector<float> norm_weights[2], norm_biases[2];  // behind attention, behind the MLP
};

// What one thread works in.
struct Workplace {
    TileRows rows, hidden;
    Memory sums;  // [rows, hidden_size]
};

struct Task {
    int layer;  // with its attention done; -1: none, the first is to begin
    int num_tokens, chunk_rows;
    const float* attended;
    float* x;
    float* qkv;
};

class Encoder {
  public:
    explicit Encoder(const EncoderShape& shape)
        : shape_(shape), layers_(shape.num_layers), threads_(shape.num_threads), places_(threads_.count()) {
        // A thread's rows, with what they become in the MLP, are to stay in its own cache.
        size_t row_bytes = size_t(shape.intermediate_size + 2 * shape.hidden_size) * sizeof(float);
        most_rows_ = static_cast<int>(std::clamp<size_t>(kCacheBytes / row_bytes, kSquare, 8 * kSquare)) / kSquare * kSquare;
    }

    bool reserve() {
        for (Workplace& place : places_) {
            if (!place.rows.reserve(most_rows_, shape_.hidden_size) ||
                !place.hidden.reserve(most_rows_, shape_.intermediate_size) ||
                !place.sums.grow(size_t(most_rows_) * shape_.hidden_size * sizeof(float))) {
                return false;
            }
        }
        return true;
    }

    bool take_dense(int layer, Dense which, const float* weights, const float* bias) {
        int hidden = shape_.hidden_size, inner = shape_.intermediate_size;
        int outputs = which == kQkv ? 3 * hidden : which == kUp ? inner : hidden;
        return layers_[layer].dense[which].take(outputs, which == kDown ? inner : hidden, weights, bias);
    }

    void take_norm(int layer, int which, const float* weights, const float* bias) {
        layers_[layer].norm_weights[which].assign(weights, weights + shape_.hidden_size);
        layers_[layer].norm_biases[which].assign(bias, bias + shape_.hidden_size);
    }

    // From what a layer attended to, to what the next one attends with. Rows of x change in place.
    void run(Task task) {
        threads_.begin_step();
        int shares = (task.num_tokens + most_rows_ - 1) / most_rows_;
        shares = (shares + threads_.count() - 1) / threads_.count() * threads_.count();
        int rows = (task.num_tokens + shares - 1) / shares;
        task.chunk_rows = (rows + kSquare - 1) / kSquare * kSquare;
        Job job{this, &task};
        threads_.run(&Encoder::work, &job, (task.num_tokens + task.chunk_rows - 1) / task.chunk_rows);
    }

  private:
    static constexpr size_t kCacheBytes = size_t(1400) << 10;  // of the 2 MiB that processors with tiles have

    struct Job {
        Encoder* encoder;
        const Task* task;
    };

    static void work(void* job, int chunk, int thread) {
        Job* mine = static_cast<Job*>(job);
        mine->encoder->take_part(*mine->task, chunk, mine->encoder->places_[thread]);
    }

    void take_part(const Task& task, int chunk, Workplace& place) {
        TileRegisters registers;
        registers.shape(kRegisterRows);
        const int first = chunk * task.chunk_rows, count = std::min(task.chunk_rows, task.num_tokens - first);
        const int size = shape_.hidden_size;
        float* x = task.x + size_t(first) * size;
        if (task.layer >= 0) finish(layers_[task.layer], task.attended + size_t(first) * size, x, count, place);
        if (task.layer + 1 == shape_.num_layers) return;
        lay_out(place.rows, x, count);
        const TileMatrix& matrix = layers_[task.layer + 1].dense[kQkv];
        float* qkv = task.qkv + size_t(first) * 3 * size;
        multiply(matrix, place.rows, padded(count), [&](int row, int output, F16 sums) {
            if (row < count) store(qkv + size_t(row) * 3 * size + output, add(sums, load(&matrix.bias[output])));
        });
    }

    // What follows a layer's attention.
    void finish(const Layer& layer, const float* attended, float* x, int count, Workplace& place) {
        const int size = shape_.hidden_size, rows = padded(count);
        float* sums = place.sums.as<float>();
        lay_out(place.rows, attended, count);
        add_up(layer.dense[kOut], place.rows, x, sums, count);
        for (int row = 0; row < count; row++) normalise(layer, 0, sums + size_t(row) * size);
        lay_out(place.rows, sums, count);
        const TileMatrix& up = layer.dense[kUp];
        const Activation activation = static_cast<Activation>(shape_.activation);
        multiply(up, place.rows, rows, [&](int row, int output, F16 found) {
            place.hidden.set(row, output, activated(activation, add(found, load(&up.bias[output]))));
        });
        add_up(layer.dense[kDown], place.hidden, sums, x, count);
        for (int row = 0; row < count; row++) normalise(layer, 1, x + size_t(row) * size);
    }

    // target = residual + what a matrix makes of rows, with its bias.
    void add_up(const TileMatrix& matrix, const TileRows& rows, const float* residual, float* target, int count) {
        const int size = shape_.hidden_size;
        multiply(matrix, rows, padded(count), [&](int row, int output, F16 sums) {
            size_t at = size_t(row) * size + output;
            if (row < count) store(target + at, add(add(sums, load(&matrix.bias[output])), load(residual + at)));
        });
    }

    void lay_out(TileRows& rows, const float* x, int count) {
        for (int row = 0; row < count; row++) rows.set_row(row, x + size_t(row) * shape_.hidden_size);
    }

    void normalise(const Layer& layer, int which, float* row) {
        const Norm norm{0, 0, 1, 0, 0, shape_.eps};
        funitel::normalise(norm, row, row, shape_.hidden_size, layer.norm_weights[which].data(),
                           layer.norm_biases[which].data());
    }

    static int padded(int count) { return (count + kSquare - 1) / kSquare * kSquare; }

    const EncoderShape shape_;
    std::vector<Layer> layers_;
    Threads threads_;
    std::vector<Workplace> places_;
    int most_rows_;
};

}  // namespace
}  // namespace funitel

using funitel::Encoder;

extern "C" {

// Null where the processor's tiles cannot be used, the sizes do not fit, or there is no memory.
void* ENTRY(funitel_encoder)(const void* shape) {
    const auto& given = *static_cast<const funitel::EncoderShape*>(shape);
    if (!funitel::TileMatrix::fits(given.hidden_size, given.intermediate_size) ||
        !funitel::TileMatrix::fits(given.intermediate_size, given.hidden_size) || !funitel::has_tile_registers()) {
        return nullptr;
    }
    Encoder* encoder = new (std::nothrow) Encoder(given);
    if (encoder != nullptr && !encoder->reserve()) {
        delete encoder;
        return nullptr;
    }
    return encoder;
}

void ENTRY(funitel_encoder_release)(void* encoder) { delete static_cast<Encoder*>(encoder); }

// Weights [outputs, inputs] and a bias of qkv, out, up or down; 0 without memory.
int32_t ENTRY(funitel_encoder_dense)(void* encoder, int32_t layer, int32_t which, const float* weights,
                                     const float* bias) {
    return static_cast<Encoder*>(encoder)->take_dense(layer, static_cast<funitel::Dense>(which), weights, bias);
}

void ENTRY(funitel_encoder_norm)(void* encoder, int32_t layer, int32_t which, const float* weights, const float* bias) {
    static_cast<Encoder*>(encoder)->take_norm(layer, which, weights, bias);
}

// Go on behind the attention of a layer; -1 for before the first.
void ENTRY(funitel_encoder_run)(void* encoder, int32_t layer, int32_t num_tokens, const float* attended, float* x,
                                float* qkv) {
    static_cast<Encoder*>(encoder)->run({layer, num_tokens, 0, attended, x, qkv});
}
}
