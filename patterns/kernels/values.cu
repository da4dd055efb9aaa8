// Values of Jacobians: each kernel makes one pass over memory.
//
// Values have the batch innermost, (entries, batch); PyTorch's tensors have it outermost. No kernel can be faster than
// the copy bandwidth allows for the bytes that it reads and writes. take: 4 or 8 bytes of index, one element read and
// one written for each entry; repeat_rows: two elements for each entry (rows' starts are few); positive: two elements
// for each entry and sample; selected: 8 bytes of winner once, 2 indices for each entry, one element written for each
// entry and sample; note_infinite: one element read.

// out[i] = source[place[i]]
template <typename T, typename I>
__global__ void take(const T* __restrict__ source, const I* __restrict__ place, long long count, T* __restrict__ out) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = source[place[i]];
}

// Row r of the output is a run of the source that begins at start[r]. The threads of one threadIdx.y copy it.
template <typename T, typename I>
__global__ void repeat_rows(const T* __restrict__ source, const long long* __restrict__ start,
                            const I* __restrict__ indptr, long long rows, T* __restrict__ out) {
  long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row < rows) {
    long long first = indptr[row], last = indptr[row + 1], shift = start[row] - first;
    for (long long i = first + threadIdx.x; i < last; i += blockDim.x) out[i] = source[i + shift];
  }
}

// One where an element is not <= 0 (PyTorch lets the gradient of a NaN pass), transposed in tiles of 32 x 32; the tiles
// of the first 32 samples come first.
template <typename T>
__global__ void positive(const T* __restrict__ source, long long batch, long long elements, T* __restrict__ out) {
  SHARED(T, tile, 32 * 33);
  long long across = (elements + 31) / 32, pass = blockIdx.x / across;
  long long first_element = (blockIdx.x - pass * across) * 32, first_sample = pass * 32;
  for (int j = threadIdx.y; j < 32; j += blockDim.y) {
    long long element = first_element + threadIdx.x, sample = first_sample + j;
    if (element < elements && sample < batch)
      tile[j * 33 + threadIdx.x] = source[sample * elements + element] <= T(0) ? T(0) : T(1);
  }
  __syncthreads();
  for (int j = threadIdx.y; j < 32; j += blockDim.y) {
    long long element = first_element + j, sample = first_sample + threadIdx.x;
    if (element < elements && sample < batch) out[element * batch + sample] = tile[threadIdx.x * 33 + j];
  }
}

// One for each entry whose position wins its window; winners are (windows, batch).
template <typename T, typename I>
__global__ void selected(const long long* __restrict__ winner, const I* __restrict__ window, const I* __restrict__ position,
                         long long entries, long long batch, T* __restrict__ out) {
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < entries * batch) {
    long long entry = i / batch, sample = i - entry * batch;
    out[i] = winner[window[entry] * batch + sample] == position[entry] ? T(1) : T(0);
  }
}

// Sets a number, mostly in the host's memory, where a value is not finite.
template <typename T>
__global__ void note_infinite(const T* __restrict__ values, long long count, int* infinite) {
  long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  bool finite = true;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    finite = finite && isfinite(values[i]);
  if (!finite) atomicExch(infinite, 1);
}
