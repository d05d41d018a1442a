// What the text of kernels asks of a device, as `device.cpp` plays it on a CPU.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
using std::memcpy;
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(n)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#pragma GCC visibility push(hidden)  // each kernel is linked with a device of its own, which it reads without indirection
struct dim3_ { int x, y, z; };
extern dim3_ threadIdx, blockIdx;
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
void __syncthreads();
static inline unsigned long long atomicCAS(unsigned long long *place, unsigned long long old, unsigned long long value) {
  const unsigned long long found = *place;  // threads take turns
  if (found == old) *place = value;
  return found;
}

int __cvta_generic_to_shared(const void *p);
static inline unsigned long long __cvta_generic_to_global(const void *p) { return (unsigned long long)p; }
void copy_later(unsigned to, unsigned long long from, int bytes, int size);
void commit_copies();
void wait_copies(size_t pending);

template <class T> void warp_mma(const char *op, T *d, const unsigned *a, const unsigned *b);
template <class T> void group_mma(const char *op, std::initializer_list<T *> d, unsigned long long a, unsigned long long b);
void wait_products();

// Runs the body once for every thread; 0, or what went wrong: see `launch` in cuda_host.py.
int run(bool barriers, bool descending, const int *grid, const int *block, void (*body)());
#pragma GCC visibility pop
