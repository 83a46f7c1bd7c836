// Forbidden tokens' logits become minus infinity, by bits. Plain C ABI.
#include "simd.h"

namespace {
using namespace simd;

struct Args {  // mirrored by serve_app/kernels/library/native.py
    float* logits;         // [rows of any number, vocab]
    const int64_t* rows;   // [count]: which of them
    const uint32_t* bits;  // [count, words], lowest token first; a zero forbids
    int64_t count, vocab, words, threads;
};

constexpr int64_t WORD = 32;

void forbid(float* logits, const uint32_t* bits, int64_t vocab) {
    vuint lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const vfloat never = splat(-INFINITY);
    const int64_t whole = vocab / WORD * WORD;
    for (int64_t token = 0; token < whole; token += WORD) {
        const uint32_t word = bits[token / WORD];
        if (word == ~0u) continue;
        for (int i = 0; i < WORD; i += LANES) {
            float* at = logits + token + i;
            const vuint allowed = ((word >> i) >> lane) & 1u;
            store(at, allowed != 0u ? load(at) : never);
        }
    }
    for (int64_t token = whole; token < vocab; token++)
        if (!(bits[token / WORD] >> (token % WORD) & 1u)) logits[token] = -INFINITY;
}

}  // namespace

// Returns 4 where there are fewer bits than tokens.
extern "C" int mask_logits(const Args* args) {
    const Args& a = *args;
    if (a.words * WORD < a.vocab) return 4;
    const int threads = a.count * a.vocab > 1 << 18 ? (int)a.threads : 1;  // less is done before others have woken up
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < a.count; i++) forbid(a.logits + a.rows[i] * a.vocab, a.bits + i * a.words, a.vocab);
    return 0;
}
