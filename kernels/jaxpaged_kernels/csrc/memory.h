// Memory that a thread keeps from call to call, as large as its largest has needed. Not a std::vector: one that is compiled here
// for one instruction set could be linked into code for all.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "simd.h"

namespace jaxpaged::JAXPAGED_ISA {

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data_); }

  // `count` elements, aligned to a cache line, with anything in them.
  template <typename T>
  T* of(int64_t count) {
    const int64_t size = (count * static_cast<int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
    if (size > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(kLine, size);
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return static_cast<T*>(data_);
  }

 private:
  static constexpr int64_t kLine = 64;

  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace jaxpaged::JAXPAGED_ISA
