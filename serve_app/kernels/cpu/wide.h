// Products with weights that are multiplied as bfloat16, in whatever form they lie: as they are, in 12 bits or as floats of
// four.
#pragma once
#include "float4.h"

namespace {

#if HAS_BF16_DOT

inline bool is_wide(const Linear& l) { return l.bits >= 12 || l.bits == FLOAT4; }

inline int64_t panel_bytes(const Linear& l) {
    return l.bits == 16 ? PlainPanel::bytes(l) : l.bits == 12 ? CompactPanel::bytes(l) : float4_bytes(l.k);
}

// Where a panel begins.
inline const uint8_t* panel_at(const Linear& l, int panel) { return (const uint8_t*)l.weight + panel * panel_bytes(l); }

// panel_product of whichever they are.
template <class Write, class Beside = Nothing>
inline void wide_panel(const Linear& l, int number, const uint8_t* following, const bf16* x, int64_t rows, Write write,
                       Beside&& beside = Beside()) {
    const int count = (int)rows;
    const bool few = rows <= CompactPanel::ROWS;
    if (l.bits == 16)
        panel_product<PlainPanel>(l, number, following, x, l.k, count, write, beside);
    else if (l.bits == FLOAT4 && few)
        panel_product<Float4Panel>(l, number, following, x, l.k, count, write, beside);
    else if (l.bits == FLOAT4)
        panel_product<UnpackedFloat4Panel>(l, number, following, x, l.k, count, write, beside);
    else if (few)
        panel_product<CompactPanel>(l, number, following, x, l.k, count, write, beside);
    else
        panel_product<UnpackedPanel>(l, number, following, x, l.k, count, write, beside);
}

#endif

}  // namespace
