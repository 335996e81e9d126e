// The tile registers of AMX: eight matrices of up to sixteen rows of 64 bytes. Functions that use them are built for AMX
// within a build for less, and are to be called only where `has_tile_registers`.
#pragma once

#include <asm/prctl.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#define FUNITEL_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace funitel {

constexpr int kRegisterRows = 16;
constexpr int kRegisterStride = 64;  // bytes of a row
constexpr int kRegisterBytes = kRegisterRows * kRegisterStride;
constexpr int kRegisterInputs = kRegisterStride / sizeof(uint16_t);  // bfloat16 of a row

// Whether the processor has the registers, and the kernel gives them to this process, which is asked for them.
inline bool has_tile_registers() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool has = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                            syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return has;
}

// Have memory hold what was written before it is loaded into tiles: g++ does not know that the instructions read it.
inline void settle_memory() { asm volatile("" : : : "memory"); }

// The tile registers of this thread, to be shaped first; released when this ends: a thread without any is cheaper to switch.
class TileRegisters {
  public:
    TileRegisters() = default;
    FUNITEL_AMX ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;

    // Give registers 0 to 5, for sums and activations, so many rows, and 6 and 7, for weights, all; what they hold is lost.
    FUNITEL_AMX void shape(int num_rows) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, unused[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } all;
        for (int i = 0; i < 8; i++) {
            all.row_bytes[i] = kRegisterStride;
            all.rows[i] = static_cast<uint8_t>(i < 6 ? num_rows : kRegisterRows);
        }
        settle_memory();
        _tile_loadconfig(&all);
    }
};

}  // namespace funitel
