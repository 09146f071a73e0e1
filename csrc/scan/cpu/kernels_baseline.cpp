// The kernels for any processor of the architecture that is compiled for.
#include "../half.h"
#include "kernels.h"

#define OF_DOUBLES 2
#define OF_VECTOR_BYTES 64  // four chains of each extreme, where an instruction takes one each
#define OF_ISA baseline
#define OF_KERNELS kBaselineKernels
#include "kernels.inc"
