// RMS normalisation of rows, rounding where transformers' modules round, plain C ABI.
#include "simd.h"

namespace {
using namespace simd;

struct Args {  // mirrored by serve_app/kernels/native.py
    const void* x;
    const float* weight;  // [dim], already 1 + w for the variants that add one
    void* out;
    int64_t rows, dim, row_stride;  // stride in elements
    int64_t threads, is_bf16, round_first;   // round_first: x / rms is rounded to the row's type before the weight is applied
    double eps;
};

template <class T>
void run(const Args& a) {
    const int64_t dim = a.dim;
    const int threads = a.rows * dim > 1 << 16 ? (int)a.threads : 1;  // less is done before others have woken up
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < a.rows; r++) {
        const T* x = (const T*)a.x + r * a.row_stride;
        T* out = (T*)a.out + r * dim;
        vfloat squares[2] = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            const vfloat v = load(x + d);
            squares[d / LANES % 2] += v * v;
        }
        const float scale = 1.f / std::sqrt(hsum(squares[0] + squares[1]) / (float)dim + (float)a.eps);
        for (int64_t d = 0; d < dim; d += LANES) {
            vfloat v = load(x + d) * scale;
            if (a.round_first && sizeof(T) == 2) {
                store(out + d, v);
                v = load(out + d);
            }
            store(out + d, v * load(a.weight + d));
        }
    }
}

}  // namespace

// `dim` must be a multiple of 16.
extern "C" int rms_norm(const Args* args) {
    if (args->is_bf16)
        run<bf16>(*args);
    else
        run<float>(*args);
    return 0;
}
