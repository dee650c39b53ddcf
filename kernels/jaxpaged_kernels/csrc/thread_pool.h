// The threads that all kernels of the process share.
#pragma once

#include <cstdint>

namespace jaxpaged {

using Task = void (*)(void* context, int64_t index);

// Calls task(context, i) for every i in [0, num_tasks), in any order and on any thread, the calling one included, and returns
// when all are done. A call made while another one is running does all its tasks itself.
void parallel_for(int64_t num_tasks, Task task, void* context);

template <typename F>
void parallel_for(int64_t num_tasks, const F& f) {
  parallel_for(
      num_tasks, [](void* context, int64_t index) { (*static_cast<const F*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// Threads that work on a call, the calling one included: the processors that this process may use.
int num_threads();

}  // namespace jaxpaged
