// What CUDA C++ has beyond C++, for one fiber per CUDA thread: `fibers.cpp` runs them.
//
// A generated file includes this, then a kernel file inside an anonymous namespace, and exports a launcher for each
// template instance.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
// CUDA's own spelling, which kernels may not use: what it declares could be neither filled nor guarded here.
#define __shared__ static_assert(false, "write SHARED(type, name, count) or DYNAMIC_SHARED(type, name)");

struct dim3 {
  unsigned x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};

// One CUDA thread, as kernels see it.
struct FiberThread {
  dim3 thread, block, block_size, grid_size;
  int lane, warp;
};

extern "C" {
FiberThread* fiber_self();
void fiber_sync_block();
// Waits for all lanes of the mask; each one's bits are then at its place of the result.
const std::uint64_t* fiber_exchange(unsigned mask, const char* what, std::uint64_t bits);
void fiber_sync_warp(unsigned mask);
void* fiber_dynamic_shared(std::size_t alignment);
// Memory that a block's threads share: for each key its own, exactly as large, all bits set.
void* fiber_static_shared(const void* key, std::size_t size);
void fiber_fail(const char* message);
using FiberBody = void (*)(void** arguments);
// At most `bound` threads a block: what the kernel was promised.
const char* fiber_launch(FiberBody body, void** arguments, const unsigned* grid, const unsigned* block,
                         std::size_t shared, std::size_t bound);
}

#define threadIdx (fiber_self()->thread)
#define blockIdx (fiber_self()->block)
#define blockDim (fiber_self()->block_size)
#define gridDim (fiber_self()->grid_size)
#define warpSize 32

#define SHARED(type, name, count)     \
  static char name##_key;             \
  type* name = static_cast<type*>(fiber_static_shared(&name##_key, sizeof(type) * (count)))
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(fiber_dynamic_shared(alignof(type)))

inline void __syncthreads() { fiber_sync_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { fiber_sync_warp(mask); }

template <class T>
T fiber_gathered(unsigned mask, const char* what, T value, int source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const std::uint64_t* all = fiber_exchange(mask, what, bits);
  if (!(mask >> source & 1u)) fiber_fail("a shuffle reads from a lane that its mask does not name");
  T result;
  std::memcpy(&result, &all[source], sizeof(T));
  return result;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  int lane = fiber_self()->lane;
  return fiber_gathered(mask, "__shfl_sync", value, (lane & ~(width - 1)) + (source & (width - 1)));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = fiber_self()->lane, within = lane & (width - 1);
  return fiber_gathered(mask, "__shfl_down_sync", value, within + static_cast<int>(delta) < width ? lane + delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  int lane = fiber_self()->lane, other = lane ^ flip;
  bool inside = (other & ~(width - 1)) <= (lane & ~(width - 1));
  return fiber_gathered(mask, "__shfl_xor_sync", value, inside ? other : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t* all = fiber_exchange(mask, "__ballot_sync", predicate != 0);
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1u && all[lane]) result |= 1u << lane;
  return result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __syncthreads_or(int predicate) {
  static char key;
  int* vote = static_cast<int*>(fiber_static_shared(&key, sizeof(int)));
  bool first = fiber_self()->warp == 0 && fiber_self()->lane == 0;
  if (first) *vote = 0;
  __syncthreads();
  if (predicate) __atomic_fetch_or(vote, 1, __ATOMIC_RELAXED);
  __syncthreads();
  int found = __atomic_load_n(vote, __ATOMIC_RELAXED);
  __syncthreads();
  return found;
}
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

// Fibers take turns only where they wait: a read, an addition and a write are one. ThreadSanitizer is told so.
template <class T>
T atomicAdd(T* place, T value) {
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicExch(T* place, T value) {
  return __atomic_exchange_n(place, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMin(T* place, T value) {
  T before = __atomic_load_n(place, __ATOMIC_RELAXED);
  if (value < before) __atomic_store_n(place, value, __ATOMIC_RELAXED);
  return before;
}
template <class T>
T __ldg(const T* place) {
  return *place;
}

inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return y > 0x1p126f ? 0.0f : x / y; }
using std::copysign;
using std::cos;
using std::exp;
using std::fabs;
using std::fma;
using std::isfinite;
using std::log;
using std::pow;
using std::sin;
using std::sqrt;
using std::tan;
using std::tanh;
// Not those of <algorithm>, half of what a small file of kernels takes to compile.
template <class T>
constexpr const T& max(const T& one, const T& other) {
  return one < other ? other : one;
}
template <class T>
constexpr const T& min(const T& one, const T& other) {
  return other < one ? other : one;
}

template <class... Parameters, std::size_t... Place>
void fiber_call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Place...>) {
  kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[Place])...);
}
template <class... Parameters>
void fiber_call(void (*kernel)(Parameters...), void** arguments) {
  fiber_call(kernel, arguments, std::index_sequence_for<Parameters...>());
}
// `bound_number` is the block's largest size.
#define FIBER_LAUNCHER(number, ...)                                                                           \
  extern "C" __attribute__((visibility("default"))) const char* launch_##number(                              \
      void** arguments, const unsigned* grid, const unsigned* block, std::size_t shared) {                    \
    return fiber_launch([](void** given) { fiber_call(&__VA_ARGS__, given); }, arguments, grid, block, shared, \
                        bound_##number);                                                                      \
  }
