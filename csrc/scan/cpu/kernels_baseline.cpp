// The kernels for any processor of the architecture that is compiled for.
#include "../half.h"
#include "kernels.h"

#define OF_DOUBLES 2
#define OF_ISA baseline
#define OF_KERNELS kBaselineKernels
#include "kernels.inc"
