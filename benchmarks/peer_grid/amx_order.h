// Included in front of every source of a peer that is built from C++. g++ 12 does not know that AMX reads memory, and moves
// or drops stores before it: the tile registers of llama.cpp get no shape, and the first instruction ends it.
#if defined(__cplusplus) && defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

static inline __attribute__((always_inline)) void shape_tiles_in_order(const void* shapes) {
    __asm__ volatile("" : : : "memory");
    _tile_loadconfig(shapes);
}
#define _tile_loadconfig shape_tiles_in_order

#undef _tile_loadd
#define _tile_loadd(target, base, stride)             \
    do {                                              \
        __asm__ volatile("" : : : "memory");          \
        _tile_loadd_internal(target, base, stride);   \
    } while (0)
#endif
