// Products of matrices of known structure, C = A B, and a matrix times vectors.
//
// Values are (entries, batch), the batch innermost; a factor whose batch is 1 is shared by all samples, so a sample's
// value stands at `entry * batch + (batch > 1 ? sample : 0)`. Every sum is taken in an order that the plan alone decides.
//
// Floors, for each sample, with n multiply-adds and values of w bytes: C written once and the factors read once; and
//   scale    one factor's values read, C written, 4 or 8 bytes of index for each entry where columns are scaled;
//   merge    2 indices for each multiply-add, read once for all samples that are side by side in a warp;
//   rows     1 slot (2 or 4 bytes) for each multiply-add, or log2(row of C) reads of its columns for a search;
//   select   one index and log2(row of A) reads for each entry of C;
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
__global__ void scale_rows(const I* __restrict__ indptr, const T* __restrict__ d, long long d_batch,
                           const T* __restrict__ values, long long values_batch, long long rows, long long batch,
                           T* __restrict__ c) {
  long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row < rows) {
    long long last = indptr[row + 1] * batch;
    for (long long i = indptr[row] * batch + threadIdx.x; i < last; i += blockDim.x) {
      long long entry = i / batch, sample = i - entry * batch;
      c[i] = d[of_sample(row, d_batch, sample)] * values[of_sample(entry, values_batch, sample)];
    }
  }
}

// C = A diag(d): a thread for each entry and sample.
template <typename T, typename I>
__global__ void scale_columns(const I* __restrict__ indices, const T* __restrict__ d, long long d_batch,
                              const T* __restrict__ values, long long values_batch, long long nnz, long long batch,
                              T* __restrict__ c) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < nnz * batch) {
    long long entry = i / batch, sample = i - entry * batch;
    c[i] = values[of_sample(entry, values_batch, sample)] * d[of_sample(indices[entry], d_batch, sample)];
  }
}

// A list of pairs for each entry of C: a thread for each entry and sample, samples side by side.
template <typename T, typename I>
__global__ void merge(const long long* __restrict__ starts, const I* __restrict__ left, const I* __restrict__ right,
                      const T* __restrict__ a, long long a_batch, const T* __restrict__ b, long long b_batch,
                      long long nnz, long long batch, T* __restrict__ c) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < nnz * batch) {
    long long entry = i / batch, sample = i - entry * batch, last = starts[entry + 1];
    T sum = T(0);
    for (long long at = starts[entry]; at < last; ++at)
      sum += a[of_sample(left[at], a_batch, sample)] * b[of_sample(right[at], b_batch, sample)];
    c[i] = sum;
  }
}

// The same for long lists and few samples: a warp for each entry and sample, its lanes side by side along the list.
template <typename T, typename I>
__global__ void merge_long(const long long* __restrict__ starts, const I* __restrict__ left, const I* __restrict__ right,
                           const T* __restrict__ a, long long a_batch, const T* __restrict__ b, long long b_batch,
                           long long nnz, long long batch, T* __restrict__ c) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i < nnz * batch) {
    long long entry = i / batch, sample = i - entry * batch, last = starts[entry + 1];
    T sum = T(0);
    for (long long at = starts[entry] + threadIdx.x; at < last; at += 32)
      sum += a[of_sample(left[at], a_batch, sample)] * b[of_sample(right[at], b_batch, sample)];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) c[i] = sum;
  }
}

// The place of a multiply-add's column in its row of C, read from the slots of the plan.
template <typename I, typename S>
struct Written {
  const S* slots;
  __device__ __forceinline__ long long operator()(long long t, long long, const I*, long long, long long) const {
    return slots[t];
  }
};
// The same place, searched among the row's columns.
template <typename I>
struct Searched {
  const I* columns;
  __device__ __forceinline__ long long operator()(long long, long long q, const I* b_indices, long long first,
                                                  long long last) const {
    return find(columns, first, last, b_indices[q]) - first;
  }
};

// A warp for each row of C and sample. The row's sums are in shared memory, `capacity` of them at a time. The lanes
// take the entries of a row of B, which are all in different columns. They read 32 entries of A ahead and share them.
template <typename T, typename I, typename Place>
__device__ __forceinline__ void add_rows(const int* __restrict__ rows, long long count, const long long* __restrict__ work,
                                         const I* __restrict__ a_indptr, const I* __restrict__ a_indices,
                                         const I* __restrict__ b_indptr, const I* __restrict__ b_indices,
                                         const I* __restrict__ c_indptr, Place place, const T* __restrict__ a,
                                         long long a_batch, const T* __restrict__ b, long long b_batch, long long batch,
                                         int capacity, T* __restrict__ c) {
  DYNAMIC_SHARED(T, memory);
  T* sums = memory + static_cast<long long>(threadIdx.y) * capacity;
  long long item = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  int lane = threadIdx.x;
  if (item >= count * batch) return;
  long long sample = item / count, row = rows[item - sample * count];
  long long first = c_indptr[row], last = c_indptr[row + 1];
  for (long long from = first; from < last; from += capacity) {
    int length = static_cast<int>(min(static_cast<long long>(capacity), last - from));
    for (int i = lane; i < length; i += 32) sums[i] = T(0);
    __syncwarp();
    long long t = work[row], end = a_indptr[row + 1];
    for (long long p = a_indptr[row]; p < end; p += 32) {
      int ahead = static_cast<int>(min(32LL, end - p));
      long long own_begin = 0, own_end = 0;
      T own_value = T(0);
      if (lane < ahead) {
        I k = a_indices[p + lane];
        own_begin = b_indptr[k], own_end = b_indptr[k + 1];
        own_value = a[of_sample(p + lane, a_batch, sample)];
      }
      for (int j = 0; j < ahead; ++j) {
        long long begin = __shfl_sync(0xffffffffu, own_begin, j), stop = __shfl_sync(0xffffffffu, own_end, j);
        T value = __shfl_sync(0xffffffffu, own_value, j);
        for (long long q = begin + lane; q < stop; q += 32) {
          long long at = place(t + (q - begin), q, b_indices, first, last) - (from - first);
          if (at >= 0 && at < length) sums[at] += value * b[of_sample(q, b_batch, sample)];
        }
        t += stop - begin;
        __syncwarp();
      }
    }
    for (int i = lane; i < length; i += 32) c[(from + i) * batch + sample] = sums[i];
    __syncwarp();
  }
}

template <typename T, typename I, typename S>
__global__ void slots(const int* __restrict__ rows, long long count, const long long* __restrict__ work,
                      const I* __restrict__ a_indptr, const I* __restrict__ a_indices, const I* __restrict__ b_indptr,
                      const I* __restrict__ b_indices, const I* __restrict__ c_indptr, const S* __restrict__ slot,
                      const T* __restrict__ a, long long a_batch, const T* __restrict__ b, long long b_batch,
                      long long batch, int capacity, T* __restrict__ c) {
  add_rows(rows, count, work, a_indptr, a_indices, b_indptr, b_indices, c_indptr, Written<I, S>{slot}, a, a_batch, b,
           b_batch, batch, capacity, c);
}

template <typename T, typename I>
__global__ void rowwise(const int* __restrict__ rows, long long count, const long long* __restrict__ work,
                        const I* __restrict__ a_indptr, const I* __restrict__ a_indices, const I* __restrict__ b_indptr,
                        const I* __restrict__ b_indices, const I* __restrict__ c_indptr, const I* __restrict__ c_indices,
                        const T* __restrict__ a, long long a_batch, const T* __restrict__ b, long long b_batch,
                        long long batch, int capacity, T* __restrict__ c) {
  add_rows(rows, count, work, a_indptr, a_indices, b_indptr, b_indices, c_indptr, Searched<I>{c_indices}, a, a_batch, b,
           b_batch, batch, capacity, c);
}

// The same for many samples: a thread for each row and sample, samples side by side, with the sums in C's memory.
// Blocks take all rows with 32 samples, then with the next 32.
template <typename T, typename I, typename Place>
__device__ __forceinline__ void add_lanes(long long rows, const long long* __restrict__ work,
                                          const I* __restrict__ a_indptr, const I* __restrict__ a_indices,
                                          const I* __restrict__ b_indptr, const I* __restrict__ b_indices,
                                          const I* __restrict__ c_indptr, Place place, const T* __restrict__ a,
                                          long long a_batch, const T* __restrict__ b, long long b_batch, long long batch,
                                          T* __restrict__ c) {
  long long across = (rows + blockDim.y - 1) / blockDim.y, pass = blockIdx.x / across;
  long long row = (blockIdx.x - pass * across) * blockDim.y + threadIdx.y, sample = pass * 32 + threadIdx.x;
  if (row >= rows || sample >= batch) return;
  long long first = c_indptr[row], last = c_indptr[row + 1], t = work[row];
  for (long long entry = first; entry < last; ++entry) c[entry * batch + sample] = T(0);
  for (long long p = a_indptr[row]; p < a_indptr[row + 1]; ++p) {
    I k = a_indices[p];
    T value = a[of_sample(p, a_batch, sample)];
    for (long long q = b_indptr[k]; q < b_indptr[k + 1]; ++q, ++t)
      c[(first + place(t, q, b_indices, first, last)) * batch + sample] += value * b[of_sample(q, b_batch, sample)];
  }
}

template <typename T, typename I, typename S>
__global__ void slots_lanes(long long rows, const long long* __restrict__ work, const I* __restrict__ a_indptr,
                            const I* __restrict__ a_indices, const I* __restrict__ b_indptr,
                            const I* __restrict__ b_indices, const I* __restrict__ c_indptr, const S* __restrict__ slot,
                            const T* __restrict__ a, long long a_batch, const T* __restrict__ b, long long b_batch,
                            long long batch, T* __restrict__ c) {
  add_lanes(rows, work, a_indptr, a_indices, b_indptr, b_indices, c_indptr, Written<I, S>{slot}, a, a_batch, b, b_batch,
            batch, c);
}

template <typename T, typename I>
__global__ void rowwise_lanes(long long rows, const long long* __restrict__ work, const I* __restrict__ a_indptr,
                              const I* __restrict__ a_indices, const I* __restrict__ b_indptr,
                              const I* __restrict__ b_indices, const I* __restrict__ c_indptr,
                              const I* __restrict__ c_indices, const T* __restrict__ a, long long a_batch,
                              const T* __restrict__ b, long long b_batch, long long batch, T* __restrict__ c) {
  add_lanes(rows, work, a_indptr, a_indices, b_indptr, b_indices, c_indptr, Searched<I>{c_indices}, a, a_batch, b,
            b_batch, batch, c);
}

// The left factor selects: row i of C is the sum of the rows of B whose windows i wins. A block for each row takes the
// rows of B one after the other.
template <typename T, typename I, typename S>
__global__ void select_left(const long long* __restrict__ work, const I* __restrict__ a_indptr,
                            const I* __restrict__ a_indices, const I* __restrict__ b_indptr,
                            const I* __restrict__ c_indptr, const S* __restrict__ slot, const int* __restrict__ winner,
                            const T* __restrict__ b, long long b_batch, long long batch, T* __restrict__ c) {
  long long row = blockIdx.x, start = c_indptr[row] * batch, t = work[row];
  for (long long i = start + threadIdx.x; i < c_indptr[row + 1] * batch; i += blockDim.x) c[i] = T(0);
  __syncthreads();
  for (long long p = a_indptr[row]; p < a_indptr[row + 1]; ++p) {
    long long window = a_indices[p], first = b_indptr[window], length = b_indptr[window + 1] - first;
    for (long long i = threadIdx.x; i < length * batch; i += blockDim.x) {
      long long q = i / batch, sample = i - q * batch;
      if (winner[window * batch + sample] == row)
        c[start + slot[t + q] * batch + sample] += b[of_sample(first + q, b_batch, sample)];
    }
    t += length;
    __syncthreads();
  }
}

// The right factor selects: an entry (i, window) of C is A's at (i, winner of the window), if there is one.
template <typename T, typename I>
__global__ void select_right(const I* __restrict__ a_indptr, const I* __restrict__ a_indices,
                             const I* __restrict__ c_indptr, const I* __restrict__ c_indices, const T* __restrict__ a,
                             long long a_batch, const int* __restrict__ winner, const I* __restrict__ b_indptr,
                             const I* __restrict__ b_indices, long long inner, long long batch, T* __restrict__ c) {
  long long row = blockIdx.x, first = a_indptr[row], last = a_indptr[row + 1];
  for (long long i = c_indptr[row] * batch + threadIdx.x; i < c_indptr[row + 1] * batch; i += blockDim.x) {
    long long entry = i / batch, sample = i - entry * batch;
    I window = c_indices[entry];
    int k = winner[window * batch + sample];
    T value = T(0);
    // A winner that is no row of its window selects nothing.
    if (k >= 0 && k < inner && find(b_indices, b_indptr[k], b_indptr[k + 1], window) >= 0) {
      long long at = find(a_indices, first, last, static_cast<I>(k));
      if (at >= 0) value = a[of_sample(at, a_batch, sample)];
    }
    c[i] = value;
  }
}

// G B^T at A's entries, the gradient of a product with respect to A: an entry (i, k) sums over row k of B, whose
// columns are all in row i of G. A block takes a row of A. Columns are sorted: each search begins behind the last.
template <typename T, typename I>
__global__ void at_entries(const I* __restrict__ a_indptr, const I* __restrict__ a_indices,
                           const I* __restrict__ b_indptr, const I* __restrict__ b_indices,
                           const I* __restrict__ g_indptr, const I* __restrict__ g_indices, const T* __restrict__ g,
                           long long g_batch, const T* __restrict__ b, long long b_batch, long long batch,
                           T* __restrict__ out) {
  long long row = blockIdx.x, last = g_indptr[row + 1];
  for (long long i = a_indptr[row] * batch + threadIdx.x; i < a_indptr[row + 1] * batch; i += blockDim.x) {
    long long entry = i / batch, sample = i - entry * batch, k = a_indices[entry], at = g_indptr[row];
    T sum = T(0);
    for (long long q = b_indptr[k]; q < b_indptr[k + 1]; ++q) {
      at = find(g_indices, at, last, b_indices[q]);
      sum += g[of_sample(at, g_batch, sample)] * b[of_sample(q, b_batch, sample)];
    }
    out[i] = sum;
  }
}

// A is sparse, B full with `columns` columns; C has all rows, or those in which A has entries. A thread for each entry
// and sample.
template <typename T, typename I>
__global__ void sparse_full(long long rows, const I* __restrict__ indptr, const I* __restrict__ indices,
                            long long columns, const long long* __restrict__ c_indptr, const T* __restrict__ a,
                            long long a_batch, const T* __restrict__ b, long long b_batch, long long batch,
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
                            const I* __restrict__ place, long long columns, const T* __restrict__ a, long long a_batch,
                            const T* __restrict__ b, long long b_batch, long long batch, T* __restrict__ c) {
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
__global__ void matvec(const I* __restrict__ indptr, const I* __restrict__ indices, const T* __restrict__ values,
                       long long values_batch, const T* __restrict__ x, long long x_batch, long long rows,
                       long long batch, T* __restrict__ y) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i < rows * batch) {
    long long row = i / batch, sample = i - row * batch, last = indptr[row + 1];
    T sum = T(0);
    for (long long at = indptr[row] + threadIdx.x; at < last; at += 32)
      sum += values[of_sample(at, values_batch, sample)] * x[of_sample(indices[at], x_batch, sample)];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) y[i] = sum;
  }
}

// The same for many samples: a thread for each row and sample, samples side by side.
template <typename T, typename I>
__global__ void matvec_lanes(const I* __restrict__ indptr, const I* __restrict__ indices, const T* __restrict__ values,
                             long long values_batch, const T* __restrict__ x, long long x_batch, long long rows,
                             long long batch, T* __restrict__ y) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < rows * batch) {
    long long row = i / batch, sample = i - row * batch;
    T sum = T(0);
    for (long long at = indptr[row]; at < indptr[row + 1]; ++at)
      sum += values[of_sample(at, values_batch, sample)] * x[of_sample(indices[at], x_batch, sample)];
    y[i] = sum;
  }
}
