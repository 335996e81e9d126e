// Products with types of GGUF that have blocks of 256.
#include "block_kernels.h"

namespace funitel {

FUNITEL_K_QUANTS(FUNITEL_COMPILE)

}  // namespace funitel
