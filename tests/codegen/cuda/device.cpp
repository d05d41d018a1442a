// A device played by a CPU: threads that take turns at barriers, copies and products in the background. See cuda_host.py.
#include "device.h"
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <ucontext.h>
#include <vector>

dim3_ threadIdx, blockIdx;
struct Fiber { ucontext_t context; dim3_ place; bool done; };
static const size_t STACK = 1 << 18;  // bytes of a fiber's stack, of which it touches few
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Fiber *current;
static void (*job)();
static void enter() { job(); current->done = true; swapcontext(&current->context, &scheduler); }
void __syncthreads() { swapcontext(&current->context, &scheduler); threadIdx = current->place; }

// Copies of each thread from global to shared memory: those of the group that is not complete, and the groups not waited for.
struct Copy { char *to; const char *from; int bytes, size; };
struct Copies { std::vector<Copy> started; std::deque<std::vector<Copy>> groups; };
static std::map<int, Copies> copies;
static bool misaligned;
static char origin __attribute__((aligned(1024)));
static inline Copies &mine() { return copies[(threadIdx.z * 1024 + threadIdx.y) * 1024 + threadIdx.x]; }
static std::map<unsigned, const char *> places;  // what a descriptor says of an address -> the last one of which it was said
int __cvta_generic_to_shared(const void *p) {
  const int at = (int)((const char *)p - &origin);
  places[(at & 0x3ffff) >> 4] = (const char *)p - (at & 15);  // the lowest bits are lost
  return at;
}
void copy_later(unsigned to, unsigned long long from, int bytes, int size) {
  char *const place = &origin + (int)to;
  misaligned |= (unsigned long long)place % bytes || (size && from % bytes);
  memset(place, 0x7f, bytes);
  mine().started.push_back({place, (const char *)from, bytes, size});
}
void commit_copies() { Copies &c = mine(); c.groups.push_back(c.started); c.started.clear(); }
void wait_copies(size_t pending) {
  for (auto &groups = mine().groups; groups.size() > pending; groups.pop_front())
    for (const Copy &c : groups.front()) { memcpy(c.to, c.from, c.size); memset(c.to + c.size, 0, c.bytes - c.size); }
}

// A warp that is executed together: its threads leave their registers and read those of the others when all have. Written from the
// figures of the PTX ISA (mma.m16n8k8, .m16n8k16, .m16n8k32), not from the compiler's fragments.
struct Warp { unsigned a[32][4], b[32][2]; };
static Warp warps[32][32];
static inline float half_bits(unsigned x) {
  const int e = x >> 10 & 31, m = x & 1023;
  const float v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
  return x & 0x8000 ? -v : v;
}
static inline float word(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
template <class T> T warp_value(const char *op, unsigned x, int n) {  // element n of a register
  if (strstr(op, "tf32")) return (T)word(x & 0xffffe000u);
  if (strstr(op, "bf16")) return (T)word((x >> 16 * n) << 16);
  if (strstr(op, "f16")) return (T)half_bits(x >> 16 * n & 0xffff);
  return strstr(op, "u8") ? (T)(unsigned char)(x >> 8 * n) : (T)(signed char)(x >> 8 * n);
}
template <class T> void warp_mma(const char *op, T *d, const unsigned *a, const unsigned *b) {
  Warp &warp = warps[threadIdx.z][threadIdx.y];
  const int lane = threadIdx.x, per = strstr(op, "tf32") ? 1 : strstr(op, "s8") ? 4 : 2, k = 8 * per;
  for (int n = 0; n < 4; ++n) warp.a[lane][n] = a[n];
  for (int n = 0; n < 2; ++n) warp.b[lane][n] = b[n];
  __syncthreads();
  const T before[4] = {d[0], d[1], d[2], d[3]};
  for (int n = 0; n < 4; ++n) {
    const int row = n < 2 ? lane / 4 : lane / 4 + 8, column = lane % 4 * 2 + n % 2;
    T sum = before[n];
    for (int x = 0; x < k; ++x) {
      const int half = x / (k / 2), within = x % (k / 2);
      const int owner = within / per, slot = within % per;
      const unsigned left = warp.a[row % 8 * 4 + owner][(row >= 8) + 2 * half], right = warp.b[column * 4 + owner][half];
      sum += warp_value<T>(op, left, slot) * warp_value<T>(strstr(op, "s8") ? "s8" : op, right, slot);
    }
    d[n] = sum;
  }
  __syncthreads();
}

// A warpgroup that is executed together reads factors from shared memory, as descriptors say: written from the text of the PTX ISA on
// swizzled matrices (K-major), and its figure of the fragments of D. Each thread adds to its elements alone.
struct Product { std::function<void()> read, add; };
static std::map<int, std::vector<Product>> products;
static std::vector<Product> &my_products() { return products[(threadIdx.z * 1024 + threadIdx.y) * 1024 + threadIdx.x]; }
static bool late;
static const char *element(unsigned long long descriptor, int row, int k, int bytes) {
  const int mode = descriptor >> 62, size = mode == 1 ? 128 : mode == 2 ? 64 : 32, across = (descriptor >> 32 & 0x3fff) << 4;
  if (!mode) abort();
  const unsigned long long at = (unsigned long long)places.at(descriptor & 0x3fff) + row / 8 * across + row % 8 * size + k * bytes;
  return (const char *)(at ^ (at >> 7 & (size / 16 - 1)) << 4);
}
template <class T> T loaded_value(const char *op, const char *p, int bytes) {
  unsigned x = 0;
  memcpy(&x, p, bytes);
  return warp_value<T>(op, x, 0);
}
template <class T> void group_mma(const char *op, std::initializer_list<T *> list, unsigned long long a, unsigned long long b) {
  int n, depth;
  sscanf(strstr(op, ".m64n") + 5, "%dk%d", &n, &depth);
  const int bytes = 32 / depth, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::vector<T *> d(list);
  auto sums = std::make_shared<std::vector<T>>(d.size());
  if ((int)d.size() != n / 2) abort();
  Product product;
  product.read = [=] {
    for (int e = 0; e < n / 2; ++e) {
      const int row = 16 * warp + lane / 4 + 8 * (e % 4 / 2), column = 8 * (e / 4) + lane % 4 * 2 + e % 2;
      T sum = 0;
      for (int k = 0; k < depth; ++k)
        sum += loaded_value<T>(op, element(a, row, k, bytes), bytes) * loaded_value<T>(strstr(op, "s8") ? "s8" : op, element(b, column, k, bytes), bytes);
      (*sums)[e] = sum;
    }
  };
  product.add = [=] { for (int e = 0; e < n / 2; ++e) *d[e] += (*sums)[e]; };
  if (!late) product.read();
  my_products().push_back(product);
}
template void warp_mma(const char *, float *, const unsigned *, const unsigned *);
template void warp_mma(const char *, int *, const unsigned *, const unsigned *);
template void group_mma(const char *, std::initializer_list<float *>, unsigned long long, unsigned long long);
template void group_mma(const char *, std::initializer_list<int *>, unsigned long long, unsigned long long);
void wait_products() {
  for (const Product &p : my_products()) { if (late) p.read(); p.add(); }
  my_products().clear();
}

int run(bool barriers, bool descending, const int *grid, const int *block, void (*body)()) {
  job = body;
  const int threads = block[0] * block[1] * block[2];
  late = descending;
  misaligned = false;
  if (barriers && (int)fibers.size() < threads) fibers.resize(threads);
  std::unique_ptr<char[]> stacks(barriers ? new char[threads * STACK] : nullptr);  // not cleared: pages that nobody touches take no memory
  for (int n = 0; n < grid[0] * grid[1] * grid[2]; ++n) {
    copies.clear();
    blockIdx = {n % grid[0], n / grid[0] % grid[1], n / grid[0] / grid[1]};
    for (int m = 0; m < threads; ++m) {
      const int t = descending ? threads - 1 - m : m;
      const dim3_ place = {t % block[0], t / block[0] % block[1], t / block[0] / block[1]};
      if (!barriers) { threadIdx = place; job(); continue; }
      Fiber &f = fibers[t];
      f.place = place; f.done = false;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = &stacks[t * STACK]; f.context.uc_stack.ss_size = STACK; f.context.uc_link = nullptr;
      makecontext(&f.context, enter, 0);
    }
    for (bool some = barriers; some;) {
      int alive = 0;
      for (int m = 0; m < threads; ++m) {
        Fiber &f = fibers[descending ? threads - 1 - m : m];
        if (f.done) continue;
        current = &f; threadIdx = f.place;
        swapcontext(&scheduler, &f.context);
        alive += !f.done;
      }
      if (alive && alive < threads) return 1;  // some threads wait at a barrier that others never reach
      some = alive;
    }
  }
  return misaligned ? 2 : 0;
}
