// Linear recurrences over runs of consecutive steps: h_t = A_t h_{t-1} + b_t, and back v_t = g_t + (what came), of
// which A_t^T v_t goes on. `added` is b or g, `out` gets h or v; either may be left out. Where `shared`, all samples
// have the same A.
//
// Floors, for each step with n elements of w bytes: full matrices n^2 multiply-adds and n^2 w bytes, diagonals n and n
// w, a scaled matrix n^2 and n w (the matrix itself is read once by each block), sparse ones of z entries z and z w;
// and 2 n w of each for what is added and what comes out. Steps wait for one another: one or two barriers each. The
// floors of transfers are in runs.cuh; that of diagonals takes 2 n multiply-adds, and reads what the sweep does.
#include "runs.cuh"

// Of the matrix of a step: which, in a row of all.
__device__ __forceinline__ long long block_of(const Run& run, int time, bool shared) {
  return shared ? time : time * static_cast<long long>(run.batch) + run.sample;
}

// A block takes a run. Forward a warp takes a row at a time; back a group of threads takes some of the rows, a thread a
// column of these.
template <typename T, typename D>
__global__ void __launch_bounds__(512, 1)
    dense_sweep(const long long* __restrict__ sample, const long long* __restrict__ begin,
                const long long* __restrict__ count, int direction, int batch, int size, bool back,
                const D* __restrict__ blocks, bool shared, const D* __restrict__ added, const T* __restrict__ start,
                T* __restrict__ out, T* __restrict__ end) {
  SHARED(T, state, 2 * 512);
  SHARED(T, sums, 512);
  Run run = run_of(sample, begin, count, direction, nullptr, batch, back, blockIdx.x);
  int thread = threadIdx.x, width = (size + 31) / 32 * 32, groups = blockDim.x / width;
  int column = thread % width, group = thread / width, lane = thread % 32;
  const T* first = start + blockIdx.x * static_cast<long long>(size);
  T own = thread < size ? first[thread] : T(0);
  if (thread < size) state[thread] = own;
  __syncthreads();
  for (int i = 0; i < run.steps; ++i) {
    int time = run.time(i);
    long long row = static_cast<long long>(run.row_at(time)) * size;
    const D* a = blocks + block_of(run, time, shared) * size * size;
    T* fresh = state + (1 - (i & 1)) * 512;
    const T* held = state + (i & 1) * 512;
    if (back) {
      T* v = state;
      if (thread < size) {
        if (added) own += added[row + thread];
        v[thread] = own;
        if (out) out[row + thread] = own;
      }
      __syncthreads();
      T sum = T(0);
      if (column < size && group < groups) {
        for (int k = group; k < size; k += groups) sum += a[static_cast<long long>(k) * size + column] * v[k];
      }
      sums[thread] = sum;
      __syncthreads();
      if (thread < size) {
        own = T(0);
        for (int other = 0; other < groups; ++other) own += sums[other * width + thread];
      }
    } else {
      for (int j = thread / 32; j < size; j += blockDim.x / 32) {
        T sum = T(0);
        for (int k = lane; k < size; k += 32) sum += a[static_cast<long long>(j) * size + k] * held[k];
        for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
        if (!lane) fresh[j] = added ? sum + added[row + j] : sum;
      }
      __syncthreads();
      if (thread < size) {
        own = fresh[thread];
        if (out) out[row + thread] = own;
      }
    }
  }
  if (thread < size) end[blockIdx.x * static_cast<long long>(size) + thread] = own;
}

// A thread takes an element of a run.
template <typename T, typename D>
__global__ void __launch_bounds__(256, 1)
    diagonal_sweep(const long long* __restrict__ sample, const long long* __restrict__ begin,
                   const long long* __restrict__ count, int direction, int batch, long long runs, int size, bool back,
                   const D* __restrict__ d, bool shared, const D* __restrict__ added, const T* __restrict__ start,
                   T* __restrict__ out, T* __restrict__ end) {
  struct Read {
    T scale, comes;
  };
  long long place = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x, number = place / size;
  int j = place % size;
  if (number >= runs) return;
  Run run = run_of(sample, begin, count, direction, nullptr, batch, back, number);
  T own = start[place];
  go_through<8, Read>(
      run, -1,
      [&](int, long long row, int, Read& read) {
        read.scale = d[(shared ? static_cast<int>(row) / batch : row) * size + j];
        read.comes = added ? added[row * size + j] : T(0);
      },
      [&](int, long long row, const Read& read) {
        if (back) own += read.comes;
        if (back && out) out[row * size + j] = own;
        own *= read.scale;
        if (!back) own += read.comes;
        if (!back && out) out[row * size + j] = own;
      });
  end[place] = own;
}

// What a run does to a state, in float64: the products of its diagonals and, below, what becomes of zeros, (runs, 2,
// size). A thread takes an element of a run.
template <typename D>
__global__ void __launch_bounds__(256, 1)
    diagonal_transfer(const long long* __restrict__ sample, const long long* __restrict__ begin,
                      const long long* __restrict__ count, int direction, int batch, long long runs, int size,
                      bool back, const D* __restrict__ d, bool shared, const D* __restrict__ added,
                      double* __restrict__ out) {
  struct Read {
    double scale, comes;
  };
  long long place = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x, number = place / size;
  int j = place % size;
  if (number >= runs) return;
  Run run = run_of(sample, begin, count, direction, nullptr, batch, back, number);
  double product = 1, own = 0;
  go_through<8, Read>(
      run, -1,
      [&](int, long long row, int, Read& read) {
        read.scale = d[(shared ? static_cast<int>(row) / batch : row) * size + j];
        read.comes = added ? added[row * size + j] : D(0);
      },
      [&](int, long long, const Read& read) {
        own = back ? (own + read.comes) * read.scale : own * read.scale + read.comes;
        product *= read.scale;
      });
  double* map = out + number * 2 * size + j;
  map[0] = product, map[size] = own;
}

// A = W diag(d): a block takes a run, SPLIT threads an element. `w` is transposed forward, and as it is back: a row for
// each element that comes in.
template <typename T, typename D, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    scaled_sweep(const long long* __restrict__ sample, const long long* __restrict__ begin,
                 const long long* __restrict__ count, int direction, int batch, int size, bool back,
                 const D* __restrict__ w, const D* __restrict__ d, bool shared, const D* __restrict__ added,
                 const T* __restrict__ start, T* __restrict__ out, T* __restrict__ end) {
  struct Read {
    T scale, comes;
  };
  SHARED(T, state, 2 * 512);
  Run run = run_of(sample, begin, count, direction, nullptr, batch, back, blockIdx.x);
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, D, REGISTERS, SPLIT> column;
  column.load(w, size, size);
  T own = active ? start[blockIdx.x * static_cast<long long>(size) + j] : T(0);
  go_through<ahead<REGISTERS, SPLIT>(4), Read>(
      run, -1,
      [&](int, long long row, int, Read& read) {
        read.scale = d[(shared ? static_cast<int>(row) / batch : row) * size + mine];
        read.comes = added ? added[row * size + mine] : T(0);
      },
      [&](int parity, long long row, const Read& read) {
        T* line = state + parity * 512;
        own = back ? own + read.comes : own * read.scale;
        if (first) line[j] = active ? own : T(0);
        if (back && out && writes) out[row * size + j] = own;
        meet<REGISTERS, SPLIT>();
        own = column.times(line);
        own = back ? own * read.scale : own + read.comes;
        if (!back && out && writes) out[row * size + j] = own;
      });
  if (writes) end[blockIdx.x * static_cast<long long>(size) + j] = own;
}

// Rows of `indptr` and `indices` are those of A or, back, of A^T, whose entry p is number slots[p] of A's. A block
// takes blockDim.x runs, which read values side by side where they are of neighbouring samples, (time, entries, width).
template <typename T, typename D, typename I>
__global__ void __launch_bounds__(256, 1)
    sparse_sweep(const long long* __restrict__ sample, const long long* __restrict__ begin,
                 const long long* __restrict__ count, int direction, int batch, long long runs, int size, bool back,
                 const I* __restrict__ indptr, const I* __restrict__ indices, const I* __restrict__ slots,
                 const D* __restrict__ values, int width, const D* __restrict__ added, const T* __restrict__ start,
                 T* __restrict__ out, T* __restrict__ end) {
  DYNAMIC_SHARED(T, held);
  int lane = threadIdx.x, lanes = blockDim.x;
  long long first = blockIdx.x * static_cast<long long>(lanes), number = first + lane, entries = indptr[size];
  long long longest = 0;
  for (long long other = first; other < first + lanes && other < runs; ++other) {
    longest = count[other] > longest ? count[other] : longest;
  }
  bool there = number < runs;
  Run run = run_of(sample, begin, count, direction, nullptr, batch, back, there ? number : runs - 1);
  T *now = held, *next = held + size * lanes;
  for (int j = threadIdx.y; j < size; j += blockDim.y)
    now[j * lanes + lane] = start[(there ? number : runs - 1) * size + j];
  __syncthreads();
  for (int i = 0; i < longest; ++i) {
    bool goes = there && i < run.steps;
    int time = goes ? run.time(i) : 0;
    long long row = goes ? static_cast<long long>(run.row_at(time)) * size : 0;
    const D* own = values + time * entries * width + (width > 1 ? run.sample : 0);
    if (back) {
      if (goes) {
        for (int j = threadIdx.y; j < size; j += blockDim.y) {
          T v = now[j * lanes + lane];
          if (added) v += added[row + j];
          if (out) out[row + j] = v;
          now[j * lanes + lane] = v;
        }
      }
      __syncthreads();
    }
    for (int j = threadIdx.y; j < size; j += blockDim.y) {
      T total = now[j * lanes + lane];
      if (goes) {
        total = !back && added ? added[row + j] : T(0);
        for (I p = indptr[j]; p < indptr[j + 1]; ++p) {
          total += own[static_cast<long long>(slots ? slots[p] : p) * width] * now[indices[p] * lanes + lane];
        }
        if (!back && out) out[row + j] = total;
      }
      next[j * lanes + lane] = total;
    }
    __syncthreads();
    T* before = now;
    now = next, next = before;
  }
  if (there) {
    for (int j = threadIdx.y; j < size; j += blockDim.y) end[number * size + j] = now[j * lanes + lane];
  }
}

// J[k][j] = A[j][k], or A[k][j] back.
template <typename T>
struct DenseFormer {
  Run run;
  int size;
  bool shared;
  const T *blocks, *added;
  T more;

  __device__ __forceinline__ void fetch(int i) {
    if (threadIdx.x < size) {
      more = added ? added[static_cast<long long>(run.row(i)) * size + threadIdx.x] : T(0);
    }
  }
  __device__ __forceinline__ void prepare(T* coefficients) const {
    if (threadIdx.x < size) coefficients[threadIdx.x] = more;
  }
  __device__ __forceinline__ void entries(const T*, int i, int k, int j, Four<T>& four) const {
    const T* a = blocks + block_of(run, run.time(i), shared) * size * size;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      four.at[c] = j + c < size ? a[run.back ? k * size + j + c : (j + c) * size + k] : T(0);
    }
  }
};

template <typename T, int ROWS>
__global__ void __launch_bounds__(320, 1)
    dense_transfer(const long long* __restrict__ sample, const long long* __restrict__ begin,
                   const long long* __restrict__ count, int direction, int batch, int size, int share, bool back,
                   const T* __restrict__ blocks, bool shared, const T* __restrict__ added, T* __restrict__ out) {
  DenseFormer<T> former = {
      run_of(sample, begin, count, direction, nullptr, batch, back, blockIdx.x), size, shared, blocks, added, T(0)};
  compose<T, ROWS, 1>(former, former.run.steps, size, share,
                       out + blockIdx.x * static_cast<long long>(size + 1) * size);
}

// J[k][j] = d_k W[j][k], or W[k][j] d_j back; `w` as for the sweep, its rows aligned and padded to whole fours.
template <typename T>
struct ScaledFormer {
  Run run;
  int size;
  bool shared;
  const T *w, *d, *added;
  T scale, more;

  __device__ __forceinline__ void fetch(int i) {
    if (threadIdx.x < size) {
      int time = run.time(i);
      scale = d[block_of(run, time, shared) * size + threadIdx.x];
      more = added ? added[static_cast<long long>(run.row_at(time)) * size + threadIdx.x] : T(0);
    }
  }
  __device__ __forceinline__ void prepare(T* coefficients) const {
    if (threadIdx.x < size) coefficients[threadIdx.x] = scale, coefficients[size + threadIdx.x] = more;
  }
  __device__ __forceinline__ void entries(const T* coefficients, int, int k, int j, Four<T>& four) const {
    four = *reinterpret_cast<const Four<T>*>(w + k * whole_fours(size) + j);
#pragma unroll
    for (int c = 0; c < 4; ++c) four.at[c] = j + c < size ? four.at[c] * coefficients[run.back ? j + c : k] : T(0);
  }
};

template <typename T, int ROWS>
__global__ void __launch_bounds__(320, 1)
    scaled_transfer(const long long* __restrict__ sample, const long long* __restrict__ begin,
                    const long long* __restrict__ count, int direction, int batch, int size, int share, bool back,
                    const T* __restrict__ w, const T* __restrict__ d, bool shared, const T* __restrict__ added,
                    T* __restrict__ out) {
  ScaledFormer<T> former = {
      run_of(sample, begin, count, direction, nullptr, batch, back, blockIdx.x), size, shared, w, d, added, T(0), T(0)};
  compose<T, ROWS, 2>(former, former.run.steps, size, share,
                       out + blockIdx.x * static_cast<long long>(size + 1) * size);
}
