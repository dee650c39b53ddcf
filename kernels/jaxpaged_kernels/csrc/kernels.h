// The kernels, in one version for each instruction set; `kernels()` gives the best that this processor can run.
#pragma once

#include "attention_args.h"
#include "linear_args.h"

namespace jaxpaged {

struct Kernels {
  const char* isa;
  void (*linear)(const LinearArgs&);
  void (*attention)(const AttentionArgs&);
  void (*rotate_and_write)(const RotateAndWriteArgs&);
};

const Kernels& kernels();

}  // namespace jaxpaged
