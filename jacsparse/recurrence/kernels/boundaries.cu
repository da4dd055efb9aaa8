// The states between chunks: those that chunks' transfer matrices lead to, and whether guessed ones fit.
//
// A chunk is a run of steps; `table` names that at each place of each sample, (places, batch), in the order in which
// the recurrence gets to them, and `chunks` says how many each sample has. Decisions stay on the device: a run that
// need not be run again gets no steps, and then ends where it is said to start.
//
// States go from chunk to chunk in one level, or in two: then `stride` consecutive chunks of a sample are a group, of
// which `compose_chunks` makes one matrix, and a block for each group goes over the groups before its own, and through
// its own. Groups are numbered sample by sample, in the order of the recurrence. In one level a sample is one group.
//
// Floors, of `walk`: (H + 1) H elements of each run and, for each group, of each group before it, are read one after
// the other: what memory takes to answer, two barriers and H / 8 multiply-adds each, the next matrix being under way.
// `compose_offsets` takes as much of each run, `compose_chunks` H^2 (H + 1) multiply-adds of each. `judge` reads and
// writes two states of each run, `unfinished` reads one.
#include "runs.cuh"

template <typename T>
__device__ __forceinline__ T largest_of_warp(T value) {
  for (int apart = 16; apart; apart /= 2) {
    T other = __shfl_xor_sync(0xffffffffu, value, apart);
    value = other > value ? other : value;
  }
  return value;
}

template <typename T>
__device__ __forceinline__ T largest_of_block(T value, T* shared) {
  value = largest_of_warp(value);
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
// Moves are shares of the sample's largest element or, with `local` elements of a state that enter products, of the
// element itself or the largest of these, whichever is larger. Where one is more than `tolerance`, runs whose first state
// moves are to be taken again: `again` steps from `start`, and `guess` is that. Others get no steps, and their own end as
// a start. `defect` is the largest move. What has not settled at the last sweep is to be finished by a run of `rest_count`
// steps.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    judge(const long long* __restrict__ table, const long long* __restrict__ chunks,
          const long long* __restrict__ begin, const long long* __restrict__ count, int batch, int size, bool back,
          const T* __restrict__ ends, const T* __restrict__ following, const T* __restrict__ edge,
          const T* __restrict__ previous, T tolerance, T least, int local, T* __restrict__ guess, T* __restrict__ start,
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
  for (int place = threadIdx.x / 32; place < places; place += blockDim.x / 32) {
    T largest = least;
    for (int k = threadIdx.x % 32; k < local; k += 32) {
      T found = size_of(wanted(place, k));
      largest = found > largest ? found : largest;
    }
    largest = largest_of_warp(largest);
    for (int k = threadIdx.x % 32; k < size; k += 32) {
      T value = wanted(place, k), found = size_of(value), whole = !local ? T(1) : found > largest ? found : largest;
      T by = size_of((value - guess[run_at(place) * size + k]) / whole);
      scale = found > scale ? found : scale, moved = by > moved ? by : moved;
    }
  }
  if (!threadIdx.x) *first = places;
  scale = largest_of_block(scale, shared), moved = largest_of_block(moved, shared);
  T relative = size_of(local ? moved : moved / (scale > least ? scale : least));
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

// s <- s M + o through some maps (M and below it o), each (size + 1, size) in `maps`: where(i) says which is the i-th.
// `state` has size + 1 elements, the last of them 1, and is what comes of it once a block's threads have met. Groups of
// a block's threads multiply some of the rows of M each; the first SHARE of them are read a matrix ahead.
//
// With `ends`, (runs, size), maps are those of runs that were taken from the states `base` to the states `ends`, and s
// is how far the first state of a run has to move until these fit. What is added is then not o, but the gap from the
// run's end to the start of the one after it, where(i + 1). record(number, base, state) gets each state that comes to a
// map.
constexpr int SHARE = 17;

template <typename T, typename Where, typename Record>
__device__ __forceinline__ void go_along(int steps, int size, const T* maps, const double* ends, const double* base,
                                         T* state, T* sums, Where where, Record record) {
  int width = (size + 31) / 32 * 32, groups = blockDim.x / width, thread = threadIdx.x;
  int j = thread % width, depth = ends ? size : size + 1, share = (depth + groups - 1) / groups;
  // The rows of its column that a thread multiplies: none, for the threads that fill up a warp.
  int top = thread / width * share, rows = j < size ? min(share, depth - top) : 0;
  bool has_gaps = ends && thread < size;
  T coming[SHARE];
  auto fetch = [&](long long number) {
    const T* entry = maps + (number * (size + 1) + top) * size + j;
#pragma unroll
    for (int i = 0; i < SHARE; ++i, entry += size) coming[i] = i < rows ? *entry : T(0);
  };
  // Which map comes next is known two of them before it is read.
  long long number = where(0), next = where(1), third = where(2);
  double end = 0, begins = 0, next_begins = 0;
  if (has_gaps) end = ends[number * size + thread], begins = base[number * size + thread];
  if (has_gaps && steps) next_begins = base[next * size + thread];
  if (steps) fetch(number);
  for (int i = 0; i < steps; ++i) {
    __syncthreads();
    if (thread < size) record(number, begins, state[thread]);
    T sum = T(0);
#pragma unroll
    for (int k = 0; k < SHARE; ++k) {
      if (k < rows) sum += coming[k] * state[top + k];
    }
    for (int k = SHARE; k < rows; ++k) sum += maps[(number * (size + 1) + top + k) * size + j] * state[top + k];
    sums[thread] = sum;
    T added = T(end - next_begins);
    number = next, next = third, begins = next_begins;
    if (i + 1 < steps) {
      fetch(number);
      if (has_gaps) end = ends[number * size + thread], next_begins = base[next * size + thread];
    }
    third = where(i + 3);
    __syncthreads();
    if (thread < size) {
      T total = added;
      for (int group = 0; group < groups; ++group) total += sums[group * width + thread];
      state[thread] = total;
    }
  }
  __syncthreads();
  if (thread < size) record(number, begins, state[thread]);
}

// The states before each run of a group: a block goes from `edge`, or zeros, over the groups before, and through its
// own. They are what `go_along` comes to, or `base` and that. A sample whose `previous` defect was within the tolerance
// is left as it is.
template <typename T, typename S>
__global__ void __launch_bounds__(512, 1)
    walk(const long long* __restrict__ group_sample, const long long* __restrict__ group_begin,
         const long long* __restrict__ group_count, const long long* __restrict__ table, int batch, int size,
         int stride, const T* __restrict__ matrices, const T* __restrict__ composed, const T* __restrict__ edge,
         const T* __restrict__ previous, T tolerance, const double* __restrict__ ends, const double* __restrict__ base,
         S* __restrict__ start) {
  SHARED(T, state, 512 + 1);
  SHARED(T, sums, 512);
  int sample = group_sample[blockIdx.x], begin = group_begin[blockIdx.x], last = group_count[blockIdx.x] - 1;
  if (previous && previous[sample] <= tolerance) return;
  if (threadIdx.x < size) state[threadIdx.x] = edge ? edge[sample * static_cast<long long>(size) + threadIdx.x] : T(0);
  if (!threadIdx.x) state[size] = T(1);
  int groups = begin / stride;
  long long first = static_cast<long long>(blockIdx.x) - groups;
  if (groups) {
    go_along<T>(
        groups, size, composed, nullptr, nullptr, state, sums, [&](int i) { return first + i; },
        [](long long, double, T) {});
  }
  go_along<T>(
      last, size, matrices, ends, base, state, sums,
      [&](int i) { return table[(begin + (i < last ? i : last)) * static_cast<long long>(batch) + sample]; },
      [&](long long run, double begins, T own) { start[run * size + threadIdx.x] = static_cast<S>(begins + own); });
}

// What the steps of a group's runs are together. Of a sample's last group nobody asks for it.
template <typename T>
struct ChunkFormer {
  Run run;
  int size;
  const long long* table;
  const T* matrices;
  T more;

  __device__ __forceinline__ const T* of(int i) const {
    long long number = table[run.time(i) * static_cast<long long>(run.batch) + run.sample];
    return matrices + number * (size + 1) * size;
  }
  __device__ __forceinline__ void fetch(int i) {
    if (threadIdx.x < size) more = of(i)[static_cast<long long>(size) * size + threadIdx.x];
  }
  __device__ __forceinline__ void prepare(T* coefficients) const {
    if (threadIdx.x < size) coefficients[threadIdx.x] = more;
  }
  __device__ __forceinline__ void entries(const T*, int i, int k, int j, Four<T>& four) const {
    const T* row = of(i) + static_cast<long long>(k) * size;
#pragma unroll
    for (int c = 0; c < 4; ++c) four.at[c] = j + c < size ? row[j + c] : T(0);
  }
};

template <typename T, int ROWS>
__global__ void __launch_bounds__(320, 1)
    compose_chunks(const long long* __restrict__ group_sample, const long long* __restrict__ group_begin,
                   const long long* __restrict__ group_count, const long long* __restrict__ table,
                   const long long* __restrict__ chunks, int batch, int size, int share,
                   const T* __restrict__ matrices, T* __restrict__ out) {
  Run run = run_of(group_sample, group_begin, group_count, 1, nullptr, batch, false, blockIdx.x);
  int steps = run.begin + run.steps < chunks[run.sample] ? run.steps : 0;
  ChunkFormer<T> former = {run, size, table, matrices, T(0)};
  compose<T, ROWS, 1>(former, steps, size, share, out + blockIdx.x * static_cast<long long>(size + 1) * size);
}

// The offsets of composed chunks anew, for other `ends`: what a move of nothing at the group's start comes to.
template <typename T>
__global__ void __launch_bounds__(512, 1)
    compose_offsets(const long long* __restrict__ group_sample, const long long* __restrict__ group_begin,
                    const long long* __restrict__ group_count, const long long* __restrict__ table,
                    const long long* __restrict__ chunks, int batch, int size, const T* __restrict__ matrices,
                    const double* __restrict__ ends, const double* __restrict__ base, T* __restrict__ composed) {
  SHARED(T, state, 512 + 1);
  SHARED(T, sums, 512);
  int sample = group_sample[blockIdx.x], begin = group_begin[blockIdx.x], count = group_count[blockIdx.x];
  bool wanted = begin + count < chunks[sample];
  for (int k = threadIdx.x; k <= size; k += blockDim.x) state[k] = T(k == size);
  if (wanted) {
    go_along<T>(
        count, size, matrices, ends, base, state, sums,
        [&](int i) { return table[(begin + (i < count ? i : count)) * static_cast<long long>(batch) + sample]; },
        [](long long, double, T) {});
    T* offset = composed + (blockIdx.x * static_cast<long long>(size + 1) + size) * size;
    if (threadIdx.x < size) offset[threadIdx.x] = state[threadIdx.x];
  }
}

// As `walk` in one level, element by element, in float64: `maps` has the diagonals and what is added, (runs, 2, size).
template <typename T>
__global__ void __launch_bounds__(256, 1)
    walk_diagonals(const long long* __restrict__ table, const long long* __restrict__ chunks, int batch, int size,
                   const double* __restrict__ maps, const T* __restrict__ edge, T* __restrict__ start) {
  // Maps that are read together: a thread waits once for all of them.
  constexpr int TOGETHER = 8;
  int sample = blockIdx.x, places = chunks[sample];
  for (int j = threadIdx.x; j < size; j += blockDim.x) {
    double own = edge[sample * static_cast<long long>(size) + j];
    for (int first = 0; first < places; first += TOGETHER) {
      long long run[TOGETHER];
      double scale[TOGETHER], added[TOGETHER];
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        int place = first + u < places ? first + u : places - 1;
        run[u] = table[place * static_cast<long long>(batch) + sample];
      }
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        const double* map = maps + run[u] * 2 * size + j;
        scale[u] = map[0], added[u] = map[size];
      }
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        if (first + u < places) start[run[u] * size + j] = T(own);
        own = scale[u] * own + added[u];
      }
    }
  }
}

// What is left of each sample once runs were taken from the states `start` to the states `ends`: all of its steps, from
// `edge`, where a first state is no finite number, for products of many matrices may overflow where no state does;
// otherwise nothing, from the last state. A block takes a sample.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    unfinished(const long long* __restrict__ table, const long long* __restrict__ chunks,
               const long long* __restrict__ whole_begin, const long long* __restrict__ whole_count, int batch,
               int size, const T* __restrict__ start, const T* __restrict__ ends, const T* __restrict__ edge,
               long long* __restrict__ rest_begin, long long* __restrict__ rest_count, T* __restrict__ rest_start) {
  int sample = blockIdx.x, places = chunks[sample];
  int by_places = blockDim.x / size, by_elements = blockDim.x % size, k = threadIdx.x % size;
  bool lost = false;
#pragma unroll 8
  for (int place = threadIdx.x / size; place < places; place += by_places) {
    long long run = table[place * static_cast<long long>(batch) + sample];
    lost |= !(size_of(start[run * size + k]) < T(INFINITY));
    k += by_elements;
    if (k >= size) k -= size, ++place;
  }
  lost = __syncthreads_or(lost);
  long long last = table[(places - 1) * static_cast<long long>(batch) + sample];
  for (k = threadIdx.x; k < size; k += blockDim.x) {
    long long here = sample * static_cast<long long>(size) + k;
    rest_start[here] = lost ? edge[here] : ends[last * size + k];
  }
  if (!threadIdx.x) rest_begin[sample] = whole_begin[sample], rest_count[sample] = lost ? whole_count[sample] : 0;
}
