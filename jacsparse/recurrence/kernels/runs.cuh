// What all kernels of recurrences share: runs of consecutive steps, and what a block's threads need of each.
//
// A run is some consecutive steps of one sample in one direction of time: its step i is at time begin + i * direction.
// A run of no steps ends where it starts. In which rows of memory the steps are, `offset` says: that of time t in row
// offset[t] + sample, or in row t * batch + sample where there is no `offset`.

// Four neighbours, which memory gives at once.
template <typename T>
struct alignas(16) Four {
  T at[4];
};

__device__ __forceinline__ int whole_fours(int size) { return (size + 3) / 4 * 4; }

struct Run {
  const long long* offset;
  long long sample, begin, steps, batch;
  int direction;

  __device__ __forceinline__ long long row_at(long long time) const {
    return (offset ? offset[time] : time * batch) + sample;
  }
  // Of the i-th step, from the run's start or, going back, from its end.
  __device__ __forceinline__ long long time(long long i, bool back) const {
    return begin + (back ? steps - 1 - i : i) * direction;
  }
  __device__ __forceinline__ long long row(long long i, bool back) const { return row_at(time(i, back)); }
};

__device__ __forceinline__ Run run_of(const long long* sample, const long long* begin, const long long* count,
                                      int direction, const long long* offset, long long batch, long long run) {
  return {offset, sample[run], begin[run], count[run], batch, direction};
}

// Goes through a run's steps, with what they read of memory under way for some time before they need it.
//
// `fetch(i, row, values)` reads what the i-th step needs, `step(i, row, values)` takes it; parity is that of i. Rows are
// known a step before they are read from. A wait for memory is as long as several steps.
template <int AHEAD, typename Values, typename Fetch, typename Step>
__device__ __forceinline__ void go_through(const Run& run, bool back, Fetch fetch, Step step) {
  if (!run.steps) return;
  long long last = run.steps - 1, rows[AHEAD];
  Values coming[AHEAD];
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) {
    long long i = u < last ? u : last;
    rows[u] = run.row(i, back);
    fetch(i, rows[u], coming[u]);
  }
  long long following = run.row(AHEAD < last ? AHEAD : last, back);
  for (long long first = 0; first <= last; first += AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      long long i = first + u, next = i + AHEAD, row = rows[u];
      if (i <= last) {
        Values values = coming[u];
        fetch(next < last ? next : last, following, coming[u]);
        rows[u] = following;
        following = run.row(next + 1 < last ? next + 1 : last, back);
        step(i, u & 1, row, values);
      }
    }
  }
}

// Weights of thread j, one for each element of the state: w[k * stride]. In registers where they are few.
template <typename T, int REGISTERS>
struct Column {
  T own[REGISTERS > 0 ? REGISTERS : 1];
  const T* far;
  long long stride;
  // Threads beyond the last column have the last one's.
  __device__ __forceinline__ void load(const T* first, long long step, int size) {
    far = first + (threadIdx.x < size ? threadIdx.x : size - 1), stride = step;
    if (REGISTERS > 0) {
#pragma unroll
      for (int k = 0; k < REGISTERS; ++k) own[k] = k < size ? far[k * stride] : T(0);
    }
  }
  // The sum over k of w[k] and x[k]; x is padded with zeros to whole fours, and aligned.
  __device__ __forceinline__ T times(const T* x, int size) const {
    T sums[4] = {T(0), T(0), T(0), T(0)};
    const Four<T>* fours = reinterpret_cast<const Four<T>*>(x);
    if (REGISTERS > 0) {
#pragma unroll
      for (int k = 0; k < REGISTERS; k += 4) {
        if (k < size) {
          Four<T> four = fours[k / 4];
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[i] += own[k + i] * four.at[i];
        }
      }
    } else {
      int k = 0;
      for (; k + 3 < size; k += 4) {
        Four<T> four = fours[k / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += far[(k + i) * stride] * four.at[i];
      }
      for (; k < size; ++k) sums[0] += far[k * stride] * x[k];
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
};

// What a block's threads have written is seen by all of them; up to 32 registers of weights, they are one warp.
template <int REGISTERS>
__device__ __forceinline__ void meet() {
  if (REGISTERS > 0 && REGISTERS <= 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

template <typename T>
__device__ __forceinline__ T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

// What a run's steps do to rows x, each x <- x J: the product of all J, and below it what a row of zeros comes to where
// something is added before each step. Written to `out`, (size + 1, size); a block takes some of the rows.
//
// Rows are in shared memory, transposed; of J a slab of SLAB rows at a time, made by all threads. A thread multiplies
// for ROWS rows and four columns: for each k it reads ROWS + 4 numbers and multiplies ROWS * 4. `former` says what J is:
// fetch(i) starts to read what the i-th step needs, prepare(coefficients) writes it to shared memory, COEFFICIENTS
// vectors; entries(coefficients, i, k, j, four) are those of row k at columns j to j + 3, zeros beyond the last one; and
// added(i, j) what comes to the last row before the i-th step or, for i = steps, after the last one.
//
// Floors, for each step of a run: size^2 (size + 1) multiply-adds, and J's own; bytes are what J is made of, read once
// by each block, and (size + 1) size of each run. 1 + ROWS / 4 reads of shared memory for each ROWS * 4 multiply-adds.
constexpr int SLAB = 16;

template <typename T, int ROWS, int COEFFICIENTS, typename Former>
__device__ __forceinline__ void transfer(Former& former, long long steps, int size, int share, T* __restrict__ out) {
  // Nobody asks for what a run without steps does.
  if (!steps) return;
  DYNAMIC_SHARED(T, memory);
  int columns = whole_fours(size), groups = columns / 4, height = (share + ROWS - 1) / ROWS * ROWS;
  int begin = blockIdx.y * share, count = size + 1 - begin < share ? size + 1 - begin : share;
  int thread = threadIdx.x, threads = blockDim.x;
  T* x = memory;                        // (size, height)
  T* slab = x + size * height;          // (SLAB, columns)
  T* coefficients = slab + SLAB * columns;  // two of (COEFFICIENTS, size)
  int row = thread / groups * ROWS, column = thread % groups * 4, apart = threads / groups;
  bool works = row < height, adds = works && row <= size - begin && size - begin < row + ROWS;
  for (int e = thread; e < size * height; e += threads) {
    int k = e / height, r = begin + e % height;
    x[e] = r == k ? T(1) : r == size ? former.added(0, k) : T(0);
  }
  former.fetch(0);
  former.prepare(coefficients);
  former.fetch(steps > 1 ? 1 : 0);
  __syncthreads();
  for (long long i = 0; i < steps; ++i) {
    const T* here = coefficients + (i & 1) * COEFFICIENTS * size;
    T sums[ROWS][4], next[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      next[c] = adds && column + c < size ? former.added(i + 1, column + c) : T(0);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) sums[r][c] = T(0);
    }
    for (int base = 0; base < size; base += SLAB) {
      int depth = size - base < SLAB ? size - base : SLAB;
      if (base) __syncthreads();
      if (thread / groups < apart) {
        for (int k = thread / groups; k < depth; k += apart) {
          Four<T> four;
          former.entries(here, i, base + k, column, four);
          *reinterpret_cast<Four<T>*>(slab + k * columns + column) = four;
        }
      }
      if (!base && i + 1 < steps) {
        former.prepare(coefficients + ((i + 1) & 1) * COEFFICIENTS * size);
        former.fetch(i + 2 < steps ? i + 2 : i + 1);
      }
      __syncthreads();
      if (works) {
#pragma unroll 4
        for (int k = 0; k < depth; ++k) {
          Four<T> right = *reinterpret_cast<const Four<T>*>(slab + k * columns + column);
#pragma unroll
          for (int r = 0; r < ROWS; r += 4) {
            Four<T> left = *reinterpret_cast<const Four<T>*>(x + (base + k) * height + row + r);
#pragma unroll
            for (int a = 0; a < 4; ++a) {
#pragma unroll
              for (int c = 0; c < 4; ++c) sums[r + a][c] += left.at[a] * right.at[c];
            }
          }
        }
      }
    }
    __syncthreads();
    if (works) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (column + c < size) {
#pragma unroll
          for (int r = 0; r < ROWS; r += 4) {
            Four<T> four;
#pragma unroll
            for (int a = 0; a < 4; ++a) {
              four.at[a] = sums[r + a][c];
              if (adds && begin + row + r + a == size) four.at[a] += next[c];
            }
            *reinterpret_cast<Four<T>*>(x + (column + c) * height + row + r) = four;
          }
        }
      }
    }
  }
  __syncthreads();
  for (int e = thread; e < count * size; e += threads) {
    int r = e / size, k = e % size;
    out[static_cast<long long>(begin + r) * size + k] = x[k * height + r];
  }
}
