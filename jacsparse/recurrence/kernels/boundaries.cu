// The states between chunks: those that chunks' transfer matrices lead to, and whether guessed ones fit.
//
// A chunk is a run of steps; `table` names that at each place of each sample, (places, batch), in the order in which
// the recurrence gets to them, and `chunks` says how many each sample has. Decisions stay on the device: a run that
// need not be run again gets no steps, and then ends where it is said to start.
//
// Floors: `walk` reads (H + 1) H elements of each run, one after the other of a sample: what memory takes to answer,
// two barriers and H / 8 multiply-adds each, the next matrix being under way. `judge` reads and writes two states of
// each run.

template <typename T>
__device__ __forceinline__ T largest_of_block(T value, T* shared) {
  for (int apart = 16; apart; apart /= 2) {
    T other = __shfl_xor_sync(0xffffffffu, value, apart);
    value = other > value ? other : value;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) value = shared[warp] > value ? shared[warp] : value;
  return value;
}

// In size; infinity for what is no number.
template <typename T>
__device__ __forceinline__ T size_of(T value) {
  value = fabs(value);
  return value >= T(0) ? value : T(INFINITY);
}

// Writes what is left of a sample whose states cannot be had by chunks: from its run at a place on, in the recurrence's
// order; nothing from beyond the last place. Backward a sample is left from its first step up to that run's last one.
__device__ __forceinline__ void leave(const long long* table, const long long* begin, const long long* count, int batch,
                                      int sample, int chunks, int place, bool back, long long* rest_begin,
                                      long long* rest_count) {
  long long steps = 0, first = back ? chunks - 1 : place;
  for (int p = place; p < chunks; ++p) steps += count[table[p * static_cast<long long>(batch) + sample]];
  rest_begin[sample] = steps ? begin[table[first * batch + sample]] : 0, rest_count[sample] = steps;
}

// After a sweep: compares the states from which runs were taken, `guess`, with those that follow from it, `following`
// or the `ends` of the runs before. A block takes a sample; one whose `previous` defect was within the tolerance is
// left as it is.
//
// Where these move by more than `tolerance` of the largest state (and of `least`), runs whose first state moves are to
// be taken again: `again` steps from `start`, and `guess` is that. Others get no steps, and their own end as a start.
// `defect` is the largest move. What has not settled at the last sweep is to be finished by a run of `rest_count`
// steps.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    judge(const long long* __restrict__ table, const long long* __restrict__ chunks,
          const long long* __restrict__ begin, const long long* __restrict__ count, int batch, int size, bool back,
          const T* __restrict__ ends, const T* __restrict__ following, const T* __restrict__ edge,
          const T* __restrict__ previous, T tolerance, T least, T* __restrict__ guess, T* __restrict__ start,
          long long* __restrict__ again, T* __restrict__ defect, long long* __restrict__ rest_begin,
          long long* __restrict__ rest_count, T* __restrict__ rest_start) {
  SHARED(T, shared, 32);
  SHARED(int, first, 1);
  int sample = blockIdx.x, places = chunks[sample];
  if (previous && previous[sample] <= tolerance) {
    if (!threadIdx.x) defect[sample] = previous[sample];
    return;
  }
  auto run_at = [&](int place) { return table[place * static_cast<long long>(batch) + sample]; };
  auto wanted = [&](int place, int k) {
    if (!place) return edge[sample * static_cast<long long>(size) + k];
    T end = ends[run_at(place - 1) * size + k];
    if (!following) return end;
    T solved = following[run_at(place) * size + k];
    return size_of(solved) < T(INFINITY) ? solved : end;
  };
  T scale = T(0), moved = T(0);
  for (int e = threadIdx.x; e < places * size; e += blockDim.x) {
    int place = e / size, k = e % size;
    T value = wanted(place, k), found = size_of(value), by = size_of(value - guess[run_at(place) * size + k]);
    scale = found > scale ? found : scale, moved = by > moved ? by : moved;
  }
  if (!threadIdx.x) *first = places;
  scale = largest_of_block(scale, shared), moved = largest_of_block(moved, shared);
  T relative = size_of(moved / (scale > least ? scale : least));
  bool settled = relative <= tolerance, hopeful = relative < T(INFINITY);
  for (int place = threadIdx.x / 32; place < places; place += blockDim.x / 32) {
    long long run = run_at(place);
    bool differs = false;
    for (int k = threadIdx.x % 32; k < size; k += 32) {
      T value = wanted(place, k);
      differs = differs || value != guess[run * size + k];
    }
    differs = __any_sync(0xffffffffu, differs) && !settled;
    bool repeat = differs && hopeful;
    for (int k = threadIdx.x % 32; k < size; k += 32) {
      T value = repeat ? wanted(place, k) : ends[run * size + k];
      start[run * size + k] = value;
      if (repeat) guess[run * size + k] = value;
    }
    if (threadIdx.x % 32 == 0) {
      again[run] = repeat ? count[run] : 0;
      if (differs) atomicMin(first, place);
    }
  }
  __syncthreads();
  int place = *first;
  bool late = place < places;
  if (!threadIdx.x) {
    defect[sample] = relative;
    leave(table, begin, count, batch, sample, places, place, back, rest_begin, rest_count);
  }
  // Where guesses were made by the ends before, those are it: of a run that is right, they lead to a right one.
  for (int k = threadIdx.x; k < size; k += blockDim.x) {
    T value = !late    ? ends[run_at(places - 1) * size + k]
              : !place ? edge[sample * static_cast<long long>(size) + k]
                       : ends[run_at(place - 1) * size + k];
    rest_start[sample * static_cast<long long>(size) + k] = value;
  }
}

// s <- s M + o from run to run of a sample: writes the states before each. A block takes a sample; groups of its
// threads multiply some of the rows of M each, of which o is the last one. The first SHARE of them are read a matrix
// ahead.
//
// A sample whose states overflow is to be finished by a run of all its steps, `rest_count`, from `edge`; one whose
// `previous` defect was within the tolerance is left as it is.
constexpr int SHARE = 17;

template <typename T>
__global__ void __launch_bounds__(512, 1)
    walk(const long long* __restrict__ table, const long long* __restrict__ chunks, const long long* __restrict__ begin,
         const long long* __restrict__ count, int batch, int size, bool back, const T* __restrict__ matrices,
         const T* __restrict__ edge, const T* __restrict__ previous, T tolerance, T* __restrict__ start,
         long long* __restrict__ rest_begin, long long* __restrict__ rest_count) {
  SHARED(T, state, 512 + 1);
  SHARED(T, sums, 512);
  SHARED(int, lost, 1);
  int sample = blockIdx.x, places = chunks[sample], width = (size + 31) / 32 * 32, groups = blockDim.x / width;
  int j = threadIdx.x % width, group = threadIdx.x / width, share = (size + groups) / groups;
  if (previous && previous[sample] <= tolerance) return;
  // The rows of its column that a thread multiplies: none, for the threads that fill up a warp.
  int top = group * share, rows = j < size ? min(share, size + 1 - top) : 0;
  auto run_at = [&](int place) { return table[place * static_cast<long long>(batch) + sample]; };
  if (threadIdx.x < size) state[threadIdx.x] = edge[sample * static_cast<long long>(size) + threadIdx.x];
  if (!threadIdx.x) state[size] = T(1), *lost = 0;
  T coming[SHARE];
  auto fetch = [&](long long run) {
    const T* entry = matrices + (run * (size + 1) + top) * size + j;
#pragma unroll
    for (int i = 0; i < SHARE; ++i, entry += size) coming[i] = i < rows ? *entry : T(0);
  };
  // Which matrix comes next is known a place before it is read.
  long long run = run_at(0), following = run_at(places > 1 ? 1 : 0);
  fetch(run);
  bool finite = true;
  for (int place = 0; place < places; ++place) {
    __syncthreads();
    if (threadIdx.x < size) {
      T own = state[threadIdx.x];
      start[run * size + threadIdx.x] = own;
      finite = finite && size_of(own) < T(INFINITY);
    }
    T sum = T(0);
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      if (i < rows) sum += coming[i] * state[top + i];
    }
    for (int i = SHARE; i < rows; ++i) {
      sum += matrices[(run * (size + 1) + top + i) * size + j] * state[top + i];
    }
    sums[threadIdx.x] = sum;
    run = following;
    if (place + 1 < places) fetch(run);
    following = run_at(place + 2 < places ? place + 2 : places - 1);
    __syncthreads();
    if (threadIdx.x < size) {
      T total = T(0);
      for (int other = 0; other < groups; ++other) total += sums[other * width + threadIdx.x];
      state[threadIdx.x] = total;
    }
  }
  if (!finite) atomicExch(lost, 1);
  __syncthreads();
  if (!threadIdx.x) leave(table, begin, count, batch, sample, places, *lost ? 0 : places, back, rest_begin, rest_count);
}

// As `walk`, element by element: `matrices` has the diagonals, (runs, size), and `offsets` what is added.
template <typename T>
__global__ void __launch_bounds__(256, 1)
    walk_diagonals(const long long* __restrict__ table, const long long* __restrict__ chunks,
                   const long long* __restrict__ begin, const long long* __restrict__ count, int batch, int size,
                   bool back, const T* __restrict__ matrices, const T* __restrict__ offsets, const T* __restrict__ edge,
                   T* __restrict__ start, long long* __restrict__ rest_begin, long long* __restrict__ rest_count) {
  SHARED(int, lost, 1);
  int sample = blockIdx.x, places = chunks[sample];
  if (!threadIdx.x) *lost = 0;
  __syncthreads();
  for (int j = threadIdx.x; j < size; j += blockDim.x) {
    T own = edge[sample * static_cast<long long>(size) + j];
    bool finite = true;
    for (int place = 0; place < places; ++place) {
      long long at = table[place * static_cast<long long>(batch) + sample] * size + j;
      start[at] = own;
      finite = finite && size_of(own) < T(INFINITY);
      own = matrices[at] * own + offsets[at];
    }
    if (!finite) atomicExch(lost, 1);
  }
  __syncthreads();
  if (!threadIdx.x) leave(table, begin, count, batch, sample, places, *lost ? 0 : places, back, rest_begin, rest_count);
}
