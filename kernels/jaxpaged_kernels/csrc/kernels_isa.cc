// Compiled once for each instruction set, with JAXPAGED_ISA naming it.
#include "kernels.h"

#include "attention_impl.h"
#include "linear_quantized.h"

#define JAXPAGED_STRING_(x) #x
#define JAXPAGED_STRING(x) JAXPAGED_STRING_(x)

namespace jaxpaged::JAXPAGED_ISA {

extern const Kernels kKernels;
const Kernels kKernels = {JAXPAGED_STRING(JAXPAGED_ISA), linear_of_any_format, attention, rotate_and_write};

}  // namespace jaxpaged::JAXPAGED_ISA
