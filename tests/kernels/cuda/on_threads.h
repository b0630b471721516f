// A CUDA block on CPU threads: enough of the language for block_team.h and verify.cu, compiled by g++ in tests.
//
// Blocks run one after another, a block's threads at the same time, so barriers, shared memory and races are real.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <barrier>
#include <thread>
#include <vector>

#define __CUDACC__
#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads, blocks)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline thread_local dim3 threadIdx, blockIdx;
inline std::barrier<>* block_barrier = nullptr;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }

typedef void* cudaStream_t;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

template <class Kernel>
void launch_on_threads(dim3 grid, int num_threads, Kernel kernel) {
  std::barrier<> barrier(num_threads);
  block_barrier = &barrier;
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t)
    threads.emplace_back([=, &barrier] {
      threadIdx = dim3((unsigned)t);
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = dim3(x, y);
          kernel();
          barrier.arrive_and_wait();
        }
    });
  for (std::thread& thread : threads) thread.join();
}

#define RS_LAUNCH(kernel, grid, threads, stream, ...) launch_on_threads(grid, threads, [=] { kernel(__VA_ARGS__); })
