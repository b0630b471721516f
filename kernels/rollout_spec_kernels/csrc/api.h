// The C interface's spelling, and how a flag becomes a type.
#pragma once

#include "simd.h"

#define RS_EXPORT extern "C" __attribute__((visibility("default")))

namespace rs {

constexpr int64_t kMaxHeadDim = 512;

// Calls body.template operator()<T>() with T = bf16 or float.
template <class Body>
inline void with_type(int is_bf16, Body&& body) {
  if (is_bf16)
    body.template operator()<bf16>();
  else
    body.template operator()<float>();
}

// Threads worth waking for this many element operations: below some 10 us of work a second thread costs more than it saves.
inline int threads_for(int64_t num_elements, int threads) { return num_elements < 32 * 1024 ? 1 : threads; }

}  // namespace rs
