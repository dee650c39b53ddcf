// How the operating system backs large arrays: zeros that take memory only where they are written, and huge pages.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

void clear(char* start, size_t size) {
  const uintptr_t page = sysconf(_SC_PAGESIZE), address = reinterpret_cast<uintptr_t>(start);
  char* const first = start + (page - address % page) % page;
  char* const last = start + size - (address + size) % page;
#if defined(__linux__)
  // Pages of private memory that are given back read as zeros, and come back one by one as they are written.
  if (first < last && madvise(first, last - first, MADV_DONTNEED) == 0) {
    std::memset(start, 0, first - start);
    std::memset(last, 0, start + size - last);
    return;
  }
#endif
  std::memset(start, 0, size);
}

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> result) {
  clear(static_cast<char*>(result->untyped_data()), result->size_bytes());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxpagedZeros, zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

// Moves [address, address + size) to huge pages, as far as that goes; what it holds stays.
extern "C" void jaxpaged_prefer_huge_pages([[maybe_unused]] uintptr_t address, [[maybe_unused]] size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE: now, not some time later; older kernels refuse it
  const uintptr_t first = (address + kHugePage - 1) / kHugePage * kHugePage, last = (address + size) / kHugePage * kHugePage;
  for (uintptr_t page = first; page < last; page += kHugePage) {
    madvise(reinterpret_cast<void*>(page), kHugePage, MADV_HUGEPAGE);
    madvise(reinterpret_cast<void*>(page), kHugePage, kCollapse);
  }
#endif
}
