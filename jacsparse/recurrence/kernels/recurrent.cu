// Recurrent cells over runs of consecutive steps: forward keeping the gates, backward, and what a run's steps do to the
// gradient of its last state.
//
// Forward and backward a block takes one run; SPLIT threads have an element of the state together, and the others'
// elements are in shared memory. Threads keep their share of the weights in registers where those suffice; other
// weights come from the first-level cache, where they lie side by side. They are (H, gates * H) forward and (gates * H,
// H) backward; of transfers, rows are aligned and padded to whole fours.
//
// Floors, for each step, with H elements of w bytes: forward G H^2 multiply-adds and (G + 1 + K) H w bytes, backward
// G H^2 multiply-adds and (1 + K + 1 + D) H w bytes, where G, K and D are the gates, what is kept of them and the
// gradients that are written: 1, 0, 1 for the RNN, 3, 4, 4 for the GRU, 4, 5, 4 for the LSTM. A run's steps wait for
// one another: each takes a write and a read of shared memory, H / 4 multiply-adds after one another, a barrier and,
// forward, what a tanh takes. The transfer's floors are in runs.cuh; a step's J takes H^2 multiplications for the RNN,
// and 3 H^2 multiply-adds for the GRU.
#include "runs.cuh"

template <typename T, int VALUES>
struct Values {
  T at[VALUES];
};

// Zeros as an element's gradients of what enters the gates, for the steps of a run, going back, from one on.
template <int GATES, typename T>
__device__ __forceinline__ void write_zeros(const Run& run, int taken, int size, int j, T* __restrict__ grad_gates) {
  for (int i = taken; i < run.steps; ++i) {
    T* written = grad_gates + static_cast<long long>(run.row(i)) * GATES * size + j;
    for (int gate = 0; gate < GATES; ++gate) written[gate * size] = T(0);
  }
}

// h <- tanh(x + W h), or ReLU.
template <typename T, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    rnn_forward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
                int size, const T* __restrict__ x, const T* __restrict__ w, bool relu, const T* __restrict__ start,
                T* __restrict__ out, T* __restrict__ end) {
  SHARED(T, state, 2 * 128);
  Run run = run_of(sample, begin, count, direction, offset, batch, false, blockIdx.x);
  // Threads beyond the last element read what the last one does.
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, T, REGISTERS, SPLIT> column;
  column.load(w, size, size);
  T own = active ? start[blockIdx.x * static_cast<long long>(size) + j] : T(0);
  if (first) state[j] = own;
  meet<REGISTERS, SPLIT>();
  go_through<ahead<REGISTERS, SPLIT>(8), T>(
      run, -1, [&](long long row, int, T& value) { value = x[row * size + mine]; },
      [&](int parity, long long row, T entered) {
        T total = entered + column.times(state + parity * 128);
        T bent = squash(total);
        own = relu ? (total < T(0) ? T(0) : total) : bent;
        own = active ? own : T(0);
        if (first) state[(1 - parity) * 128 + j] = own;
        if (writes) out[row * size + j] = own;
        meet<REGISTERS, SPLIT>();
      });
  if (writes) end[blockIdx.x * static_cast<long long>(size) + j] = own;
}

// v <- W^T (v + g) f'(h): writes (v + g) f' of each step where it is wanted.
template <typename T, typename D, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    rnn_backward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                 const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
                 int size, const D* __restrict__ h, const D* __restrict__ w, bool relu, const D* __restrict__ grad_out,
                 const T* __restrict__ grad_end, T* __restrict__ grad_gates, T* __restrict__ grad_start) {
  SHARED(T, scaled, 2 * 128);
  Run run = run_of(sample, begin, count, direction, offset, batch, true, blockIdx.x);
  // Threads beyond the last element read what the last one does.
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, D, REGISTERS, SPLIT> column;
  column.load(w, size, size);
  T v = active ? grad_end[blockIdx.x * static_cast<long long>(size) + j] : T(0);
  int taken = go_through<ahead<REGISTERS, SPLIT>(8), Values<T, 2>>(
      run, -1,
      [&](long long row, int, Values<T, 2>& values) {
        values.at[0] = h[row * size + mine];
        values.at[1] = grad_out ? grad_out[row * size + mine] : T(0);
      },
      [&](int parity, long long row, const Values<T, 2>& values) {
        T state = values.at[0], total = v + values.at[1];
        T d = relu ? (state <= T(0) ? T(0) : total) : total * (T(1) - state * state);
        if (!active) d = T(0);
        if (first) scaled[parity * 128 + j] = d;
        if (writes && grad_gates) grad_gates[row * size + j] = d;
        meet<REGISTERS, SPLIT>();
        v = flushed(column.times(scaled + parity * 128));
      },
      [&] { return !grad_out && !any<REGISTERS, SPLIT>(v != T(0)); });
  if (writes && grad_gates) write_zeros<1>(run, taken, size, j, grad_gates);
  if (writes) grad_start[blockIdx.x * static_cast<long long>(size) + j] = v;
}

// Equation 4.3: r = s(x_r + W_r h), z = s(x_z + W_z h), m = W_n h + b, n = tanh(x_n + r m), h <- n + z (h - n).
template <typename T, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    gru_forward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
                int size, const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias,
                const T* __restrict__ start, T* __restrict__ out, T* __restrict__ gates, T* __restrict__ end) {
  SHARED(T, state, 2 * 128);
  Run run = run_of(sample, begin, count, direction, offset, batch, false, blockIdx.x);
  // Threads beyond the last element read what the last one does.
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, T, REGISTERS, SPLIT> reset, update, fresh;
  reset.load(w, 3 * size, size);
  update.load(w + size, 3 * size, size);
  fresh.load(w + 2 * size, 3 * size, size);
  T own = active ? start[blockIdx.x * static_cast<long long>(size) + j] : T(0), b = active ? bias[j] : T(0);
  if (first) state[j] = own;
  meet<REGISTERS, SPLIT>();
  go_through<ahead<REGISTERS, SPLIT>(4), Values<T, 3>>(
      run, -1,
      [&](long long row, int, Values<T, 3>& values) {
        for (int gate = 0; gate < 3; ++gate) values.at[gate] = x[(row * 3 + gate) * size + mine];
      },
      [&](int parity, long long row, const Values<T, 3>& entered) {
        const T* h = state + parity * 128;
        T r = sigmoid(entered.at[0] + reset.times(h)), z = sigmoid(entered.at[1] + update.times(h));
        T m = b + fresh.times(h), n = squash(entered.at[2] + r * m);
        own = active ? n + z * (own - n) : T(0);
        if (first) state[(1 - parity) * 128 + j] = own;
        if (writes) {
          out[row * size + j] = own;
          if (gates) {
            T* keep = gates + row * 4 * size + j;
            keep[0] = r, keep[size] = z, keep[2 * size] = n, keep[3 * size] = m;
          }
        }
        meet<REGISTERS, SPLIT>();
      });
  if (writes) end[blockIdx.x * static_cast<long long>(size) + j] = own;
}

// Of an element of a step's state: what was kept of it, the state before, and the gradient that comes to it.
template <typename T>
struct GruKept {
  T r, z, n, m, before, grad;
  // Of a row, and the one before, which is the sample's initial state where that is negative.
  template <typename D>
  __device__ __forceinline__ void fetch(long long row, long long preceding, int size, int j, const D* h, const D* gates,
                                        const D* initial, const D* grad_out) {
    const D* keep = gates + row * 4 * size + j;
    r = keep[0], z = keep[size], n = keep[2 * size], m = keep[3 * size];
    before = *(preceding < 0 ? initial + j : h + preceding * size + j);
    grad = grad_out ? grad_out[row * size + j] : T(0);
  }
  // For one of the gradient: what enters r, z, n, and m.
  __device__ __forceinline__ void factors(T (&found)[4]) const {
    found[2] = (T(1) - z) * (T(1) - n * n);
    found[1] = (before - n) * z * (T(1) - z);
    found[3] = found[2] * r;
    found[0] = found[3] * m * (T(1) - r);
  }
};

// Equation 4.4, transposed and applied: writes the gradients of what enters r, z and n, and of m.
template <typename T, typename D, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    gru_backward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                 const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
                 int size, const D* __restrict__ h, const D* __restrict__ gates, const D* __restrict__ initial,
                 const long long* __restrict__ edge, const D* __restrict__ w, const D* __restrict__ grad_out,
                 const T* __restrict__ grad_end, T* __restrict__ grad_gates, T* __restrict__ grad_start) {
  SHARED(T, lines, 2 * 3 * 128);
  Run run = run_of(sample, begin, count, direction, offset, batch, true, blockIdx.x);
  long long square = static_cast<long long>(size) * size;
  // Threads beyond the last element read what the last one does.
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, D, REGISTERS, SPLIT> reset, update, fresh;
  reset.load(w, size, size);
  update.load(w + square, size, size);
  fresh.load(w + 2 * square, size, size);
  T v = active ? grad_end[blockIdx.x * static_cast<long long>(size) + j] : T(0);
  const D* own_initial = initial + run.sample * static_cast<long long>(size);
  int taken = go_through<ahead<REGISTERS, SPLIT>(4), GruKept<T>>(
      run, run.beyond(edge),
      [&](long long row, long long preceding, GruKept<T>& kept) {
        kept.fetch(row, preceding, size, mine, h, gates, own_initial, grad_out);
      },
      [&](int parity, long long row, const GruKept<T>& kept) {
        T* line = lines + parity * 3 * 128;
        T grad = active ? v + kept.grad : T(0), parts[4];
        kept.factors(parts);
        for (int part = 0; part < 4; ++part) parts[part] *= grad;
        if (first) line[j] = parts[0], line[128 + j] = parts[1], line[256 + j] = parts[3];
        if (writes && grad_gates) {
          T* written = grad_gates + row * 4 * size + j;
          for (int part = 0; part < 4; ++part) written[part * size] = parts[part];
        }
        meet<REGISTERS, SPLIT>();
        v = flushed(grad * kept.z + reset.times(line) + update.times(line + 128) + fresh.times(line + 256));
      },
      [&] { return !grad_out && !any<REGISTERS, SPLIT>(v != T(0)); });
  if (writes && grad_gates) write_zeros<4>(run, taken, size, j, grad_gates);
  if (writes) grad_start[blockIdx.x * static_cast<long long>(size) + j] = v;
}

// c <- s(f) c + s(i) tanh(g), h <- s(o) tanh(c); a state is h and then c.
template <typename T, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    lstm_forward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                 const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
                 int size, const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ start,
                 T* __restrict__ out, T* __restrict__ gates, T* __restrict__ end) {
  SHARED(T, state, 2 * 128);
  Run run = run_of(sample, begin, count, direction, offset, batch, false, blockIdx.x);
  // Threads beyond the last element read what the last one does.
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, T, REGISTERS, SPLIT> enter, forget, fresh, leave;
  enter.load(w, 4 * size, size);
  forget.load(w + size, 4 * size, size);
  fresh.load(w + 2 * size, 4 * size, size);
  leave.load(w + 3 * size, 4 * size, size);
  long long place = blockIdx.x * 2ll * size + j;
  T own = active ? start[place] : T(0), cell = active ? start[place + size] : T(0);
  if (first) state[j] = own;
  meet<REGISTERS, SPLIT>();
  go_through<ahead<REGISTERS, SPLIT>(2), Values<T, 4>>(
      run, -1,
      [&](long long row, int, Values<T, 4>& values) {
        for (int gate = 0; gate < 4; ++gate) values.at[gate] = x[(row * 4 + gate) * size + mine];
      },
      [&](int parity, long long row, const Values<T, 4>& entered) {
        const T* h = state + parity * 128;
        T i = sigmoid(entered.at[0] + enter.times(h)), f = sigmoid(entered.at[1] + forget.times(h));
        T g = squash(entered.at[2] + fresh.times(h)), o = sigmoid(entered.at[3] + leave.times(h));
        cell = active ? f * cell + i * g : T(0);
        own = active ? o * squash(cell) : T(0);
        if (first) state[(1 - parity) * 128 + j] = own;
        if (writes) {
          out[row * size + j] = own;
          if (gates) {
            T* keep = gates + row * 5 * size + j;
            keep[0] = i, keep[size] = f, keep[2 * size] = g, keep[3 * size] = o, keep[4 * size] = cell;
          }
        }
        meet<REGISTERS, SPLIT>();
      });
  if (writes) end[place] = own, end[place + size] = cell;
}

// Writes the gradients of what enters i, f, g and o.
template <typename T, typename D, int REGISTERS, int SPLIT>
__global__ void __launch_bounds__(THREADS<REGISTERS, SPLIT>, 1)
    lstm_backward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                  const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
                  int size, const D* __restrict__ gates, const D* __restrict__ initial,
                  const long long* __restrict__ edge, const D* __restrict__ w, const D* __restrict__ grad_out,
                  const T* __restrict__ grad_end, T* __restrict__ grad_gates, T* __restrict__ grad_start) {
  SHARED(T, lines, 2 * 4 * 128);
  Run run = run_of(sample, begin, count, direction, offset, batch, true, blockIdx.x);
  long long square = static_cast<long long>(size) * size;
  // Threads beyond the last element read what the last one does.
  int j = threadIdx.x / SPLIT, mine = j < size ? j : size - 1;
  bool active = j < size, first = threadIdx.x % SPLIT == 0, writes = active && first;
  Column<T, D, REGISTERS, SPLIT> enter, forget, fresh, leave;
  enter.load(w, size, size);
  forget.load(w + square, size, size);
  fresh.load(w + 2 * square, size, size);
  leave.load(w + 3 * square, size, size);
  long long place = blockIdx.x * 2ll * size + j;
  T v = active ? grad_end[place] : T(0), u = active ? grad_end[place + size] : T(0);
  const D* own_initial = initial + (run.sample * 2ll + 1) * size;
  int taken = go_through<ahead<REGISTERS, SPLIT>(2), Values<T, 7>>(
      run, run.beyond(edge),
      [&](long long row, long long preceding, Values<T, 7>& values) {
        for (int kept = 0; kept < 5; ++kept) values.at[kept] = gates[(row * 5 + kept) * size + mine];
        values.at[5] = *(preceding < 0 ? own_initial + mine : gates + (preceding * 5 + 4) * size + mine);
        values.at[6] = grad_out ? grad_out[row * size + mine] : T(0);
      },
      [&](int parity, long long row, const Values<T, 7>& values) {
        T i = values.at[0], f = values.at[1], g = values.at[2], o = values.at[3], shown = squash(values.at[4]);
        T* line = lines + parity * 4 * 128;
        T grad = active ? v + values.at[6] : T(0), total = u + grad * o * (T(1) - shown * shown);
        T parts[4] = {total * g * i * (T(1) - i), total * values.at[5] * f * (T(1) - f), total * i * (T(1) - g * g),
                      grad * shown * o * (T(1) - o)};
        u = active ? flushed(total * f) : T(0);
        if (first) {
          for (int part = 0; part < 4; ++part) line[part * 128 + j] = active ? parts[part] : T(0);
        }
        if (writes && grad_gates) {
          T* written = grad_gates + row * 4 * size + j;
          for (int part = 0; part < 4; ++part) written[part * size] = parts[part];
        }
        meet<REGISTERS, SPLIT>();
        v = flushed(enter.times(line) + forget.times(line + 128) + fresh.times(line + 256) + leave.times(line + 384));
      },
      [&] { return !grad_out && !any<REGISTERS, SPLIT>(v != T(0) || u != T(0)); });
  if (writes && grad_gates) write_zeros<4>(run, taken, size, j, grad_gates);
  if (writes) grad_start[place] = v, grad_start[place + size] = u;
}

// J[k][j] = f'(h_k) W[k][j].
template <typename T>
struct RnnFormer {
  Run run;
  int size;
  const T *h, *w, *grad_out;
  bool relu;
  T state, grad;

  __device__ __forceinline__ void fetch(int i) {
    if (threadIdx.x < size) {
      long long at = static_cast<long long>(run.row(i)) * size + threadIdx.x;
      state = h[at], grad = grad_out ? grad_out[at] : T(0);
    }
  }
  __device__ __forceinline__ void prepare(T* coefficients) const {
    if (threadIdx.x < size) {
      T* own = coefficients + threadIdx.x;
      own[0] = relu ? T(!(state <= T(0))) : T(1) - state * state, own[size] = grad;
    }
  }
  __device__ __forceinline__ void entries(const T* coefficients, int, int k, int j, Four<T>& four) const {
    T factor = coefficients[k];
    four = *reinterpret_cast<const Four<T>*>(w + k * whole_fours(size) + j);
#pragma unroll
    for (int c = 0; c < 4; ++c) four.at[c] *= factor;
  }
};

template <typename T, int ROWS>
__global__ void __launch_bounds__(320, 1)
    rnn_transfer(const long long* __restrict__ sample, const long long* __restrict__ begin,
                 const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
                 int size, int share, const T* __restrict__ h, const T* __restrict__ w, bool relu,
                 const T* __restrict__ grad_out, T* __restrict__ out) {
  RnnFormer<T> former = {
      run_of(sample, begin, count, direction, offset, batch, true, blockIdx.x), size, h, w, grad_out, relu, T(0), T(0)};
  transfer<T, ROWS, 2>(former, former.run.steps, size, share,
                       out + blockIdx.x * static_cast<long long>(size + 1) * size);
}

// J[k][j] = a_k W_r[k][j] + b_k W_z[k][j] + c_k W_n[k][j], and z_k where j = k (equation 4.4).
template <typename T>
struct GruFormer {
  Run run;
  int size, beyond;
  const T *h, *gates, *initial, *w, *grad_out;
  GruKept<T> kept;

  __device__ __forceinline__ void fetch(int i) {
    if (threadIdx.x < size) {
      int preceding = i + 1 < run.steps ? run.row(i + 1) : beyond;
      kept.fetch(run.row(i), preceding, size, threadIdx.x, h, gates, initial, grad_out);
    }
  }
  __device__ __forceinline__ void prepare(T* coefficients) const {
    if (threadIdx.x < size) {
      T found[4];
      kept.factors(found);
      T* own = coefficients + threadIdx.x;
      own[0] = found[0], own[size] = found[1], own[2 * size] = found[3], own[3 * size] = kept.z,
      own[4 * size] = kept.grad;
    }
  }
  __device__ __forceinline__ void entries(const T* coefficients, int, int k, int j, Four<T>& four) const {
    int columns = whole_fours(size);
    const T *own = coefficients + k, *first = w + k * columns + j;
    Four<T> reset = *reinterpret_cast<const Four<T>*>(first);
    Four<T> update = *reinterpret_cast<const Four<T>*>(first + size * columns);
    Four<T> fresh = *reinterpret_cast<const Four<T>*>(first + 2 * size * columns);
    T a = own[0], b = own[size], c = own[2 * size], through = own[3 * size];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      four.at[i] = a * reset.at[i] + b * update.at[i] + c * fresh.at[i] + (j + i == k ? through : T(0));
    }
  }
};

template <typename T, int ROWS>
__global__ void __launch_bounds__(320, 1)
    gru_transfer(const long long* __restrict__ sample, const long long* __restrict__ begin,
                 const long long* __restrict__ count, int direction, const long long* __restrict__ offset, int batch,
                 int size, int share, const T* __restrict__ h, const T* __restrict__ gates,
                 const T* __restrict__ initial, const long long* __restrict__ edge, const T* __restrict__ w,
                 const T* __restrict__ grad_out, T* __restrict__ out) {
  Run run = run_of(sample, begin, count, direction, offset, batch, true, blockIdx.x);
  const T* own_initial = initial + run.sample * static_cast<long long>(size);
  GruFormer<T> former = {run, size, run.beyond(edge), h, gates, own_initial, w, grad_out, {}};
  transfer<T, ROWS, 5>(former, run.steps, size, share, out + blockIdx.x * static_cast<long long>(size + 1) * size);
}
