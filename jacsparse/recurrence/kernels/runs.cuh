// What all kernels of recurrences share: runs of consecutive steps, and what a block's threads need of each.
//
// A run is some consecutive steps of one sample in one direction of time: its step i is at time begin + i * direction.
// A run of no steps ends where it starts. Rows of memory are numbered by 32 bits: that of time t is offset[t] + sample
// or, where all samples are equally long and there is no `offset`, t * batch + sample.
//
// Backward and linear sweeps read data of type D, and compute in the type T of the states that they start from.

// Four neighbours, which memory gives at once.
template <typename T>
struct alignas(16) Four {
  T at[4];
};

__device__ __forceinline__ int whole_fours(int size) {
  return (size + 3) / 4 * 4;
}

struct Run {
  const long long* offset;
  int sample, begin, steps, batch, direction;
  bool back;

  // Of the i-th step that is taken: from the run's start or, going back, from its end.
  __device__ __forceinline__ int time(int i) const { return begin + (back ? steps - 1 - i : i) * direction; }
  __device__ __forceinline__ int row_at(int time) const {
    return (offset ? static_cast<int>(offset[time]) : time * batch) + sample;
  }
  __device__ __forceinline__ int row(int i) const { return row_at(time(i)); }
  // The row of the step before the run's first one, -1 where the sample begins with it.
  __device__ __forceinline__ int beyond(const long long* edge) const {
    return steps && begin != edge[sample] ? row_at(begin - direction) : -1;
  }
};

__device__ __forceinline__ Run run_of(const long long* sample, const long long* begin, const long long* count,
                                      int direction, const long long* offset, int batch, bool back, long long run) {
  return {offset,
          static_cast<int>(sample[run]),
          static_cast<int>(begin[run]),
          static_cast<int>(count[run]),
          batch,
          direction,
          back};
}

struct Never {
  __device__ __forceinline__ bool operator()() const { return false; }
};

struct AsTheyAre {
  template <typename Values>
  __device__ __forceinline__ void operator()(Values&) const {}
};

// Goes through a run's steps, with what they read of memory under way for AHEAD to 2 * AHEAD steps before they need it.
//
// `fetch(i, row, next, values)` starts to read what the i-th step needs: `next` is the row of the step that is taken
// after it, and `beyond` that of the last one's. `step(parity, row, values)` takes a step; parity is that of its number.
// Reads are made for AHEAD steps together, for a warp that waits for one waits for all that it has under way; their
// rows are known as many steps before that. `arrive(values)` gets what was read for AHEAD steps before these are taken.
//
// Before each AHEAD steps but the first ones, `done` says whether to stop there. Returns how many steps were taken.
template <int AHEAD, typename Values, typename Fetch, typename Step, typename Done = Never, typename Arrive = AsTheyAre>
__device__ __forceinline__ int go_through(const Run& run, int beyond, Fetch fetch, Step step, Done done = {},
                                          Arrive arrive = {}) {
  int last = run.steps - 1, rows[AHEAD + 1], later[AHEAD];
  if (last < 0) return 0;
  Values coming[AHEAD];
  auto places = [&](int first) {
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) later[u] = run.time(first + u < last ? first + u : last);
    if (run.offset) {
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) later[u] = static_cast<int>(run.offset[later[u]]);
    } else {
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) later[u] *= run.batch;
    }
  };
  auto read = [&](int first) {
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      bool is_last = first + u >= last;
      fetch(is_last ? last : first + u, rows[u], is_last ? beyond : rows[u + 1], coming[u]);
    }
  };
  rows[0] = run.row(0);
  places(1);
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) rows[u + 1] = later[u] + run.sample;
  read(0);
  places(AHEAD + 1);
  for (int first = 0; first <= last; first += AHEAD) {
    if (first && done()) return first;
    int at[AHEAD];
    Values now[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) now[u] = coming[u], at[u] = rows[u];
    rows[0] = rows[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) rows[u + 1] = later[u] + run.sample;
    read(first + AHEAD);
    places(first + 2 * AHEAD + 1);
    arrive(now);
    if (first + AHEAD <= run.steps) {
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) step(u & 1, at[u], now[u]);
    } else {
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        if (first + u <= last) step(u & 1, at[u], now[u]);
      }
    }
  }
  return run.steps;
}

// Threads of a block, at most, where SPLIT of them have an element of the state together: with weights in REGISTERS of
// each as many as these reach, else those of 128 elements, or 512 that are alone.
template <int REGISTERS, int SPLIT>
constexpr int THREADS = REGISTERS == 0                   ? (SPLIT > 1 ? 128 * SPLIT : 512)
                        : REGISTERS * SPLIT * SPLIT > 32 ? REGISTERS * SPLIT * SPLIT
                                                         : 32;

// For how many steps reads are made together: fewer where many threads share the registers, or weights are read too.
template <int REGISTERS, int SPLIT>
__device__ constexpr int ahead(int most) {
  return REGISTERS == 0 ? 2 : THREADS<REGISTERS, SPLIT> > 256 && most > 4 ? 4 : most;
}

// Weights of an element of the state, of which each of SPLIT neighbouring threads has a share: w[k * stride]. Either
// REGISTERS of them, in registers; or none, and they come from the first-level cache.
template <typename T, typename D, int REGISTERS, int SPLIT>
struct Column {
  T own[REGISTERS > 0 ? REGISTERS : 1];
  const D* far;
  int stride, begin, count;
  // Threads beyond the last element have the last one's.
  __device__ __forceinline__ void load(const D* first, int step, int size) {
    int element = threadIdx.x / SPLIT, share = REGISTERS > 0 ? REGISTERS : whole_fours((size + SPLIT - 1) / SPLIT);
    begin = threadIdx.x % SPLIT * share, stride = step;
    count = size - begin < share ? size - begin : share;
    far = first + (element < size ? element : size - 1) + static_cast<long long>(begin) * step;
    if (REGISTERS > 0) {
#pragma unroll
      for (int k = 0; k < REGISTERS; ++k) own[k] = k < count ? T(far[static_cast<long long>(k) * step]) : T(0);
    }
  }
  // The sum over k of w[k] and x[k]; x is aligned and, up to all registers, padded with zeros.
  __device__ __forceinline__ T times(const T* x) const {
    T sums[4] = {T(0), T(0), T(0), T(0)};
    const Four<T>* fours = reinterpret_cast<const Four<T>*>(x + begin);
    if (REGISTERS > 0) {
#pragma unroll
      for (int k = 0; k < REGISTERS; k += 4) {
        Four<T> four = fours[k / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += own[k + i] * four.at[i];
      }
    } else {
      const D* w = far;
      int k = 0;
#pragma unroll 4
      for (; k + 3 < count; k += 4) {
        Four<T> four = fours[k / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i, w += stride) sums[i] += *w * four.at[i];
      }
      for (; k < count; ++k, w += stride) sums[0] += *w * x[begin + k];
    }
    T sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int apart = SPLIT / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    return sum;
  }
};

// What a block's threads have written is seen by all of them; where these are one warp, by that.
template <int REGISTERS, int SPLIT>
__device__ __forceinline__ void meet() {
  if (THREADS<REGISTERS, SPLIT> <= 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Whether it is so for any of a block's threads, which all wait for one another.
template <int REGISTERS, int SPLIT>
__device__ __forceinline__ bool any(bool predicate) {
  return THREADS<REGISTERS, SPLIT> <= 32 ? __any_sync(0xffffffffu, predicate) : __syncthreads_or(predicate);
}

// Zero where it is below the smallest normal number: gradients that vanish would stay among the smallest ones.
__device__ __forceinline__ float flushed(float x) {
  return fabs(x) < 1.17549435e-38f ? 0.0f : x;
}
__device__ __forceinline__ double flushed(double x) {
  return fabs(x) < 2.2250738585072014e-308 ? 0.0 : x;
}

// In float32 by the hardware's exponential and reciprocal, without branches: within a few units in the last place of
// what they are of order one.
__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}
__device__ __forceinline__ double sigmoid(double x) {
  return 1.0 / (1.0 + exp(-x));
}

// Close to zero by its series, of which the coefficients are fitted to [0, 0.6]: 2e-8 of the value.
__device__ __forceinline__ float squash(float x) {
  float size = fabs(x), square = x * x;
  float large = 1.0f - __fdividef(2.0f, __expf(2.0f * size) + 1.0f);
  float series = -0.00610495f;
  series = fma(series, square, 0.02100364f);
  series = fma(series, square, -0.0538525f);
  series = fma(series, square, 0.13332782f);
  series = fma(series, square, -0.33333329f);
  return copysign(size < 0.6f ? fma(series * square, size, size) : large, x);
}
__device__ __forceinline__ double squash(double x) {
  return tanh(x);
}

// What a run's steps do to rows x, each x <- x J: the product of all J, and below it what a row of zeros comes to where
// something is added before each step or, forward, after it. Written to `out`, (size + 1, size); a block takes some
// rows.
//
// Rows are in shared memory, transposed; of J a slab of SLAB rows at a time, made by all threads. A thread multiplies
// for ROWS rows and four columns: for each k it reads ROWS + 4 numbers and multiplies ROWS * 4. `former` says what J
// is: fetch(i) starts to read what the i-th step needs, prepare(coefficients) writes it to shared memory, COEFFICIENTS
// vectors of which the last is what is added; entries(coefficients, i, k, j, four) are those of row k at columns j to
// j + 3, zeros beyond the last one.
//
// Floors, for each step of a run: size^2 (size + 1) multiply-adds, and J's own; bytes are what J is made of, read once
// by each block, and (size + 1) size of each run. 1 + ROWS / 4 reads of shared memory for each ROWS * 4 multiply-adds.
constexpr int SLAB = 16;

template <typename T, int ROWS, int COEFFICIENTS, typename Former>
__device__ __forceinline__ void compose(Former& former, int steps, int size, int share, T* __restrict__ out) {
  // Nobody asks for what a run without steps does.
  if (!steps) return;
  DYNAMIC_SHARED(T, memory);
  bool back = former.run.back;
  int columns = whole_fours(size), groups = columns / 4, height = (share + ROWS - 1) / ROWS * ROWS;
  // An odd number of fours: neighbouring columns then lie in other banks.
  int pitch = height / 4 % 2 ? height : height + 4;
  int begin = blockIdx.y * share, count = size + 1 - begin < share ? size + 1 - begin : share;
  int thread = threadIdx.x, threads = blockDim.x;
  T* x = memory;                            // (size, pitch)
  T* slab = x + size * pitch;               // (SLAB, columns)
  T* coefficients = slab + SLAB * columns;  // two of (COEFFICIENTS, size)
  int row = thread / groups * ROWS, column = thread % groups * 4, apart = threads / groups;
  bool works = row < height, adds = works && row <= size - begin && size - begin < row + ROWS;
  former.fetch(0);
  former.prepare(coefficients);
  former.fetch(steps > 1 ? 1 : 0);
  __syncthreads();
  const T* added = coefficients + (COEFFICIENTS - 1) * size;
  for (int e = thread; e < size * pitch; e += threads) {
    int k = e / pitch, r = begin + e % pitch;
    x[e] = r == k ? T(1) : r == size && back ? added[k] : T(0);
  }
  for (int i = 0; i < steps; ++i) {
    const T* here = coefficients + (i & 1) * COEFFICIENTS * size;
    T* next = coefficients + ((i + 1) & 1) * COEFFICIENTS * size;
    T sums[ROWS][4], more[4] = {T(0), T(0), T(0), T(0)};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
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
        former.prepare(next);
        former.fetch(i + 2 < steps ? i + 2 : i + 1);
      }
      __syncthreads();
      if (!base && adds && (!back || i + 1 < steps)) {
        const T* comes = (back ? next : here) + (COEFFICIENTS - 1) * size;
#pragma unroll
        for (int c = 0; c < 4; ++c) more[c] = column + c < size ? comes[column + c] : T(0);
      }
      if (works) {
#pragma unroll 4
        for (int k = 0; k < depth; ++k) {
          Four<T> right = *reinterpret_cast<const Four<T>*>(slab + k * columns + column);
#pragma unroll
          for (int r = 0; r < ROWS; r += 4) {
            Four<T> left = *reinterpret_cast<const Four<T>*>(x + (base + k) * pitch + row + r);
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
              if (adds && begin + row + r + a == size) four.at[a] += more[c];
            }
            *reinterpret_cast<Four<T>*>(x + (column + c) * pitch + row + r) = four;
          }
        }
      }
    }
  }
  __syncthreads();
  for (int e = thread; e < count * size; e += threads) {
    int r = e / size, k = e % size;
    out[static_cast<long long>(begin + r) * size + k] = x[k * pitch + r];
  }
}
