// The products of a schedule over affine maps of single steps, in float64: all products of a level in one launch, of
// some samples.
//
// A map is a matrix M of rows and, below it, what is added, o: s <- s M + o. Those of steps are in `maps`, (runs, ...),
// of runs of one step, and `table`, (places, batch), names the run at each place of each sample; those that levels
// compose are in `products`, (products, samples, ...). States are in `states`, (states, samples, size), and the first
// ones in `edge`. A level is some rows of `steps`, those of matrices before those of states, each of five numbers:
//   0  where the result is: its number in `products` or `states`; -1 for a state that is there already, and is copied
//   1  the later map: its number in `products`, or -1 - place
//   2  the earlier map, likewise; or the earlier state: its number in `states` plus 1, or 0 for the first one
//   3  the steps of a sample that are in the result: shorter samples do not have it
//   4  the place before which the sample is in this state, -1 where nobody asks: `start` gets it too
//
// Floors, of each product and sample, with n elements of a state: n^2 (n + 1) multiply-adds and 24 n (n + 1) bytes for
// two matrices, n^2 and 8 n (n + 1) for a matrix and a vector; for diagonals 2 n and 48 n, n and 32 n. The levels wait
// for one another. `widen` reads 4 bytes of each element and writes 8.

template <typename T>
struct alignas(16) Wide {
  T at[4];
};

// A level of a schedule, and the samples whose products a launch takes.
template <typename T>
struct Level {
  const long long *steps, *table, *chunks;
  int batch, samples;
  long long begin;
  const double* maps;
  double *products, *states;
  const T* edge;
  T* start;

  // Whether a sample has what a product is part of.
  __device__ __forceinline__ bool wants(const long long* step, int sample) const {
    return step[3] < chunks[begin + sample];
  }
  // A map of `extent` numbers.
  __device__ __forceinline__ const double* map(long long number, int sample, long long extent) const {
    if (number >= 0) return products + (number * samples + sample) * extent;
    return maps + table[(-1 - number) * batch + begin + sample] * extent;
  }
  // An element of a state.
  __device__ __forceinline__ double state(long long number, int sample, int size, int k) const {
    if (number) return states[((number - 1) * samples + sample) * size + k];
    return edge[(begin + sample) * size + k];
  }
  __device__ __forceinline__ void write(const long long* step, int sample, int size, int k, double value) const {
    if (step[0] >= 0) states[(step[0] * samples + sample) * size + k] = value;
    if (step[4] >= 0) start[table[step[4] * batch + begin + sample] * size + k] = T(value);
  }
};

// Goes through e = threadIdx.x, e + blockDim.x, ... below rows * columns by their rows and columns, without divisions.
template <typename Take>
__device__ __forceinline__ void each_of(int rows, int columns, Take take) {
  int by_rows = blockDim.x / columns, by_columns = blockDim.x % columns;
  int row = threadIdx.x / columns, column = threadIdx.x % columns;
  while (row < rows) {
    take(row, column);
    row += by_rows, column += by_columns;
    if (column >= columns) column -= columns, ++row;
  }
}

// A tile of `rows` rows and `columns` columns of x M, to whose last row M's own is added; x has size + 1 rows. A thread
// has four rows and four columns of it. The factors come through shared memory: `depth` columns of x and rows of M at a
// time.
__device__ __forceinline__ void multiply(const double* __restrict__ x, const double* __restrict__ m, int size, int rows,
                                         int columns, int depth, int first_row, int first_column, double* memory,
                                         double* __restrict__ out) {
  int pitch = rows + 2, groups = columns / 4, row = threadIdx.x / groups * 4, column = threadIdx.x % groups * 4;
  double* left = memory;                  // (depth, pitch), transposed
  double* right = memory + depth * pitch;  // (depth, columns)
  bool works = row < rows;
  double sums[4][4];
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[a][c] = 0;
  }
  for (int base = 0; base < size; base += depth) {
    int count = size - base < depth ? size - base : depth;
    if (base) __syncthreads();
    each_of(rows, count, [&](int r, int k) {
      int at = first_row + r;
      left[k * pitch + r] = at <= size ? x[static_cast<long long>(at) * size + base + k] : 0.0;
    });
    each_of(count, columns, [&](int k, int c) {
      int at = first_column + c;
      right[k * columns + c] = at < size ? m[static_cast<long long>(base + k) * size + at] : 0.0;
    });
    __syncthreads();
    if (works) {
#pragma unroll 4
      for (int k = 0; k < count; ++k) {
        Wide<double> x_four = *reinterpret_cast<const Wide<double>*>(left + k * pitch + row);
        Wide<double> m_four = *reinterpret_cast<const Wide<double>*>(right + k * columns + column);
#pragma unroll
        for (int a = 0; a < 4; ++a) {
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[a][c] += x_four.at[a] * m_four.at[c];
        }
      }
    }
  }
  if (works) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        int i = first_row + row + a, j = first_column + column + c;
        long long place = static_cast<long long>(i) * size + j;
        if (i <= size && j < size) out[place] = i == size ? sums[a][c] + m[place] : sums[a][c];
      }
    }
  }
}

// A block takes a tile of a product of matrices or, in the blocks behind those, some columns of a vector's: groups of
// its threads multiply every so many rows of these. `memory` has room for the factors' parts, and for a number of each
// thread.
template <typename T>
__global__ void __launch_bounds__(256, 1)
    dense_level(int batch, int samples, int size, int rows, int columns, int depth, int matrices, int first,
                long long begin, const long long* __restrict__ steps, const long long* __restrict__ table,
                const long long* __restrict__ chunks, const double* __restrict__ maps, double* products, double* states,
                const T* __restrict__ edge, T* __restrict__ start) {
  DYNAMIC_SHARED(double, memory);
  Level<T> level = {steps, table, chunks, batch, samples, begin, maps, products, states, edge, start};
  int column_tiles = (size + columns - 1) / columns, tiles = (size + rows) / rows * column_tiles;
  long long of_matrices = static_cast<long long>(matrices) * samples * tiles, block = blockIdx.x;
  bool of_vector = block >= of_matrices;
  if (of_vector) block -= of_matrices, tiles = column_tiles;
  int tile = block % tiles, sample = block / tiles % samples;
  const long long* step = steps + (first + (of_vector ? matrices : 0) + block / tiles / samples) * 5;
  long long extent = (size + 1) * static_cast<long long>(size);
  bool wanted = level.wants(step, sample);
  if (!of_vector) {
    if (wanted) {
      multiply(level.map(step[2], sample, extent), level.map(step[1], sample, extent), size, rows, columns, depth,
               tile / column_tiles * rows, tile % column_tiles * columns, memory,
               products + (step[0] * samples + sample) * extent);
    }
  } else {
    int groups = blockDim.x / columns, group = threadIdx.x / columns, j = tile * columns + threadIdx.x % columns;
    bool moves = wanted && step[0] >= 0;
    const double* m = moves ? level.map(step[1], sample, extent) : nullptr;
    double sum = 0;
    if (moves && group < groups && j < size) {
#pragma unroll 4
      for (int k = group; k < size; k += groups) {
        sum += level.state(step[2], sample, size, k) * m[static_cast<long long>(k) * size + j];
      }
    }
    memory[threadIdx.x] = sum;
    __syncthreads();
    if (wanted && group == 0 && j < size) {
      double total = moves ? m[static_cast<long long>(size) * size + j] : level.state(step[2], sample, size, j);
      if (moves) {
        double products_of_rows = 0;
        for (int other = 0; other < groups; ++other) products_of_rows += memory[other * columns + threadIdx.x];
        total += products_of_rows;
      }
      level.write(step, sample, size, j, total);
    }
  }
}

// A thread takes an element of a product of diagonals, or of one of a diagonal and a vector: a map is (2, size).
template <typename T>
__global__ void __launch_bounds__(256, 1)
    diagonal_level(int batch, int samples, int size, int matrices, int first, long long elements, long long begin,
                   const long long* __restrict__ steps, const long long* __restrict__ table,
                   const long long* __restrict__ chunks, const double* __restrict__ maps, double* products,
                   double* states, const T* __restrict__ edge, T* __restrict__ start) {
  Level<T> level = {steps, table, chunks, batch, samples, begin, maps, products, states, edge, start};
  long long element = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x, number = element / size / samples;
  if (element < elements) {
    int j = element % size, sample = element / size % samples;
    const long long* step = steps + (first + number) * 5;
    if (level.wants(step, sample)) {
      if (number < matrices) {
        const double* later = level.map(step[1], sample, 2 * size) + j;
        const double* earlier = level.map(step[2], sample, 2 * size) + j;
        double* out = products + (step[0] * samples + sample) * 2 * size + j;
        out[0] = earlier[0] * later[0], out[size] = earlier[size] * later[0] + later[size];
      } else {
        double own = level.state(step[2], sample, size, j);
        if (step[0] >= 0) {
          const double* map = level.map(step[1], sample, 2 * size) + j;
          own = own * map[0] + map[size];
        }
        level.write(step, sample, size, j, own);
      }
    }
  }
}

// Copies of up to five arrays in float64, each of so many elements.
template <typename D>
__global__ void __launch_bounds__(256, 1)
    widen(long long count_a, long long count_b, long long count_c, long long count_d, long long count_e,
          const D* __restrict__ a, const D* __restrict__ b, const D* __restrict__ c, const D* __restrict__ d,
          const D* __restrict__ e, double* __restrict__ wide_a, double* __restrict__ wide_b,
          double* __restrict__ wide_c, double* __restrict__ wide_d, double* __restrict__ wide_e) {
  long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (i < count_a) wide_a[i] = a[i];
  if (i < count_b) wide_b[i] = b[i];
  if (i < count_c) wide_c[i] = c[i];
  if (i < count_d) wide_d[i] = d[i];
  if (i < count_e) wide_e[i] = e[i];
}
