// Scratch memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace rs {

class Workspace {
 public:
  // At least num_floats floats, aligned to a cache line; contents are undefined. Earlier pointers become invalid.
  float* floats(int64_t num_floats) {
    if (num_floats > capacity_) {
      std::free(memory_);
      capacity_ = 0;
      const size_t bytes = ((size_t)num_floats * sizeof(float) + 63) / 64 * 64;
      memory_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (memory_ == nullptr) throw std::bad_alloc();
      capacity_ = num_floats;
    }
    return memory_;
  }
  ~Workspace() { std::free(memory_); }

 private:
  float* memory_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace rs
