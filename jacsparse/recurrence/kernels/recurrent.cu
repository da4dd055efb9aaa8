// A recurrent cell over runs of consecutive steps: forward, backward, and what a run's steps do to the gradient of its
// last state. `Cell` is the cell's elementwise part, printed before this file from `Cell.step` in Python.
//
// Forward and backward a block takes one run; SPLIT threads have an element of the state together, and the others'
// elements are in shared memory. Threads keep their share of the weights in registers where those suffice; other
// weights come from the first-level cache, where they lie side by side. They are (H, gates * H) forward and (gates * H,
// H) backward; of transfers, rows are aligned and padded to whole fours.
//
// A row of `saved` has what the backward pass needs of a step, and then the states after it but for the output, which
// is in `out`, or `h`.
//
// Floors, for each step, with H elements of w bytes: forward G H^2 multiply-adds and (G + 1 + K) H w bytes, backward
// G H^2 multiply-adds and (1 + K + 1 + D) H w bytes, where G, K and D are the gates, what is saved of them and the
// gradients that are written: 1, 0, 1 for the RNN, 3, 4, 4 for the GRU, 4, 5, 4 for the LSTM. A run's steps wait for
// one another: each takes a write and a read of shared memory, H / 4 multiply-adds after one another, a barrier and,
// forward, what a tanh takes. The transfer's floors are in runs.cuh; a step's J takes H^2 multiplications for the RNN,
// and 3 H^2 multiply-adds for the GRU.
#include "runs.cuh"
#include "cell.cuh"

template <typename T, int VALUES>
struct Values {
  T at[VALUES];
};

// Vectors of a row of `saved`.
constexpr int ROW = Cell<float>::SAVED + Cell<float>::STATES - 1;
// For how many steps reads are made together, an even number: fewer of cells that read more, and of wider numbers.
constexpr int BYTES_AHEAD = Cell<float>::GATES == 1 ? 24 : Cell<float>::GATES < 4 ? 16 : 8;
template <typename T>
constexpr int MOST_AHEAD = BYTES_AHEAD < 4 * sizeof(T) ? 2 : BYTES_AHEAD / sizeof(T) / 2 * 2;

// Zeros as an element's gradients of what enters the gates, for the steps of a run, going back, from one on.
template <typename T>
__device__ __forceinline__ void write_zeros(const Run& run, int taken, int size, int j, T* __restrict__ grad_gates) {
  for (int i = taken; i < run.steps; ++i) {
    T* written = grad_gates + static_cast<long long>(run.row(i)) * Cell<T>::PARTS * size + j;
    for (int part = 0; part < Cell<T>::PARTS; ++part) written[part * size] = T(0);
  }
}

// Whether a gate's parts from the input and from the state are not added: the latter then has its own bias.
__device__ constexpr bool apart(int gate) {
  return Cell<float>::recurrent(gate) != gate;
}

template <typename T, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    forward(const long long* __restrict__ sample, const long long* __restrict__ begin,
            const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
            int size, const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias,
            const T* __restrict__ start, T* __restrict__ out, T* __restrict__ saved, T* __restrict__ end) {
  using C = Cell<T>;
  SHARED(T, state, 2 * 128);
  Run run = run_of(sample, begin, count, direction, offset, batch, false, blockIdx.x);
  // Threads beyond the last element read what the last one does.
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, T, REGISTERS, SPLIT> columns[C::GATES];
  T own[C::STATES], added[C::GATES];
#pragma unroll
  for (int gate = 0; gate < C::GATES; ++gate) {
    columns[gate].load(w + gate * size, C::GATES * size, size);
    if (apart(gate)) added[gate] = bias ? bias[gate * size + mine] : T(0);
  }
  long long place = blockIdx.x * static_cast<long long>(C::STATES) * size + j;
#pragma unroll
  for (int s = 0; s < C::STATES; ++s) own[s] = active ? start[place + s * size] : T(0);
  if (first) state[j] = own[0];
  meet<REGISTERS, SPLIT>();
  go_through<ahead<REGISTERS, SPLIT>(MOST_AHEAD<T>), Values<T, C::GATES>>(
      run, -1,
      [&](int, long long row, int, Values<T, C::GATES>& values) {
#pragma unroll
        for (int gate = 0; gate < C::GATES; ++gate) values.at[gate] = x[(row * C::GATES + gate) * size + mine];
      },
      [&](int parity, long long row, const Values<T, C::GATES>& entered) {
        T product[C::GATES], after[C::STATES], kept[C::SAVED + 1];
#pragma unroll
        for (int gate = 0; gate < C::GATES; ++gate) {
          product[gate] = columns[gate].times(state + parity * 128);
          if (apart(gate)) product[gate] += added[gate];
        }
        C::step(entered.at, product, own, after, kept);
#pragma unroll
        for (int s = 0; s < C::STATES; ++s) own[s] = active ? after[s] : T(0);
        if (first) state[(1 - parity) * 128 + j] = own[0];
        if (writes) {
          out[row * size + j] = own[0];
          if (saved) {
            T* written = saved + row * ROW * size + j;
#pragma unroll
            for (int k = 0; k < C::SAVED; ++k) written[k * size] = kept[k];
#pragma unroll
            for (int s = 1; s < C::STATES; ++s) written[(C::SAVED + s - 1) * size] = own[s];
          }
        }
        meet<REGISTERS, SPLIT>();
      });
  if (writes) {
#pragma unroll
    for (int s = 0; s < C::STATES; ++s) end[place + s * size] = own[s];
  }
}

// Of an element of a step: what is saved of it, the states after and before it, and what is added to its gradient.
template <typename T>
struct Past {
  using C = Cell<T>;
  T saved[C::SAVED + 1], after[C::STATES], before[C::STATES], grad;
  // Of a row, and of the one before, which is the sample's initial state where that is negative.
  template <typename D>
  __device__ __forceinline__ void fetch(long long row, long long preceding, int size, int j, const D* h, const D* gates,
                                        const D* initial, const D* grad_out) {
#pragma unroll
    for (int k = 0; k < C::SAVED; ++k) saved[k] = gates[(row * ROW + k) * size + j];
    after[0] = h[row * size + j];
    before[0] = *(preceding < 0 ? initial + j : h + preceding * size + j);
#pragma unroll
    for (int s = 1; s < C::STATES; ++s) {
      int k = C::SAVED + s - 1;
      after[s] = gates[(row * ROW + k) * size + j];
      before[s] = *(preceding < 0 ? initial + s * size + j : gates + (preceding * ROW + k) * size + j);
    }
    grad = grad_out ? grad_out[row * size + j] : T(0);
  }
};

// Pulls gradients of states back through a run's steps; writes those of the gates where they are wanted.
template <typename T, typename D, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    backward(const long long* __restrict__ sample, const long long* __restrict__ begin,
             const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
             int size, const D* __restrict__ h, const D* __restrict__ saved, const D* __restrict__ initial,
             const long long* __restrict__ edge, const D* __restrict__ w, const D* __restrict__ grad_out,
             const T* __restrict__ grad_end, T* __restrict__ grad_gates, T* __restrict__ grad_start) {
  using C = Cell<T>;
  SHARED(T, lines, 2 * C::GATES * 128);
  Run run = run_of(sample, begin, count, direction, offset, batch, true, blockIdx.x);
  // Threads beyond the last element read what the last one does.
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, D, REGISTERS, SPLIT> columns[C::GATES];
  T v[C::STATES];
#pragma unroll
  for (int gate = 0; gate < C::GATES; ++gate) {
    columns[gate].load(w + static_cast<long long>(gate) * size * size, size, size);
  }
  long long place = blockIdx.x * static_cast<long long>(C::STATES) * size + j;
#pragma unroll
  for (int s = 0; s < C::STATES; ++s) v[s] = active ? grad_end[place + s * size] : T(0);
  const D* own_initial = initial + run.sample * static_cast<long long>(C::STATES) * size;
  int taken = go_through<ahead<REGISTERS, SPLIT>(MOST_AHEAD<T>), Past<T>>(
      run, run.beyond(edge),
      [&](int, long long row, long long preceding, Past<T>& past) {
        past.fetch(row, preceding, size, mine, h, saved, own_initial, grad_out);
      },
      [&](int parity, long long row, const Past<T>& past) {
        T *line = lines + parity * C::GATES * 128, grad[C::STATES], parts[C::PARTS], direct[C::STATES];
#pragma unroll
        for (int s = 0; s < C::STATES; ++s) grad[s] = active ? (s ? v[s] : v[s] + past.grad) : T(0);
        C::back(past.saved, past.before, past.after, grad, parts, direct);
        if (first) {
#pragma unroll
          for (int gate = 0; gate < C::GATES; ++gate) line[gate * 128 + j] = active ? parts[C::recurrent(gate)] : T(0);
        }
        if (writes && grad_gates) {
          T* written = grad_gates + row * C::PARTS * size + j;
#pragma unroll
          for (int part = 0; part < C::PARTS; ++part) written[part * size] = parts[part];
        }
        meet<REGISTERS, SPLIT>();
        T sum = columns[0].times(line);
        if (C::carried(0)) sum += direct[0];
#pragma unroll
        for (int gate = 1; gate < C::GATES; ++gate) sum += columns[gate].times(line + gate * 128);
        v[0] = flushed(sum);
#pragma unroll
        for (int s = 1; s < C::STATES; ++s) v[s] = active ? flushed(direct[s]) : T(0);
      },
      [&] {
        bool alive = false;
#pragma unroll
        for (int s = 0; s < C::STATES; ++s) alive = alive || v[s] != T(0);
        return !grad_out && !any<REGISTERS, SPLIT>(alive);
      });
  if (writes && grad_gates) write_zeros(run, taken, size, j, grad_gates);
  if (writes) {
#pragma unroll
    for (int s = 0; s < C::STATES; ++s) grad_start[place + s * size] = v[s];
  }
}

// J[k][j] = sum over gates of a_k W[k][j], and d_k where j = k: a step's derivative is that of a gradient of one.
template <typename T>
struct Former {
  using C = Cell<T>;
  Run run;
  int size, beyond;
  const T *h, *saved, *initial, *w, *grad_out;
  Past<T> past;

  __device__ __forceinline__ void fetch(int i) {
    if (threadIdx.x < size) {
      int preceding = i + 1 < run.steps ? run.row(i + 1) : beyond;
      past.fetch(run.row(i), preceding, size, threadIdx.x, h, saved, initial, grad_out);
    }
  }
  __device__ __forceinline__ void prepare(T* coefficients) const {
    if (threadIdx.x < size) {
      T one[1] = {T(1)}, parts[C::PARTS], direct[1], *own = coefficients + threadIdx.x;
      C::back(past.saved, past.before, past.after, one, parts, direct);
#pragma unroll
      for (int gate = 0; gate < C::GATES; ++gate) own[gate * size] = parts[C::recurrent(gate)];
      own[C::GATES * size] = direct[0], own[(C::GATES + 1) * size] = past.grad;
    }
  }
  __device__ __forceinline__ void entries(const T* coefficients, int, int k, int j, Four<T>& four) const {
    int columns = whole_fours(size);
    const T* own = coefficients + k;
#pragma unroll
    for (int c = 0; c < 4; ++c) four.at[c] = C::carried(0) && j + c == k ? own[C::GATES * size] : T(0);
#pragma unroll
    for (int gate = 0; gate < C::GATES; ++gate) {
      Four<T> weights = *reinterpret_cast<const Four<T>*>(w + (gate * size + k) * columns + j);
      T factor = own[gate * size];
#pragma unroll
      for (int c = 0; c < 4; ++c) four.at[c] += factor * weights.at[c];
    }
  }
};

template <typename T, int ROWS>
__global__ void __launch_bounds__(320, 1)
    transfer(const long long* __restrict__ sample, const long long* __restrict__ begin,
             const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
             int size, int share, const T* __restrict__ h, const T* __restrict__ saved, const T* __restrict__ initial,
             const long long* __restrict__ edge, const T* __restrict__ w, const T* __restrict__ grad_out,
             T* __restrict__ out) {
  Run run = run_of(sample, begin, count, direction, offset, batch, true, blockIdx.x);
  const T* own_initial = initial + run.sample * static_cast<long long>(size);
  Former<T> former = {run, size, run.beyond(edge), h, saved, own_initial, w, grad_out, {}};
  compose<T, ROWS, Cell<T>::GATES + 2>(former, run.steps, size, share,
                                       out + blockIdx.x * static_cast<long long>(size + 1) * size);
}
