// Fused loops, of which each level of dependence is a kernel: its loops share a launch by ranges of blocks.
//
// A thread computes a point, of which each store and each load is a place in a memory: a point's own ones are in `tables`,
// or are as far behind those of its run's first point as the point is steps behind that. Nothing that a launch stores is
// read in it.

// The last of `count` runs that begins at a point or before it.
template <typename Index>
__device__ __forceinline__ Index run_of(const Index* begins, Index count, Index point) {
  Index first = 0, last = count;
  while (last - first > 1) {
    Index middle = first + (last - first) / 2;
    if (begins[middle] <= point) {
      first = middle;
    } else {
      last = middle;
    }
  }
  return first;
}

#include "levels.cuh"
