// A layer of small states: float32, at most 32 elements, samples of equal lengths. A whole pass in one launch or two,
// and the gradients of its weights in two more.
//
// A warp takes steps, a lane an element, which keeps its column of the weights in registers. Each sample's steps are
// cut into chunks, whose places are in the order in which the recurrence gets to them. In a contracting network a chunk
// forgets the state that it starts from (Naumov, section 3.4): chunks are taken from guesses, and again from where the
// chunk before came to, until they fit. A block has a sample where these settle, and its warps share the chunks; what does not
// fit in time is finished step after step by one of them. No block waits for another.
//
// Where chunks are many, a launch before takes each from where the chunk before comes to from a guess, on all
// multiprocessors: two sweeps at once. Then what settles them begins by looking whether they fit.
//
// A row of `kept` has the output and then what `recurrent.cu` calls saved. Gates' parts of up to 32 inputs are formed
// here, for some steps at a time: the weights, in shared memory, are read once for these; more inputs come projected.
//
// Floors, for each step and sample with H elements, I inputs: forward G H (H + I) multiply-adds and (I + 2 + ROW) 4 H
// bytes, backward G H^2 multiply-adds and (1 + ROW + 1 + D) 4 H bytes, twice for two sweeps; steps of a chunk wait for
// one another as in recurrent.cu. Weights' gradients: D H (I + H) multiply-adds and (D H + I + H) 4 bytes a row.
#include "runs.cuh"
#include "cell.cuh"
// Inputs whose weights have room in shared memory; warps of a block, at most, each of which keeps all weights in
// registers; those that sweep share the inputs' weights; sides of a tile: as `small_layer.py` knows them.
#include "sizes.cuh"

using C = Cell<float>;
constexpr int GATES = C::GATES, STATES = C::STATES;
// Vectors of a row of `kept`.
constexpr int KEPT = 1 + C::SAVED + STATES - 1;
// Steps for which reads are made together.
constexpr int AHEAD = GATES < 4 ? 4 : 2;

// The chunks of a sample. Each is a run, and so is what is left from a place on.
struct Places {
  int time, batch, chunk, direction, sample, count;
  bool back;

  __device__ __forceinline__ Run run_of_steps(int first, int steps) const {
    return {nullptr, sample, direction > 0 ? first : time - 1 - first, steps, batch, direction, back};
  }
  __device__ __forceinline__ Run run(int place) const {
    int first = (back ? count - 1 - place : place) * chunk;
    return run_of_steps(first, min(chunk, time - first));
  }
  __device__ __forceinline__ Run rest(int place) const {
    return back ? run_of_steps(0, min((count - place) * chunk, time))
                : run_of_steps(place * chunk, time - place * chunk);
  }
};

// States of a sample: the first vector, and those behind it, (states - 1, batch, size). Either may be nowhere: zeros.
template <typename T>
struct Ends {
  T *first, *others;
  int batch, size;

  __device__ __forceinline__ T* at(int s, int sample, int j) const {
    T* from = s ? others : first;
    return from ? from + ((s ? s - 1 : 0) * static_cast<long long>(batch) + sample) * size + j : nullptr;
  }
  __device__ __forceinline__ float read(int s, int sample, int j) const {
    const float* from = at(s, sample, j);
    return from ? *from : 0.0f;
  }
};

// A lane's column of the weights of each gate: element k lies `step` behind element k - 1.
template <int REGISTERS>
struct Columns {
  float own[GATES][REGISTERS];

  __device__ __forceinline__ void load(const float* w, int gate, int step, int size) {
#pragma unroll
    for (int k = 0; k < REGISTERS; ++k) own[gate][k] = k < size ? w[k * step] : 0.0f;
  }
  // Of one gate with a line of shared memory, whose elements beyond the last one are zeros.
  __device__ __forceinline__ float times(int gate, const float* line) const {
    const Four<float>* fours = reinterpret_cast<const Four<float>*>(line);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < REGISTERS; k += 4) {
      Four<float> four = fours[k / 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += own[gate][k + i] * four.at[i];
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
};

struct Entered {
  float at[GATES];
};

// Takes steps forward.
template <int REGISTERS>
struct Forward {
  int size, mine, inputs;
  bool active, projected;
  const float* x;
  long long x_time, x_sample;
  float *out, *kept;
  int out_row;
  // A state is forgotten, or it is not, whatever came before: each place has a scale of its own.
  static constexpr bool LOCAL = true;
  Columns<REGISTERS> columns;
  float added[GATES], apart[GATES];
  const float* weights;
  float *line, *arrived;

  __device__ __forceinline__ void take(const Run& run, float (&v)[STATES], bool record) {
    int lane = threadIdx.x;
    line[lane] = active ? v[0] : 0.0f;
    __syncwarp();
    const float* from = x + run.sample * x_sample;
    go_through<AHEAD, Entered>(
        run, -1,
        [&](int i, long long, int, Entered& entered) {
          const float* at = from + run.time(i) * x_time;
          if (projected) {
#pragma unroll
            for (int gate = 0; gate < GATES; ++gate) entered.at[gate] = at[gate * size + mine];
          } else {
            entered.at[0] = lane < inputs ? at[lane] : 0.0f;
          }
        },
        [&](int parity, long long row, const Entered& entered) {
          const float* h = line + parity * 32;
          float parts[GATES], product[GATES], after[STATES], saved[C::SAVED + 1];
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate) {
            parts[gate] = entered.at[gate] + added[gate], product[gate] = columns.times(gate, h);
            if (C::recurrent(gate) != gate) product[gate] += apart[gate];
          }
          C::step(parts, product, v, after, saved);
#pragma unroll
          for (int s = 0; s < STATES; ++s) v[s] = active ? after[s] : 0.0f;
          line[(1 - parity) * 32 + lane] = v[0];
          if (active && record) {
            out[row * out_row + lane] = v[0];
            if (kept) {
              float* written = kept + row * KEPT * size + lane;
              written[0] = v[0];
#pragma unroll
              for (int k = 0; k < C::SAVED; ++k) written[(1 + k) * size] = saved[k];
#pragma unroll
              for (int s = 1; s < STATES; ++s) written[(C::SAVED + s) * size] = v[s];
            }
          }
          __syncwarp();
        },
        Never(),
        [&](Entered(&entered)[AHEAD]) {
          if (projected) return;
#pragma unroll
          for (int u = 0; u < AHEAD; ++u) {
            arrived[u * 32 + lane] = entered[u].at[0];
#pragma unroll
            for (int gate = 0; gate < GATES; ++gate) entered[u].at[gate] = 0.0f;
          }
          __syncwarp();
          for (int i = 0; i < inputs; i += 4) {
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
              Four<float> values = *reinterpret_cast<const Four<float>*>(arrived + u * 32 + i);
#pragma unroll
              for (int gate = 0; gate < GATES; ++gate) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                  entered[u].at[gate] += weights[(gate * INPUTS + i + c) * 32 + lane] * values.at[c];
                }
              }
            }
          }
          __syncwarp();
        });
  }
};

// What a backward step reads: what was kept of it, of the states before, and what is added to the gradient.
struct Read {
  float saved[C::SAVED + 1], after[STATES], before[STATES], grad;
};

// Takes gradients back.
template <int REGISTERS>
struct Backward {
  int time, size, mine;
  bool active;
  const float *kept, *grad_out;
  // Gradients may vanish: they are summed, and the largest of all places is their scale.
  static constexpr bool LOCAL = false;
  long long g_time, g_sample, g_element;
  Ends<const float> initial;
  Columns<REGISTERS> columns;
  float *grad_gates, *lines;

  __device__ __forceinline__ void take(const Run& run, float (&v)[STATES], bool record) {
    int lane = threadIdx.x, earlier = run.begin - run.direction;
    const float* added = grad_out ? grad_out + run.sample * g_sample + mine * g_element : nullptr;
    // The last step of the run before may still be read by other lanes where this one's first step writes.
    __syncwarp();
    int taken = go_through<AHEAD, Read>(
        run, earlier >= 0 && earlier < time ? run.row_at(earlier) : -1,
        [&](int i, long long row, long long preceding, Read& read) {
          const float *here = kept + row * KEPT * size + mine, *there = kept + preceding * KEPT * size + mine;
#pragma unroll
          for (int k = 0; k < C::SAVED; ++k) read.saved[k] = here[(1 + k) * size];
#pragma unroll
          for (int s = 0; s < STATES; ++s) {
            int k = s ? C::SAVED + s : 0;
            read.after[s] = here[k * size];
            read.before[s] = preceding < 0 ? initial.read(s, run.sample, mine) : there[k * size];
          }
          read.grad = added ? added[run.time(i) * g_time] : 0.0f;
        },
        [&](int parity, long long row, const Read& read) {
          float *line = lines + parity * GATES * 32, grad[STATES], parts[C::PARTS], direct[STATES];
#pragma unroll
          for (int s = 0; s < STATES; ++s) grad[s] = active ? (s ? v[s] : v[s] + read.grad) : 0.0f;
          C::back(read.saved, read.before, read.after, grad, parts, direct);
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate) line[gate * 32 + lane] = active ? parts[C::recurrent(gate)] : 0.0f;
          if (active && record) {
#pragma unroll
            for (int part = 0; part < C::PARTS; ++part) {
              grad_gates[(row * C::PARTS + part) * size + lane] = parts[part];
            }
          }
          __syncwarp();
          float sum = columns.times(0, line);
          if (C::carried(0)) sum += direct[0];
#pragma unroll
          for (int gate = 1; gate < GATES; ++gate) sum += columns.times(gate, line + gate * 32);
          v[0] = flushed(sum);
#pragma unroll
          for (int s = 1; s < STATES; ++s) v[s] = active ? flushed(direct[s]) : 0.0f;
        },
        [&] {
          bool alive = false;
#pragma unroll
          for (int s = 0; s < STATES; ++s) alive = alive || v[s] != 0.0f;
          return !grad_out && !__any_sync(0xffffffffu, alive);
        });
    if (!active) {
#pragma unroll
      for (int s = 0; s < STATES; ++s) v[s] = 0.0f;
    }
    if (!active || !record) return;
    for (int i = taken; i < run.steps; ++i) {
      float* written = grad_gates + static_cast<long long>(run.row(i)) * C::PARTS * size + lane;
      for (int part = 0; part < C::PARTS; ++part) written[part * size] = 0.0f;
    }
  }
};

// The states in which chunks start and end, (places, states, batch, size) each, and what is found of them: for each
// chunk whether it is to be taken again; (most, batch) largest moves of a start after each sweep, as shares of their
// scale; (batch,) steps that were finished one after the other. They lie in `memory` in this order.
struct Boundaries {
  Ends<const float> edge;
  const float* guess;
  float* memory;
  int count, batch, size;

  __device__ __forceinline__ long long at(int place, int s, int sample, int j) const {
    return ((place * static_cast<long long>(STATES) + s) * batch + sample) * size + j;
  }
  __device__ __forceinline__ float& start(int place, int s, int sample, int j) const {
    return memory[at(place, s, sample, j)];
  }
  __device__ __forceinline__ float& end(int place, int s, int sample, int j) const {
    return memory[at(count, 0, 0, 0) + at(place, s, sample, j)];
  }
  __device__ __forceinline__ float& again(int place, int sample) const {
    return memory[2 * at(count, 0, 0, 0) + place * static_cast<long long>(batch) + sample];
  }
  __device__ __forceinline__ float& defect(int sweep, int sample) const { return again(count + sweep, sample); }
  __device__ __forceinline__ float& left(int most, int sample) const { return again(count + most, sample); }
  // Where a place is guessed to start.
  __device__ __forceinline__ float guessed(int place, int s, int sample, int j) const {
    return place ? (guess ? guess[at(place, s, sample, j)] : 0.0f) : edge.read(s, sample, j);
  }
  // What leads to a place: where the one before came to.
  __device__ __forceinline__ float reached(int place, int s, int sample, int j) const {
    return place ? end(place - 1, s, sample, j) : edge.read(s, sample, j);
  }
};

// Takes the chunk of a place from where the one before comes to from a guess.
template <typename Walk>
__device__ __forceinline__ void sweep_once(Walk& walk, const Places& places, const Boundaries& states, int place) {
  int lane = threadIdx.x, sample = places.sample;
  if (place >= places.count) return;
  float v[STATES];
  int from = place ? place - 1 : 0;
#pragma unroll
  for (int s = 0; s < STATES; ++s) v[s] = walk.active ? states.guessed(from, s, sample, lane) : 0.0f;
  for (int now = from; now <= place; ++now) {
    if (now == place && walk.active) {
#pragma unroll
      for (int s = 0; s < STATES; ++s) states.start(place, s, sample, lane) = v[s];
    }
    walk.take(places.run(now), v, now == place);
  }
  if (walk.active) {
#pragma unroll
    for (int s = 0; s < STATES; ++s) states.end(place, s, sample, lane) = v[s];
  }
}

constexpr float TINY = 1.17549435e-38f;

// In size; infinity for what is no number.
__device__ __forceinline__ float size_of(float value) {
  value = fabs(value);
  return value >= 0.0f ? value : INFINITY;
}

__device__ __forceinline__ float larger(float a, float b) {
  return a > b ? a : b;
}

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) value = larger(value, __shfl_xor_sync(0xffffffffu, value, apart));
  return value;
}

// Sweeps over a sample's chunks until no start moves by more than the tolerance; at most `most` times, of which `swept`
// are done. Then goes step after step from the first place whose start moves. Moves are shares of the sample's largest
// element at all places or, where scales are local, of the element itself or the largest that enters a product there,
// whichever is larger: all that a step rounds is of that order.
template <typename Walk>
__device__ __forceinline__ void settle_sample(Walk& walk, const Places& places, const Boundaries& states, int swept,
                                              int most, float tolerance, const Ends<float>& last) {
  SHARED(float, moves, 3 * 32);
  SHARED(int, late, 1);
  int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, sample = places.sample;
  int count = places.count, sweep = swept, first = count;
  float v[STATES];
  for (;;) {
    bool settled = false, finishes = false;
    if (!warp && !lane) *late = count;
    if (sweep) {
      // How far starts are from where the chunks before came to, and were from the guess before two sweeps at once.
      float scale = 0.0f, move = 0.0f, first_move = 0.0f;
      for (int place = warp; place < count; place += warps) {
        bool differs = false;
        float largest = TINY;
        if (Walk::LOCAL) {
          float own = walk.active ? size_of(states.reached(place, 0, sample, lane)) : 0.0f;
          largest = larger(largest_of_warp(own), TINY);
        }
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
          if (!walk.active) continue;
          float reached = states.reached(place, s, sample, lane), start = states.start(place, s, sample, lane);
          float whole = Walk::LOCAL ? larger(size_of(reached), largest) : 1.0f;
          scale = larger(scale, size_of(reached)), move = larger(move, size_of((reached - start) / whole));
          if (sweep == 2 && swept == 2) {
            first_move = larger(first_move, size_of((start - states.guessed(place, s, sample, lane)) / whole));
          }
          differs = differs || reached != start;
        }
        differs = __any_sync(0xffffffffu, differs);
        if (!lane) states.again(place, sample) = differs ? 1.0f : 0.0f;
      }
      scale = largest_of_warp(scale), move = largest_of_warp(move), first_move = largest_of_warp(first_move);
      if (!lane) moves[warp] = scale, moves[32 + warp] = move, moves[64 + warp] = first_move;
      __syncthreads();
      for (int other = 0; other < warps; ++other) {
        scale = larger(scale, moves[other]), move = larger(move, moves[32 + other]);
        first_move = larger(first_move, moves[64 + other]);
      }
      scale = Walk::LOCAL ? 1.0f : larger(scale, TINY);
      float defect = size_of(move / scale);
      settled = defect <= tolerance;
      finishes = !settled && (sweep >= most || !(defect < INFINITY));
      if (!warp && !lane) {
        if (sweep == 2 && swept == 2) states.defect(0, sample) = size_of(first_move / scale);
        // Those of sweeps that are not needed are the last one's.
        for (int later = sweep - 1; later < most; ++later) states.defect(later, sample) = defect;
      }
    }
    if (settled) break;
    for (int place = warp; place < count; place += warps) {
      bool repeats = !sweep || states.again(place, sample) != 0.0f;
      if (repeats && walk.active) {
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
          float start = sweep ? states.reached(place, s, sample, lane) : states.guessed(place, s, sample, lane);
          states.start(place, s, sample, lane) = start;
        }
      }
      if (!sweep && !lane) states.again(place, sample) = 1.0f;
      if (finishes && repeats && !lane) atomicMin(late, place);
    }
    __syncthreads();
    first = finishes ? *late : count;
    // The last time one warp goes on from the first late place to the end.
    for (int place = finishes ? first + warp * count : warp; place < count; place += finishes ? count : warps) {
      if (!finishes && states.again(place, sample) == 0.0f) continue;
#pragma unroll
      for (int s = 0; s < STATES; ++s) {
        v[s] = walk.active ? states.start(place, s, sample, lane) : 0.0f;
      }
      walk.take(finishes ? places.rest(place) : places.run(place), v, true);
      if (walk.active) {
        int end = finishes ? count - 1 : place;
#pragma unroll
        for (int s = 0; s < STATES; ++s) states.end(end, s, sample, lane) = v[s];
      }
    }
    __syncthreads();
    if (finishes) break;
    ++sweep;
  }
  if (warp) return;
  if (!lane) states.left(most, sample) = __int_as_float(first < count ? places.rest(first).steps : 0);
  if (walk.active) {
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      float* to = last.at(s, sample, lane);
      if (to) *to = states.end(count - 1, s, sample, lane);
    }
  }
}

template <int REGISTERS, int MOST>
__device__ __forceinline__ Forward<REGISTERS> forward_walk(int size, int inputs, bool projected, const float* x,
                                                           long long x_time, long long x_sample, const float* w_in,
                                                           const float* w, const float* bias_in, const float* bias,
                                                           float* out, int out_row, float* kept) {
  SHARED(float, weights, GATES * INPUTS * 32);
  SHARED(float, lines, MOST * 2 * 32);
  SHARED(float, arrived, MOST * AHEAD * 32);
  int lane = threadIdx.x, warp = threadIdx.y, mine = lane < size ? lane : size - 1;
  Forward<REGISTERS> walk = {size, mine, inputs, lane < size, projected, x, x_time, x_sample, out, kept, out_row};
  walk.weights = weights, walk.line = lines + warp * 64, walk.arrived = arrived + warp * AHEAD * 32;
#pragma unroll
  for (int gate = 0; gate < GATES; ++gate) {
    walk.columns.load(w + (gate * size + mine) * static_cast<long long>(size), gate, 1, size);
    float in = bias_in ? bias_in[gate * size + mine] : 0.0f, own = bias ? bias[gate * size + mine] : 0.0f;
    bool apart = C::recurrent(gate) != gate;
    walk.added[gate] = apart ? in : in + own, walk.apart[gate] = apart ? own : 0.0f;
  }
  if (!projected) {
    // Elements beyond the last one have the last one's; inputs beyond the last one, up to whole fours, none.
    int whole = whole_fours(inputs);
    for (int e = warp; e < GATES * whole; e += blockDim.y) {
      int gate = e / whole, i = e % whole;
      weights[(gate * INPUTS + i) * 32 + lane] =
          i < inputs ? w_in[(gate * size + mine) * static_cast<long long>(inputs) + i] : 0.0f;
    }
  }
  __syncthreads();
  return walk;
}

template <int REGISTERS, int MOST>
__device__ __forceinline__ Backward<REGISTERS> backward_walk(int time, int batch, int size, const float* kept,
                                                             const float* grad_out, long long g_time,
                                                             long long g_sample, long long g_element,
                                                             const float* start, const float* start_others,
                                                             const float* w, float* grad_gates) {
  SHARED(float, lines, MOST * 2 * GATES * 32);
  int lane = threadIdx.x, mine = lane < size ? lane : size - 1;
  Backward<REGISTERS> walk = {time, size, mine, lane < size, kept, grad_out, g_time, g_sample, g_element,
                              {start, start_others, batch, size}};
  walk.grad_gates = grad_gates, walk.lines = lines + threadIdx.y * 2 * GATES * 32;
#pragma unroll
  for (int gate = 0; gate < GATES; ++gate) {
    walk.columns.load(w + gate * static_cast<long long>(size) * size + mine, gate, size, size);
  }
  return walk;
}

// What a block does in either launch: a sweep over some of a sample's chunks, or what settles them all.
template <bool SETTLES, typename Walk>
__device__ __forceinline__ void go(Walk& walk, const Places& places, const Boundaries& states, int swept, int most,
                                   float tolerance, const Ends<float>& last) {
  if (SETTLES) {
    settle_sample(walk, places, states, swept, most, tolerance, last);
  } else {
    sweep_once(walk, places, states, blockIdx.y * blockDim.y + threadIdx.y);
  }
}

template <bool SETTLES>
constexpr int MOST_WARPS = SETTLES ? WARPS : SWEEPING;

template <int REGISTERS, bool SETTLES>
__global__ void __launch_bounds__(MOST_WARPS<SETTLES> * 32, 1)
    take_states(int time, int batch, int size, int chunk, int direction, int swept, int most, float tolerance,
                int inputs, int projected, int out_row, const float* __restrict__ x, long long x_time,
                long long x_sample, const float* __restrict__ w_in, const float* __restrict__ w,
                const float* __restrict__ bias_in, const float* __restrict__ bias, const float* __restrict__ start,
                const float* __restrict__ start_others, const float* __restrict__ guess, float* __restrict__ out,
                float* __restrict__ kept, float* memory, float* __restrict__ end, float* __restrict__ end_others) {
  Forward<REGISTERS> walk = forward_walk<REGISTERS, MOST_WARPS<SETTLES>>(
      size, inputs, projected, x, x_time, x_sample, w_in, w, bias_in, bias, out, out_row, kept);
  Places places = {time, batch, chunk, direction, static_cast<int>(blockIdx.x), (time + chunk - 1) / chunk, false};
  Boundaries states = {{start, start_others, batch, size}, guess, memory, places.count, batch, size};
  go<SETTLES>(walk, places, states, swept, most, tolerance, {end, end_others, batch, size});
}

template <int REGISTERS, bool SETTLES>
__global__ void __launch_bounds__(MOST_WARPS<SETTLES> * 32, 1)
    take_gradients(int time, int batch, int size, int chunk, int direction, int swept, int most, float tolerance,
                   const float* __restrict__ kept, const float* __restrict__ start,
                   const float* __restrict__ start_others, const float* __restrict__ w,
                   const float* __restrict__ grad_out, long long g_time, long long g_sample, long long g_element,
                   const float* __restrict__ grad_end, const float* __restrict__ grad_end_others,
                   float* __restrict__ grad_gates, float* memory, float* __restrict__ grad_start,
                   float* __restrict__ grad_start_others) {
  Backward<REGISTERS> walk = backward_walk<REGISTERS, MOST_WARPS<SETTLES>>(
      time, batch, size, kept, grad_out, g_time, g_sample, g_element, start, start_others, w, grad_gates);
  Places places = {time, batch, chunk, direction, static_cast<int>(blockIdx.x), (time + chunk - 1) / chunk, true};
  Boundaries states = {{grad_end, grad_end_others, batch, size}, nullptr, memory, places.count, batch, size};
  go<SETTLES>(walk, places, states, swept, most, tolerance, {grad_start, grad_start_others, batch, size});
}

// Gradients of the weights are sums over rows, the steps of all samples, of products of gates' gradients with inputs and
// with the states before. First of some rows each, in tiles of TILE by TILE elements; then of all.
constexpr int ROWS = 16;

struct Tiles {
  int left, right;
  // What a part of the rows sums up: the products' tiles, and the sums of gates' gradients.
  __device__ __forceinline__ long long stride() const { return (left * right * TILE + left) * static_cast<long long>(TILE); }
  __device__ __forceinline__ long long product(int m, int n) const {
    return (static_cast<long long>(m / TILE) * right + n / TILE) * TILE * TILE + m % TILE * TILE + n % TILE;
  }
  __device__ __forceinline__ long long sum(int m) const { return static_cast<long long>(left) * right * TILE * TILE + m; }
};

__device__ __forceinline__ Tiles tiles_of(int size, int inputs) {
  return {(C::PARTS * size + TILE - 1) / TILE, (inputs + size + TILE - 1) / TILE};
}

template <int THREADS_OF_TILE>
__global__ void __launch_bounds__(THREADS_OF_TILE, 1)
    weights_parts(int time, int batch, int size, int inputs, int direction, int rows_each,
                  const float* __restrict__ grad_gates, const float* __restrict__ x, long long x_time,
                  long long x_sample, const float* __restrict__ kept, const float* __restrict__ start,
                  float* __restrict__ parts) {
  SHARED(float, lefts, ROWS * TILE);
  SHARED(float, rights, ROWS * TILE);
  Tiles tiles = tiles_of(size, inputs);
  int m = blockIdx.y * TILE, n = blockIdx.z * TILE, width = C::PARTS * size, thread = threadIdx.x;
  int column = thread % TILE, across = thread % (TILE / 4) * 4, down = thread / (TILE / 4) * 4;
  long long rows = static_cast<long long>(time) * batch, first = blockIdx.x * static_cast<long long>(rows_each);
  long long end = first + rows_each < rows ? first + rows_each : rows;
  float sums[4][4] = {}, totals[4] = {};
  for (long long base = first; base < end; base += ROWS) {
    for (int r = thread / TILE; r < ROWS; r += THREADS_OF_TILE / TILE) {
      long long row = base + r;
      float left = 0.0f, right = 0.0f;
      if (row < end) {
        int at = static_cast<int>(row / batch), sample = static_cast<int>(row % batch), i = n + column;
        if (m + column < width) left = grad_gates[row * width + m + column];
        if (i < inputs) {
          right = x[at * x_time + sample * x_sample + i];
        } else if (i < inputs + size) {
          int before = at - direction;
          if (before >= 0 && before < time) {
            right = kept[(before * static_cast<long long>(batch) + sample) * KEPT * size + i - inputs];
          } else if (start) {
            right = start[sample * static_cast<long long>(size) + i - inputs];
          }
        }
      }
      lefts[r * TILE + column] = left, rights[r * TILE + column] = right;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      Four<float> left = *reinterpret_cast<const Four<float>*>(lefts + r * TILE + down);
      Four<float> right = *reinterpret_cast<const Four<float>*>(rights + r * TILE + across);
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        totals[a] += left.at[a];
#pragma unroll
        for (int b = 0; b < 4; ++b) sums[a][b] += left.at[a] * right.at[b];
      }
    }
    __syncthreads();
  }
  float* written = parts + blockIdx.x * tiles.stride();
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) written[tiles.product(m + down + a, n + across + b)] = sums[a][b];
    if (!blockIdx.z && !across) written[tiles.sum(m + down + a)] = totals[a];
  }
}

// Sums the parts, in a fixed order: of GROUPS threads of an element each sums every GROUPS-th part.
template <int GROUPS>
__global__ void __launch_bounds__(GROUPS * 32, 1)
    weights_sums(int size, int inputs, int parts_count, const float* __restrict__ parts, float* __restrict__ grad_w_in,
                 float* __restrict__ grad_w, float* __restrict__ grad_bias_in, float* __restrict__ grad_bias) {
  SHARED(float, shares, GROUPS * 32);
  Tiles tiles = tiles_of(size, inputs);
  int lane = threadIdx.x, group = threadIdx.y, columns = inputs + size + 2;
  long long element = blockIdx.x * 32ll + lane;
  bool is_there = element < static_cast<long long>(GATES) * size * columns;
  // Rows of both weights and both biases lie behind one another.
  int row = static_cast<int>(element / columns), column = static_cast<int>(element % columns);
  int gate = row / size, j = row % size;
  bool of_input = column < inputs || column == inputs + size;
  float* out = column < inputs            ? grad_w_in
               : column < inputs + size   ? grad_w
               : column == inputs + size  ? grad_bias_in
                                          : grad_bias;
  float sum = 0.0f;
  if (is_there && out) {
    int m = 0;
#pragma unroll
    for (int g = 0; g < GATES; ++g) m = g == gate ? (of_input ? g : C::recurrent(g)) * size + j : m;
    const float* from = parts + (column < inputs + size ? tiles.product(m, column) : tiles.sum(m));
#pragma unroll 8
    for (int part = group; part < parts_count; part += GROUPS) sum += from[part * tiles.stride()];
  }
  shares[group * 32 + lane] = sum;
  __syncthreads();
  if (group || !is_there || !out) return;
  for (int other = 1; other < GROUPS; ++other) sum += shares[other * 32 + lane];
  out += column < inputs          ? row * static_cast<long long>(inputs) + column
         : column < inputs + size ? row * static_cast<long long>(size) + column - inputs
                                  : row;
  *out = sum;
}
