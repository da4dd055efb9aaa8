// Recurrent cells over runs of consecutive steps, forward keeping the gates, and backward.
//
// A run is some consecutive steps of one sample in one direction of time: step i of run r is at time
// t = begin[r] + i * direction, in row offset[t] + sample[r]. A block takes one run; its thread j has element j of the
// state, and the others' elements are in shared memory. Up to H = 32 a thread keeps its columns of the weights in
// registers; beyond that they come from the first-level cache, where those of H = 128 fit in float32.
//
// Floors, for each step, with H elements of w bytes: forward G H^2 multiply-adds and (G + 1 + K) H w bytes, backward
// G H^2 multiply-adds and (1 + K + 1 + D) H w bytes, where G, K and D are the gates, what is kept of them and the
// gradients that are written: 1, 0, 1 for the RNN, 3, 4, 4 for the GRU, 4, 5, 4 for the LSTM. A run's steps wait for one
// another: each takes a read of shared memory, H / 4 multiply-adds after one another, and a barrier.

// Weights of thread j: w[k * stride] for k < size; in registers where they are few.
template <typename T, int REGISTERS>
struct Column {
  T own[REGISTERS > 0 ? REGISTERS : 1];
  const T* far;
  long long stride;
  __device__ __forceinline__ void load(const T* first, long long step, int size, bool active) {
    far = first, stride = step;
    if (REGISTERS > 0) {
#pragma unroll
      for (int k = 0; k < REGISTERS; ++k) own[k] = active && k < size ? first[k * step] : T(0);
    }
  }
  // The sum over k of w[k] and x[k]; x is padded with zeros to whole fours.
  __device__ __forceinline__ T times(const T* x, int size, bool active) const {
    T one = T(0), two = T(0), three = T(0), four = T(0);
    if (REGISTERS > 0) {
#pragma unroll
      for (int k = 0; k < REGISTERS; k += 4) {
        if (k < size) {
          one += own[k] * x[k];
          two += own[k + 1] * x[k + 1];
          three += own[k + 2] * x[k + 2];
          four += own[k + 3] * x[k + 3];
        }
      }
    } else if (active) {
      int k = 0;
      for (; k + 3 < size; k += 4) {
        one += far[k * stride] * x[k];
        two += far[(k + 1) * stride] * x[k + 1];
        three += far[(k + 2) * stride] * x[k + 2];
        four += far[(k + 3) * stride] * x[k + 3];
      }
      for (; k < size; ++k) one += far[k * stride] * x[k];
    }
    return (one + two) + (three + four);
  }
};

template <typename T>
__device__ __forceinline__ T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

// Where step `step` of run `run` is.
__device__ __forceinline__ long long row_of(const long long* sample, const long long* begin, const long long* offset,
                                            int direction, long long run, long long step) {
  return offset[begin[run] + step * direction] + sample[run];
}

// h <- tanh(x + W h), or ReLU. W is as PyTorch keeps it, (H, H).
template <typename T, int REGISTERS>
__global__ void rnn_forward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                            const long long* __restrict__ count, int direction, const long long* __restrict__ offset,
                            int size, const T* __restrict__ x, const T* __restrict__ w, bool relu,
                            const T* __restrict__ start, T* __restrict__ out, T* __restrict__ end) {
  SHARED(T, state, 2 * 128);
  long long run = blockIdx.x, steps = count[run];
  int j = threadIdx.x;
  bool active = j < size;
  Column<T, REGISTERS> column;
  column.load(w + static_cast<long long>(j) * size, 1, size, active);
  T own = active ? start[run * size + j] : T(0);
  if (j < 128) state[j] = own;
  long long row = steps ? row_of(sample, begin, offset, direction, run, 0) : 0;
  T entered = active && steps ? x[row * size + j] : T(0);
  __syncthreads();
  for (long long step = 0; step < steps; ++step) {
    T total = entered + column.times(state + (step & 1) * 128, size, active);
    long long following = step + 1 < steps ? row_of(sample, begin, offset, direction, run, step + 1) : row;
    // What enters the next step is on its way while this one is finished.
    entered = active ? x[following * size + j] : T(0);
    own = relu ? (total < T(0) ? T(0) : total) : tanh(total);
    own = active ? own : T(0);
    if (j < 128) state[((step + 1) & 1) * 128 + j] = own;
    if (active) out[row * size + j] = own;
    row = following;
    __syncthreads();
  }
  if (active) end[run * size + j] = own;
}

// v <- W^T (v + g) f'(h): writes (v + g) f' of each step where it is wanted.
template <typename T, int REGISTERS>
__global__ void rnn_backward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                             const long long* __restrict__ count, int direction, const long long* __restrict__ offset,
                             int size, const T* __restrict__ h, const T* __restrict__ w, bool relu,
                             const T* __restrict__ grad_out, const T* __restrict__ grad_end, T* __restrict__ grad_gates,
                             T* __restrict__ grad_start) {
  SHARED(T, scaled, 2 * 128);
  long long run = blockIdx.x, steps = count[run];
  int j = threadIdx.x;
  bool active = j < size;
  Column<T, REGISTERS> column;
  column.load(w + j, size, size, active);
  T v = active ? grad_end[run * size + j] : T(0);
  for (long long step = steps - 1; step >= 0; --step) {
    long long row = row_of(sample, begin, offset, direction, run, step);
    T* line = scaled + (step & 1) * 128;
    T d = T(0);
    if (active) {
      T state = h[row * size + j];
      T total = grad_out ? v + grad_out[row * size + j] : v;
      d = relu ? (state > T(0) ? total : T(0)) : total * (T(1) - state * state);
      if (grad_gates) grad_gates[row * size + j] = d;
    }
    if (j < 128) line[j] = d;
    __syncthreads();
    v = column.times(line, size, active);
  }
  if (active) grad_start[run * size + j] = v;
}

// Equation 4.3: r = s(x_r + W_r h), z = s(x_z + W_z h), m = W_n h + b, n = tanh(x_n + r m), h <- n + z (h - n).
template <typename T, int REGISTERS>
__global__ void gru_forward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                            const long long* __restrict__ count, int direction, const long long* __restrict__ offset,
                            int size, const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias,
                            const T* __restrict__ start, T* __restrict__ out, T* __restrict__ gates,
                            T* __restrict__ end) {
  SHARED(T, state, 2 * 128);
  long long run = blockIdx.x, steps = count[run], square = static_cast<long long>(size) * size;
  int j = threadIdx.x;
  bool active = j < size;
  Column<T, REGISTERS> reset, update, fresh;
  const T* first = w + static_cast<long long>(j) * size;
  reset.load(first, 1, size, active);
  update.load(first + square, 1, size, active);
  fresh.load(first + 2 * square, 1, size, active);
  T own = active ? start[run * size + j] : T(0), b = active ? bias[j] : T(0);
  if (j < 128) state[j] = own;
  __syncthreads();
  for (long long step = 0; step < steps; ++step) {
    long long row = row_of(sample, begin, offset, direction, run, step);
    const T* h = state + (step & 1) * 128;
    T x_r = T(0), x_z = T(0), x_n = T(0);
    if (active) x_r = x[row * 3 * size + j], x_z = x[(row * 3 + 1) * size + j], x_n = x[(row * 3 + 2) * size + j];
    T r = sigmoid(x_r + reset.times(h, size, active)), z = sigmoid(x_z + update.times(h, size, active));
    T m = b + fresh.times(h, size, active), n = tanh(x_n + r * m);
    own = active ? n + z * (own - n) : T(0);
    if (j < 128) state[((step + 1) & 1) * 128 + j] = own;
    if (active) {
      out[row * size + j] = own;
      if (gates) {
        T* keep = gates + row * 4 * size + j;
        keep[0] = r, keep[size] = z, keep[2 * size] = n, keep[3 * size] = m;
      }
    }
    __syncthreads();
  }
  if (active) end[run * size + j] = own;
}

// Equation 4.4, transposed and applied: writes the gradients of what enters r, z and n, and of m.
template <typename T, int REGISTERS>
__global__ void gru_backward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                             const long long* __restrict__ count, int direction, const long long* __restrict__ offset,
                             int size, const T* __restrict__ h, const T* __restrict__ gates,
                             const T* __restrict__ initial, const long long* __restrict__ edge,
                             const T* __restrict__ w, const T* __restrict__ grad_out, const T* __restrict__ grad_end,
                             T* __restrict__ grad_gates, T* __restrict__ grad_start) {
  SHARED(T, lines, 2 * 3 * 128);
  long long run = blockIdx.x, steps = count[run], square = static_cast<long long>(size) * size;
  int j = threadIdx.x;
  bool active = j < size;
  Column<T, REGISTERS> reset, update, fresh;
  reset.load(w + j, size, size, active);
  update.load(w + square + j, size, size, active);
  fresh.load(w + 2 * square + j, size, size, active);
  T v = active ? grad_end[run * size + j] : T(0);
  for (long long step = steps - 1; step >= 0; --step) {
    long long time = begin[run] + step * direction, row = offset[time] + sample[run];
    T* line = lines + (step & 1) * 3 * 128;
    T grad_r = T(0), grad_z = T(0), grad_m = T(0), through = T(0);
    if (active) {
      const T* keep = gates + row * 4 * size + j;
      T r = keep[0], z = keep[size], n = keep[2 * size], m = keep[3 * size];
      T before = time == edge[sample[run]] ? initial[sample[run] * size + j]
                                           : h[(offset[time - direction] + sample[run]) * size + j];
      T grad = grad_out ? v + grad_out[row * size + j] : v;
      T grad_n = grad * (T(1) - z) * (T(1) - n * n);
      through = grad * z;
      grad_z = grad * (before - n) * z * (T(1) - z);
      grad_m = grad_n * r;
      grad_r = grad_m * m * (T(1) - r);
      if (grad_gates) {
        T* written = grad_gates + row * 4 * size + j;
        written[0] = grad_r, written[size] = grad_z, written[2 * size] = grad_n, written[3 * size] = grad_m;
      }
    }
    if (j < 128) line[j] = grad_r, line[128 + j] = grad_z, line[256 + j] = grad_m;
    __syncthreads();
    v = through + reset.times(line, size, active) + update.times(line + 128, size, active) +
        fresh.times(line + 256, size, active);
  }
  if (active) grad_start[run * size + j] = v;
}

// c <- s(f) c + s(i) tanh(g), h <- s(o) tanh(c); a state is h and then c.
template <typename T, int REGISTERS>
__global__ void lstm_forward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                             const long long* __restrict__ count, int direction, const long long* __restrict__ offset,
                             int size, const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ start,
                             T* __restrict__ out, T* __restrict__ gates, T* __restrict__ end) {
  SHARED(T, state, 2 * 128);
  long long run = blockIdx.x, steps = count[run], square = static_cast<long long>(size) * size;
  int j = threadIdx.x;
  bool active = j < size;
  Column<T, REGISTERS> enter, forget, fresh, leave;
  const T* first = w + static_cast<long long>(j) * size;
  enter.load(first, 1, size, active);
  forget.load(first + square, 1, size, active);
  fresh.load(first + 2 * square, 1, size, active);
  leave.load(first + 3 * square, 1, size, active);
  T own = active ? start[run * 2 * size + j] : T(0), cell = active ? start[(run * 2 + 1) * size + j] : T(0);
  if (j < 128) state[j] = own;
  __syncthreads();
  for (long long step = 0; step < steps; ++step) {
    long long row = row_of(sample, begin, offset, direction, run, step);
    const T* h = state + (step & 1) * 128;
    const T* entered = x + row * 4 * size + j;
    T x_i = T(0), x_f = T(0), x_g = T(0), x_o = T(0);
    if (active) x_i = entered[0], x_f = entered[size], x_g = entered[2 * size], x_o = entered[3 * size];
    T i = sigmoid(x_i + enter.times(h, size, active)), f = sigmoid(x_f + forget.times(h, size, active));
    T g = tanh(x_g + fresh.times(h, size, active)), o = sigmoid(x_o + leave.times(h, size, active));
    cell = active ? f * cell + i * g : T(0);
    own = active ? o * tanh(cell) : T(0);
    if (j < 128) state[((step + 1) & 1) * 128 + j] = own;
    if (active) {
      out[row * size + j] = own;
      if (gates) {
        T* keep = gates + row * 5 * size + j;
        keep[0] = i, keep[size] = f, keep[2 * size] = g, keep[3 * size] = o, keep[4 * size] = cell;
      }
    }
    __syncthreads();
  }
  if (active) end[run * 2 * size + j] = own, end[(run * 2 + 1) * size + j] = cell;
}

template <typename T, int REGISTERS>
__global__ void lstm_backward(const long long* __restrict__ sample, const long long* __restrict__ begin,
                              const long long* __restrict__ count, int direction, const long long* __restrict__ offset,
                              int size, const T* __restrict__ gates, const T* __restrict__ initial,
                              const long long* __restrict__ edge, const T* __restrict__ w,
                              const T* __restrict__ grad_out, const T* __restrict__ grad_end,
                              T* __restrict__ grad_gates, T* __restrict__ grad_start) {
  SHARED(T, lines, 2 * 4 * 128);
  long long run = blockIdx.x, steps = count[run], square = static_cast<long long>(size) * size;
  int j = threadIdx.x;
  bool active = j < size;
  Column<T, REGISTERS> enter, forget, fresh, leave;
  enter.load(w + j, size, size, active);
  forget.load(w + square + j, size, size, active);
  fresh.load(w + 2 * square + j, size, size, active);
  leave.load(w + 3 * square + j, size, size, active);
  T v = active ? grad_end[run * 2 * size + j] : T(0), u = active ? grad_end[(run * 2 + 1) * size + j] : T(0);
  for (long long step = steps - 1; step >= 0; --step) {
    long long time = begin[run] + step * direction, row = offset[time] + sample[run];
    T* line = lines + (step & 1) * 4 * 128;
    T grad_i = T(0), grad_f = T(0), grad_g = T(0), grad_o = T(0);
    if (active) {
      const T* keep = gates + row * 5 * size + j;
      T i = keep[0], f = keep[size], g = keep[2 * size], o = keep[3 * size], shown = tanh(keep[4 * size]);
      T before = time == edge[sample[run]] ? initial[(sample[run] * 2 + 1) * size + j]
                                           : gates[((offset[time - direction] + sample[run]) * 5 + 4) * size + j];
      T grad = grad_out ? v + grad_out[row * size + j] : v;
      T total = u + grad * o * (T(1) - shown * shown);
      grad_o = grad * shown * o * (T(1) - o);
      grad_i = total * g * i * (T(1) - i);
      grad_f = total * before * f * (T(1) - f);
      grad_g = total * i * (T(1) - g * g);
      u = total * f;
      if (grad_gates) {
        T* written = grad_gates + row * 4 * size + j;
        written[0] = grad_i, written[size] = grad_f, written[2 * size] = grad_g, written[3 * size] = grad_o;
      }
    }
    if (j < 128) line[j] = grad_i, line[128 + j] = grad_f, line[256 + j] = grad_g, line[384 + j] = grad_o;
    __syncthreads();
    v = enter.times(line, size, active) + forget.times(line + 128, size, active) +
        fresh.times(line + 256, size, active) + leave.times(line + 384, size, active);
  }
  if (active) grad_start[run * 2 * size + j] = v, grad_start[(run * 2 + 1) * size + j] = u;
}
