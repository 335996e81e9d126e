// Products with groups with 16-bit scales and zeros.
#include "block_kernels.h"

namespace funitel {

FUNITEL_GROUPED(FUNITEL_COMPILE)

}  // namespace funitel
