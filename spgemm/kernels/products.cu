// Products of matrices of known structure, C = A B, and a matrix times vectors.
//
// Values are (entries, batch), the batch innermost; a factor whose batch is 1 is shared by all samples, so a sample's
// value stands at `entry * batch + (batch > 1 ? sample : 0)`. Every sum is taken in an order that the plan alone decides.
//
// Floors, for each sample, with n multiply-adds and values of w bytes: C written once and the factors read once; and
//   scale    one factor's values read, C written, 4 or 8 bytes of index for each entry where columns are scaled;
//   merge    2 bytes for each multiply-add and 2 for each entry of C, read once for the samples of a block;
//   rowwise  log2(row of C) reads of its columns for each multiply-add;
//   select   as merge, and one winner for each multiply-add (left) or entry of C (right);
//   entries  one index and log2(row of G) reads for each multiply-add;
//   matvec   one index and one value for each entry.

// The place of a sample's value.
__device__ __forceinline__ long long of_sample(long long entry, long long batch, long long sample) {
  return entry * batch + (batch > 1 ? sample : 0);
}

// The place of a column among the sorted columns of a row, or -1.
template <typename I>
__device__ __forceinline__ long long find(const I* __restrict__ columns, long long first, long long last, I wanted) {
  while (first < last) {
    long long middle = (first + last) >> 1;
    I column = columns[middle];
    if (column == wanted) return middle;
    if (column < wanted)
      first = middle + 1;
    else
      last = middle;
  }
  return -1;
}

// The sum over a warp, by halves and so always in the same order. All lanes get it.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int flip = 16; flip > 0; flip >>= 1) value += __shfl_xor_sync(0xffffffffu, value, flip);
  return value;
}

// C = diag(d) B: a row of threads for each row.
template <typename T, typename I>
__global__ void scale_rows(const I* __restrict__ indptr, long long rows, long long a_batch, long long b_batch,
                           long long batch, const T* __restrict__ d, const T* __restrict__ values, T* __restrict__ c) {
  long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row < rows) {
    long long last = indptr[row + 1] * batch;
    for (long long i = indptr[row] * batch + threadIdx.x; i < last; i += blockDim.x) {
      long long entry = i / batch, sample = i - entry * batch;
      c[i] = d[of_sample(row, a_batch, sample)] * values[of_sample(entry, b_batch, sample)];
    }
  }
}

// C = A diag(d): a thread for each entry and sample.
template <typename T, typename I>
__global__ void scale_columns(const I* __restrict__ indices, long long nnz, long long a_batch, long long b_batch,
                              long long batch, const T* __restrict__ values, const T* __restrict__ d,
                              T* __restrict__ c) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < nnz * batch) {
    long long entry = i / batch, sample = i - entry * batch;
    c[i] = values[of_sample(entry, a_batch, sample)] * d[of_sample(indices[entry], b_batch, sample)];
  }
}

// What an entry's number fits in.
template <typename S>
struct Number {
  using type = int;
};
template <>
struct Number<long long> {
  using type = long long;
};

// Whether a factor's values are winners: for each window and sample the row that is selected.
template <typename A>
struct Winners {
  static constexpr bool are = false;
};
template <>
struct Winners<int> {
  static constexpr bool are = true;
};

// A list of pairs for each entry of C, for tiles of entries that follow each other, 256 at most. A tile has four numbers:
// its first entry, where its lists start, the first entry of A that they reach, and how many follow that they may reach.
// Lists of bytes count from there, and in B from `b_starts`, which has the place of B's row for each entry of A; others
// are numbers of entries.
//
// A block takes one of `count` tiles for up to `width` samples, up to four sums a thread at once. It holds what bytes
// count from, and A's values where samples share them. Selecting factors multiply nothing: the left one takes the pairs
// of A's entries (`others`, window `inner`) that win, the right one those of entries (row, `inner`) that win the window
// of C's entry, which is in `others`.
template <typename T, typename S, typename N, typename A, typename B>
__global__ void __launch_bounds__(256, 4)
    merge(const long long* __restrict__ tiles, const N* __restrict__ starts, const S* __restrict__ left,
          const S* __restrict__ right, const int* __restrict__ b_starts, const int* __restrict__ inner,
          const int* __restrict__ others, int count, int width, long long a_batch, long long b_batch,
          long long batch, const A* __restrict__ a, const B* __restrict__ b, T* __restrict__ c) {
  constexpr bool narrow = sizeof(S) == 1, left_selects = Winners<A>::are, right_selects = Winners<B>::are;
  constexpr bool selects = left_selects || right_selects;
  // Of doubles and 64-bit pairs two sums fill as many registers.
  constexpr int held = narrow ? 256 : 1, sums = narrow || sizeof(T) == 4 ? 4 : 2;
  SHARED(long long, head, 6);
  SHARED(unsigned int, begin, 257);
  SHARED(int, b_row, held);
  SHARED(int, key, selects ? held : 1);
  SHARED(int, row_of, left_selects ? held : 1);
  SHARED(T, value, selects ? 1 : held);
  unsigned int pass = blockIdx.x / count, number = blockIdx.x - pass * count;
  if (threadIdx.x < 6) head[threadIdx.x] = tiles[4LL * number + threadIdx.x];
  __syncthreads();
  long long entry_0 = head[0], sample_0 = static_cast<long long>(pass) * width;
  int entries = static_cast<int>(head[4] - entry_0);
  int samples = static_cast<int>(min(static_cast<long long>(width), batch - sample_0));
  left += head[1];
  right += head[1];
  a += a_batch > 1 ? sample_0 : 0;
  b += b_batch > 1 ? sample_0 : 0;
  c += entry_0 * batch + sample_0;
  int of_a = a_batch > 1 ? -1 : 0, of_b = b_batch > 1 ? -1 : 0;
  bool shared = narrow && !selects && a_batch == 1;
  for (int i = threadIdx.x; i < entries; i += blockDim.x) begin[i] = starts[entry_0 + i];
  if (threadIdx.x == 0) begin[entries] = static_cast<unsigned int>(head[5] - head[1]);
  if constexpr (narrow) {
    for (int i = threadIdx.x; i < head[3]; i += blockDim.x) {
      long long p = head[2] + i;
      if constexpr (!right_selects) b_row[i] = b_starts[p];
      if constexpr (selects) key[i] = inner[p];
      if constexpr (left_selects) row_of[i] = others[p];
      if constexpr (!selects)
        if (shared) value[i] = a[p];
    }
  }
  __syncthreads();
  int outputs = entries * samples;
  for (int at = threadIdx.x; at < outputs; at += sums * blockDim.x) {
    unsigned int from[sums], to[sums], longest = 0;
    int sample[sums], won[sums];
    T sum[sums];
#pragma unroll
    for (int j = 0; j < sums; ++j) {
      int i = at + j * static_cast<int>(blockDim.x), entry = samples == 1 ? i : i / samples;
      sample[j] = i - entry * samples;
      sum[j] = T(0);
      from[j] = to[j] = 0;
      if (i < outputs) {
        from[j] = begin[entry], to[j] = begin[entry + 1];
        if constexpr (right_selects) won[j] = b[others[entry_0 + entry] * b_batch + sample[j]];
      }
      longest = max(longest, to[j] - from[j]);
    }
    for (unsigned int step = 0; step < longest; ++step) {
      typename Number<S>::type p[sums], q[sums];
      T x[sums], y[sums];
#pragma unroll
      for (int j = 0; j < sums; ++j)
        if (from[j] + step < to[j]) {
          p[j] = left[from[j] + step];
          if constexpr (!right_selects) q[j] = right[from[j] + step];
        }
#pragma unroll
      for (int j = 0; j < sums; ++j)
        if (from[j] + step < to[j]) {
          long long place = narrow ? head[2] + p[j] : p[j];
          bool taken = true;
          if constexpr (left_selects) {
            long long window = narrow ? key[p[j]] : inner[place];
            taken = a[window * a_batch + sample[j]] == (narrow ? row_of[p[j]] : others[place]);
          }
          if constexpr (right_selects) taken = (narrow ? key[p[j]] : inner[place]) == won[j];
          x[j] = y[j] = T(0);
          if constexpr (!left_selects)
            if (taken) x[j] = shared ? value[p[j]] : a[place * a_batch + (sample[j] & of_a)];
          if constexpr (!right_selects)
            if (taken) y[j] = b[(narrow ? b_row[p[j]] + q[j] : q[j]) * b_batch + (sample[j] & of_b)];
        }
#pragma unroll
      for (int j = 0; j < sums; ++j)
        if (from[j] + step < to[j]) sum[j] += left_selects ? y[j] : right_selects ? x[j] : x[j] * y[j];
    }
#pragma unroll
    for (int j = 0; j < sums; ++j) {
      int i = at + j * static_cast<int>(blockDim.x), entry = samples == 1 ? i : i / samples;
      if (i < outputs) c[entry * batch + sample[j]] = sum[j];
    }
  }
}

// The same for long lists and few samples: a warp for each entry, `across` samples side by side in it, and along the
// list what lanes are left. There are `blocks` for each tile.
template <typename T, typename S, typename N>
__global__ void merge_long(const long long* __restrict__ tiles, const N* __restrict__ starts,
                           const S* __restrict__ left, const S* __restrict__ right, const int* __restrict__ b_starts,
                           int blocks, int across, long long a_batch, long long b_batch, long long batch,
                           const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c) {
  constexpr bool narrow = sizeof(S) == 1;
  unsigned int number = blockIdx.x / blocks, place = (blockIdx.x - number * blocks) * blockDim.y + threadIdx.y;
  const long long* head = tiles + 4LL * number;
  long long entry = head[0] + place;
  int along = threadIdx.x / across, stride = 32 / across, sample = threadIdx.x - along * across;
  if (entry < head[4]) {
    long long end = entry + 1 == head[4] ? head[5] : head[1] + starts[entry + 1];
    T sum = T(0);
    if (sample < batch)
      for (long long at = head[1] + starts[entry] + along; at < end; at += stride) {
        long long p = left[at], q = right[at];
        if (narrow) p += head[2], q += b_starts[p];
        sum += a[of_sample(p, a_batch, sample)] * b[of_sample(q, b_batch, sample)];
      }
    for (int flip = 16; flip >= across; flip >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, flip);
    if (along == 0 && sample < batch) c[entry * batch + sample] = sum;
  }
}

// A warp for each row of C, `across` samples side by side in it. The other lanes take the entries of a row of B, which
// are all in different columns. The sums are in C's memory, at places that are searched among the row's columns. Blocks
// take all rows for `across` samples, then for the next ones.
template <typename T, typename I>
__global__ void rowwise(const I* __restrict__ a_indptr, const I* __restrict__ a_indices, const I* __restrict__ b_indptr,
                        const I* __restrict__ b_indices, const I* __restrict__ c_indptr, const I* __restrict__ c_indices,
                        long long rows, int across, long long a_batch, long long b_batch, long long batch,
                        const T* __restrict__ a, const T* __restrict__ b, T* c) {
  unsigned int count = static_cast<unsigned int>((rows + blockDim.y - 1) / blockDim.y), pass = blockIdx.x / count;
  long long row = static_cast<long long>(blockIdx.x - pass * count) * blockDim.y + threadIdx.y;
  int along = threadIdx.x / across, stride = 32 / across;
  long long sample = static_cast<long long>(pass) * across + threadIdx.x - along * across;
  if (row < rows) {
    long long first = c_indptr[row], last = sample < batch ? c_indptr[row + 1] : first;
    for (long long entry = first + along; entry < last; entry += stride) c[entry * batch + sample] = T(0);
    __syncwarp();
    for (long long p = a_indptr[row]; p < a_indptr[row + 1]; ++p) {
      I k = a_indices[p];
      if (first < last) {
        T value = a[of_sample(p, a_batch, sample)];
        for (long long q = b_indptr[k] + along; q < b_indptr[k + 1]; q += stride)
          c[find(c_indices, first, last, b_indices[q]) * batch + sample] += value * b[of_sample(q, b_batch, sample)];
      }
      __syncwarp();
    }
  }
}

// G B^T at A's entries, the gradient of a product with respect to A: an entry (i, k) sums over row k of B, whose
// columns are all in row i of G. A block takes a row of A. Columns are sorted: each search begins behind the last.
template <typename T, typename I>
__global__ void at_entries(const I* __restrict__ a_indptr, const I* __restrict__ a_indices,
                           const I* __restrict__ b_indptr, const I* __restrict__ b_indices,
                           const I* __restrict__ g_indptr, const I* __restrict__ g_indices, long long a_batch,
                           long long b_batch, long long batch, const T* __restrict__ g, const T* __restrict__ b,
                           T* __restrict__ out) {
  long long row = blockIdx.x, last = g_indptr[row + 1];
  for (long long i = a_indptr[row] * batch + threadIdx.x; i < a_indptr[row + 1] * batch; i += blockDim.x) {
    long long entry = i / batch, sample = i - entry * batch, k = a_indices[entry], at = g_indptr[row];
    T sum = T(0);
    for (long long q = b_indptr[k]; q < b_indptr[k + 1]; ++q) {
      at = find(g_indices, at, last, b_indices[q]);
      sum += g[of_sample(at, a_batch, sample)] * b[of_sample(q, b_batch, sample)];
    }
    out[i] = sum;
  }
}

// A is sparse, B full with `columns` columns; C has all rows, or those in which A has entries. A thread for each entry
// and sample.
template <typename T, typename I>
__global__ void sparse_full(long long rows, const I* __restrict__ indptr, const I* __restrict__ indices,
                            long long columns, const long long* __restrict__ c_indptr, long long a_batch,
                            long long b_batch, long long batch, const T* __restrict__ a, const T* __restrict__ b,
                            T* __restrict__ c) {
  long long width = columns * batch, all = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  long long row = all / width, i = all - row * width;
  if (row >= rows) return;
  long long first = indptr[row], last = indptr[row + 1];
  if (c_indptr[row] < c_indptr[row + 1]) {
    long long column = i / batch, sample = i - column * batch;
    T sum = T(0);
    for (long long p = first; p < last; ++p)
      sum += a[of_sample(p, a_batch, sample)] * b[of_sample(indices[p] * columns + column, b_batch, sample)];
    c[c_indptr[row] * batch + i] = sum;
  }
}

// A is full with `inner` columns, B sparse, by the rows and places of the entries of those columns that C has.
template <typename T, typename I>
__global__ void full_sparse(long long rows, long long inner, const I* __restrict__ starts, const I* __restrict__ row_of,
                            const I* __restrict__ place, long long columns, long long a_batch, long long b_batch,
                            long long batch, const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < rows * columns * batch) {
    long long entry = i / batch, sample = i - entry * batch, row = entry / columns, column = entry - row * columns;
    T sum = T(0);
    for (long long q = starts[column]; q < starts[column + 1]; ++q)
      sum += a[of_sample(row * inner + row_of[q], a_batch, sample)] * b[of_sample(place[q], b_batch, sample)];
    c[i] = sum;
  }
}

// y = A x: a warp for each row and sample.
template <typename T, typename I>
__global__ void matvec(const I* __restrict__ indptr, const I* __restrict__ indices, long long rows, long long a_batch,
                       long long b_batch, long long batch, const T* __restrict__ values, const T* __restrict__ x,
                       T* __restrict__ y) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i < rows * batch) {
    long long row = i / batch, sample = i - row * batch, last = indptr[row + 1];
    T sum = T(0);
    for (long long at = indptr[row] + threadIdx.x; at < last; at += 32)
      sum += values[of_sample(at, a_batch, sample)] * x[of_sample(indices[at], b_batch, sample)];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) y[i] = sum;
  }
}

// The same for many samples: a thread for each row and sample, samples side by side.
template <typename T, typename I>
__global__ void matvec_lanes(const I* __restrict__ indptr, const I* __restrict__ indices, long long rows,
                             long long a_batch, long long b_batch, long long batch, const T* __restrict__ values,
                             const T* __restrict__ x, T* __restrict__ y) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < rows * batch) {
    long long row = i / batch, sample = i - row * batch;
    T sum = T(0);
    for (long long at = indptr[row]; at < indptr[row + 1]; ++at)
      sum += values[of_sample(at, a_batch, sample)] * x[of_sample(indices[at], b_batch, sample)];
    y[i] = sum;
  }
}
