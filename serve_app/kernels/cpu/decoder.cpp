// One forward pass of a standard decoder (Llama and its relatives) in bfloat16 as a single call, plain C ABI.
//
//   x = embedding;  per layer:  x += o(attend(rope(qkv(norm(x)))));  x += down(silu(gate) * up, of norm(x));  head(norm(x))
//
// One team of threads works through all of it with a barrier between operators; weights lie in memory in the order in
// which they are read, so a decode step is one long sequential read. Values are rounded to bfloat16 where transformers'
// modules round them; logits stay float32.
#include "decoder.h"

extern "C" int decoder_step(const StepArgs* args) {
#if HAS_BF16_DOT
    Step step(*args);
    if (const int error = step.prepare()) return error;
#ifdef _OPENMP
    if (args->threads > 1) {
        std::atomic<Team*> team{nullptr};
#pragma omp parallel num_threads((int)args->threads)
        {
#pragma omp single
            team = new Team(omp_get_num_threads());  // the runtime may grant fewer than were asked for
            step.run(*team.load(), omp_get_thread_num());
        }
        delete team.load();
        return 0;
    }
#endif
    Team alone(1);
    step.run(alone, 0);
    return 0;
#else
    return 9;
#endif
}

// Looks at weight rows [n, k] bf16 before pack_compact: per panel which exponents its codes stand for, and per panel and block
// how many values fit none of them. rows must be a multiple of 64 and k of 2.
extern "C" void survey_compact(const uint16_t* source, const int64_t* order, int64_t rows, int64_t k, int64_t threads,
                               uint8_t* bases, int32_t* counts) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t panel = 0; panel < rows / 64; panel++) {
        const PanelSource from{source, order + panel * 64, k};
        bases[panel] = (uint8_t)best_base(from);
        count_exceptions(from, bases[panel], counts + panel * compact_blocks(k));
    }
}

// Packs into compact.h's layout; `starts` [panels * blocks + 1] adds up the survey's counts.
extern "C" void pack_compact(const uint16_t* source, const int64_t* order, int64_t rows, int64_t k, int64_t threads,
                             const uint8_t* bases, const int32_t* starts, uint8_t* packed, uint8_t* tables, uint32_t* values) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t panel = 0; panel < rows / 64; panel++) {
        const PanelSource from{source, order + panel * 64, k};
        write_table(bases[panel], tables + panel * COMPACT_TABLE);
        pack_panel(from, bases[panel], packed + panel * (k / 2) * COMPACT_BYTES, values + starts[panel * compact_blocks(k)]);
    }
}

// Whether rows [rows, k] bf16 are what float4.h holds; k must be a multiple of 32.
extern "C" int fits_float4(const uint16_t* source, int64_t rows, int64_t k, int64_t threads) {
    std::atomic<bool> fits{true};
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t row = 0; row < rows; row++)
        if (fits && !is_float4(source + row * k, k)) fits = false;
    return fits;
}

// Packs such rows into float4.h's layout, as pack_panels does.
extern "C" void pack_float4(const uint16_t* source, uint8_t* packed, const int64_t* order, int64_t rows, int64_t k,
                            int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t panel = 0; panel < rows / 64; panel++)
        pack_float4_panel(PanelSource{source, order + panel * 64, k}, packed + panel * float4_bytes(k));
}

// Packs weight rows [n, k] bf16 into panels (gemm.h); row r of the result is row order[r] of the source, -1 for zeros.
// rows must be a multiple of 64 and k of 2.
extern "C" void pack_panels(const uint16_t* source, uint16_t* packed, const int64_t* order, int64_t rows, int64_t k,
                            int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t panel = 0; panel < rows / 64; panel++) {
        uint32_t* to = (uint32_t*)(packed + panel * 64 * k);
        for (int64_t low = 0; low < k; low += 64) {  // 64 columns of 64 rows fit the first-level cache
            const int64_t high = low + 64 < k ? low + 64 : k;
            for (int64_t r = 0; r < 64; r++) {
                const int64_t row = order[panel * 64 + r];
                for (int64_t c = low; c < high; c += 2) {
                    uint32_t pair = 0;
                    if (row >= 0) std::memcpy(&pair, source + row * k + c, 4);
                    to[c / 2 * 64 + r] = pair;
                }
            }
        }
    }
}
