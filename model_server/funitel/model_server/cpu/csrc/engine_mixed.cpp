// Products with formats of mixed bit widths.
#include "block_kernels.h"

namespace funitel {

FUNITEL_MIXED(FUNITEL_COMPILE)

}  // namespace funitel
