// Products with the first quantised types of GGUF, of blocks of 32, and with int8.
#include "block_kernels.h"

namespace funitel {

FUNITEL_OLD_GGUF(FUNITEL_COMPILE)

}  // namespace funitel
