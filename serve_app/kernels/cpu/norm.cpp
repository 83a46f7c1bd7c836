// RMS normalisation of rows, plain C ABI.
#include "norm.h"

namespace {

struct Args {  // mirrored by serve_app/kernels/library/native.py
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
    for (int64_t r = 0; r < a.rows; r++)
        rms_norm_row((const T*)a.x + r * a.row_stride, a.weight, (T*)a.out + r * dim, dim, a.eps, a.round_first);
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
