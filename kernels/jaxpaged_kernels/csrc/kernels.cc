#include "kernels.h"

#include <atomic>
#include <cstring>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxpaged {

#define JAXPAGED_DECLARE(isa) \
  namespace isa {             \
  extern const Kernels kKernels; \
  }
JAXPAGED_DECLARE(generic)
#if defined(__x86_64__)
JAXPAGED_DECLARE(avx2)
JAXPAGED_DECLARE(avx512)
JAXPAGED_DECLARE(avx512_vnni)
JAXPAGED_DECLARE(avx512_bf16)
#endif
#undef JAXPAGED_DECLARE

namespace {

// What this processor can run, best last.
std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found = {&generic::kKernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return found;
  found.push_back(&avx2::kKernels);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl")) {
    return found;
  }
  found.push_back(&avx512::kKernels);
  if (!__builtin_cpu_supports("avx512vnni")) return found;
  found.push_back(&avx512_vnni::kKernels);
  if (__builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16::kKernels);
#endif
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> chosen = runnable().back();
  return chosen;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace jaxpaged

extern "C" {

// What the library was built from: XLA's interface, and the version of ours (native.py), which changes with any handler's
// arguments.
int jaxpaged_xla_api_major() { return XLA_FFI_API_MAJOR; }
int jaxpaged_xla_api_minor() { return XLA_FFI_API_MINOR; }
int jaxpaged_interface() { return 2; }

// The instruction set of the kernels that run.
const char* jaxpaged_instruction_set() { return jaxpaged::kernels().isa; }

// Has those for `isa` run instead, if this processor can run them; whether it can.
bool jaxpaged_use_instruction_set(const char* isa) {
  for (const jaxpaged::Kernels* kernels : jaxpaged::runnable()) {
    if (std::strcmp(kernels->isa, isa) == 0) {
      jaxpaged::chosen().store(kernels);
      return true;
    }
  }
  return false;
}

}  // extern "C"
