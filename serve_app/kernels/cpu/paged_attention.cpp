// Paged attention as one call per layer, and the K/V write before it; plain C ABI.
#include "paged_attention.h"

namespace {

template <class T>
int run(const Args& a) {
    static thread_local Attention<T> attention;
    if (int error = attention.prepare(a, (int)a.threads, false)) return error;
    const int threads = attention.threads();
#ifdef _OPENMP
    if (threads > 1) {
        Attention<T>* shared = &attention;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
        for (int thread = 0; thread < threads; thread++) shared->work(a, thread);
    } else
#endif
        attention.work(a, 0);
    attention.merge(a);
    return 0;
}

}  // namespace

// Returns 0; 2 for lengths that contradict each other, 3 for a block id outside the cache.
extern "C" int paged_attention(const Args* args) { return args->is_bf16 ? run<bf16>(*args) : run<float>(*args); }

struct WriteArgs {
    char *kv;
    const char *k, *v;
    const int64_t* slots;
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;  // bytes
    int64_t tokens, kv_heads, row_bytes, num_blocks;
};

// Copies K/V rows of new tokens to their slots. Returns 3 for a slot outside the cache (nothing is written then).
extern "C" int write_kv(const WriteArgs* a) {
    for (int64_t t = 0; t < a->tokens; t++)
        if (a->slots[t] < 0 || a->slots[t] >= a->num_blocks * BLOCK) return 3;
    const int64_t plane = a->num_blocks * a->kv_heads * BLOCK * a->row_bytes;
    for (int64_t t = 0; t < a->tokens; t++) {
        const int64_t block = a->slots[t] / BLOCK, offset = a->slots[t] % BLOCK;
        for (int64_t h = 0; h < a->kv_heads; h++) {
            char* to = a->kv + ((block * a->kv_heads + h) * BLOCK + offset) * a->row_bytes;
            std::memcpy(to, a->k + t * a->k_token_stride + h * a->k_head_stride, a->row_bytes);
            std::memcpy(to + plane, a->v + t * a->v_token_stride + h * a->v_head_stride, a->row_bytes);
        }
    }
    return 0;
}
