"""Scalar operators in CUDA C++: how values are held, literals, and the device functions that C++ lacks (`HELPERS`).

A 16-bit float is held in a register as the float32 of the same value and rounded after every operator; in memory it is its 16 bits.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from tcomp.ir.dtypes import NARROW, is_float

REGISTER = {
    "float16": "float", "bfloat16": "float", "float32": "float", "float64": "double", "bool": "bool",
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int", "uint64": "unsigned long long",
    **dict.fromkeys(NARROW, "unsigned char"),
}  # fmt: skip
MEMORY = {**REGISTER, "float16": "unsigned short", "bfloat16": "unsigned short", "bool": "unsigned char"}
HALF = {"float16": "half", "bfloat16": "bfloat"}  # the names that their helpers bear


def literal(value: Any, dtype: str) -> str:
    """A constant as C++ text."""
    if dtype == "bool":
        return "true" if value else "false"
    if not is_float(dtype):
        whole, kind = int(value), REGISTER[dtype]
        suffix = {"long long": "LL", "unsigned long long": "ULL", "unsigned int": "u"}.get(kind, "")
        if whole >= 0:
            return f"{whole}{suffix}"
        least = whole == -1 << 31 or whole == -1 << 63  # its magnitude is not a literal of the type
        return f"(-{-whole - 1}{suffix} - 1)" if least else f"(-{-whole}{suffix})"
    number, single = float(value), dtype != "float64"
    if not math.isfinite(number):
        bits = int.from_bytes(struct.pack("<f" if single else "<d", number), "little")
        return f"bits<float>({bits:#010x}u)" if single else f"bits<double>({bits:#018x}ULL)"
    if single and abs(number) < 3.5e38:
        number = struct.unpack("<f", struct.pack("<f", number))[0]
    text = f"{number:.9g}" if single else f"{number:.17g}"
    text += ("" if any(c in text for c in ".en") else ".0") + ("f" if single else "")
    return f"({text})" if number < 0 else text


HELPERS = {
    "bits": """template <class T, class S> __device__ __forceinline__ T bits(S source) {  // the same bits as another type
  T result;
  memcpy(&result, &source, sizeof result);
  return result;
}""",
    "checked": """// i; where not 0 <= i < n, the first thread that finds it reports the index given, for the call of this number
__device__ __forceinline__ long long checked(long long i, long long n, long long given, unsigned long long* report, long long call) {
  if ((unsigned long long)i >= (unsigned long long)n && atomicCAS(report, 0ULL, (unsigned long long)call + 1) == 0) {
    report[1] = given;
    report[2] = n;
  }
  return i;
}""",
    "Vector": """template <class T, int N> struct alignas(sizeof(T) * N) Vector {  // moved by one instruction
  T v[N];
};""",
    "start_copy": """// N bytes from global to shared memory, in the background; of fewer, zeros are the rest
template <int N> __device__ __forceinline__ void start_copy(void* target, const void* source, int size = N) {
  const unsigned int to = (unsigned int)__cvta_generic_to_shared(target);
  const unsigned long long from = __cvta_generic_to_global(source);
  if (N == 16) {  // past the first-level cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(to), "l"(from), "n"(N), "r"(size) : "memory");
  }
}""",
    "complete_group": """__device__ __forceinline__ void complete_group() {  // of the copies that this thread has started
  asm volatile("cp.async.commit_group;" ::: "memory");
}""",
    "wait_for_copies": """// until all groups of this thread but the last N have arrived
template <int N> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}""",
    "publish": """// what this thread has done with shared memory, to those that use it past ordinary accesses: tensor cores
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }""",
    "begin_products": """// the registers of the sums are written
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }""",
    "complete_products": """__device__ __forceinline__ void complete_products() {  // the group that this thread has started
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}""",
    "finish_products": """// until the products that this thread has started are added
__device__ __forceinline__ void finish_products() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}""",
    "settle": """// accesses to registers are not moved across this
template <int N> __device__ __forceinline__ void settle(float (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+f"(x[n]) :: "memory");
}
template <int N> __device__ __forceinline__ void settle(int (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+r"(x[n]) :: "memory");
}""",
    "swizzled": """// where element i of rows of N pieces of 16 bytes lies for tensor cores: pieces are exchanged by the number of the 128 bytes they are in
template <int N, int BYTES> __device__ __forceinline__ int swizzled(int i) { return i ^ i / (128 / BYTES) % N * (16 / BYTES); }""",
    "matrix": """// the descriptor of a matrix in shared memory whose rows are N swizzled pieces of 16 bytes
template <int N> __device__ __forceinline__ unsigned long long matrix(const void* start) {
  const unsigned long long at = (unsigned int)__cvta_generic_to_shared(start), mode = N == 8 ? 1 : N == 4 ? 2 : 3;
  return (at & 0x3ffff) >> 4 | 1ull << 16 | 8ull * N << 32 | mode << 62;
}""",
    "minimum": """template <class T> __device__ __forceinline__ T minimum(T a, T b) {  // NaN if either is
  return a <= b || a != a ? a : b;
}""",
    "maximum": """template <class T> __device__ __forceinline__ T maximum(T a, T b) {  // NaN if either is
  return a >= b || a != a ? a : b;
}""",
    "floor_div": """template <class T> __device__ __forceinline__ T floor_div(T a, T b) {  // rounded down; 0 where b is 0
  if (b == 0) return 0;
  if (T(-1) < T(0) && b == T(-1)) return T(0ull - (unsigned long long)a);
  return T(a / b - (a % b != 0 && (a < 0) != (b < 0)));
}""",
    "floor_mod": """template <class T> __device__ __forceinline__ T floor_mod(T a, T b) {  // has the sign of b; 0 where b is 0
  if (b == 0 || (T(-1) < T(0) && b == T(-1))) return 0;
  const T r = T(a % b);
  return r != 0 && (r < 0) != (b < 0) ? T(r + b) : r;
}""",
    "trunc_div": """template <class T> __device__ __forceinline__ T trunc_div(T a, T b) {  // 0 where b is 0
  if (b == 0) return 0;
  return T(-1) < T(0) && b == T(-1) ? T(0ull - (unsigned long long)a) : T(a / b);
}""",
    "trunc_mod": """template <class T> __device__ __forceinline__ T trunc_mod(T a, T b) {  // 0 where b is 0
  return b == 0 || (T(-1) < T(0) && b == T(-1)) ? T(0) : T(a % b);
}""",
    "float_mod": """template <class T> __device__ __forceinline__ T float_mod(T a, T b) {  // has the sign of b
  T r = T(fmod(a, b));
  if (b == 0) return r;
  return r == 0 ? T(copysign(T(0), b)) : (r < 0) != (b < 0) ? r + b : r;
}""",
    "float_floor_div": """template <class T> __device__ __forceinline__ T float_floor_div(T a, T b) {
  if (b == 0) return a / b;
  const T r = T(fmod(a, b));
  T q = (a - r) / b;
  if (r != 0 && (b < 0) != (r < 0)) q -= T(1);
  if (q == 0) return T(copysign(T(0), a / b));
  const T whole = T(floor(q));
  return q - whole > T(0.5) ? whole + T(1) : whole;
}""",
    "power": """template <class T> __device__ __forceinline__ T power(T x, T n) {  // wraps around; x ** -n truncates
  if (n < 0) return x == T(1) ? T(1) : x == T(-1) ? (n & 1 ? x : T(1)) : T(0);
  unsigned long long result = 1, square = (unsigned long long)x;
  for (unsigned long long rest = (unsigned long long)n; rest; rest >>= 1, square *= square)
    if (rest & 1) result *= square;
  return T(result);
}""",
    "shift_left": """template <class T> __device__ __forceinline__ T shift_left(T a, T b) {
  return b < 0 || b >= T(8 * sizeof(T)) ? T(0) : T((unsigned long long)a << b);
}""",
    "shift_right": """template <class T> __device__ __forceinline__ T shift_right(T a, T b) {
  return b < 0 || b >= T(8 * sizeof(T)) ? T(a < 0 ? -1 : 0) : T(a >> b);
}""",
    "saturate": """template <class I, class F> __device__ __forceinline__ I saturate(F x, I least, I most) {  // towards zero; NaN gives 0
  return x != x ? I(0) : x <= F(least) ? least : x >= F(most) ? most : I(x);
}""",
    "odd": """__device__ __forceinline__ float odd(double x) {  // inexact results made odd: rounding again is then right
  const float near = (float)x;
  const unsigned int down = fabs(x) < fabs((double)near) ? 1u : 0u;
  return bits<float>((bits<unsigned int>(near) - down) | ((double)near != x ? 1u : 0u));
}""",
    "load_half": """__device__ __forceinline__ float load_half(unsigned short x) {
  const unsigned int size = (x & 0x7fffu) << 13, scaled = bits<unsigned int>(bits<float>(size) * bits<float>(0x77800000u));
  return bits<float>((size < 0x0f800000u ? scaled : scaled | 0x7f800000u) | (x & 0x8000u) << 16);
}""",
    "store_half": """__device__ __forceinline__ unsigned short store_half(float x) {  // to nearest, ties to even
  const unsigned int all = bits<unsigned int>(x), size = all & 0x7fffffffu;
  const unsigned int small = bits<unsigned int>(bits<float>(size) + 0.5f) - 0x3f000000u;
  const unsigned int normal = (size + ((size >> 13 & 1u) + 0xc8000fffu)) >> 13;
  const unsigned int special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return (unsigned short)((size < 0x38800000u ? small : size < 0x47800000u ? normal : special) | (all >> 16 & 0x8000u));
}""",
    "half": """__device__ __forceinline__ float half(float x) {  // rounded to float16
  return load_half(store_half(x));
}""",
    "load_bfloat": """__device__ __forceinline__ float load_bfloat(unsigned short x) {
  return bits<float>((unsigned int)x << 16);
}""",
    "store_bfloat": """__device__ __forceinline__ unsigned short store_bfloat(float x) {  // to nearest, ties to even
  const unsigned int all = bits<unsigned int>(x);
  return (unsigned short)(x != x ? all >> 16 | 0x40u : (all + ((all >> 16 & 1u) + 0x7fffu)) >> 16);
}""",
    "bfloat": """__device__ __forceinline__ float bfloat(float x) {  // rounded to bfloat16
  return load_bfloat(store_bfloat(x));
}""",
}
_NEEDS = {
    "odd": ("bits",), "load_half": ("bits",), "store_half": ("bits",), "half": ("bits", "load_half", "store_half"),
    "load_bfloat": ("bits",), "store_bfloat": ("bits",), "bfloat": ("bits", "load_bfloat", "store_bfloat"),
}  # fmt: skip


def helper_texts(used: set[str]) -> list[str]:
    """The definitions of the helpers used and of those they use, in order."""
    wanted = used | {need for name in used for need in _NEEDS.get(name, ())}
    return [text for name, text in HELPERS.items() if name in wanted]
