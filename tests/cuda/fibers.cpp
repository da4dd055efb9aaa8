// Runs CUDA kernels on the CPU: a fiber for each CUDA thread of a block, blocks one after the other.
//
// A fiber runs until it waits: at a barrier of its block, or at a collective of its warp. Who then takes the next turn,
// and which block comes next, FIBER_ORDER says: what depends on it is a race. Compiled without sanitizers,
// which are told of each switch: to ThreadSanitizer fibers are threads that only barriers order, so that two of them
// on one address are a race whichever order they ran in. Checked in every build: threads that leave before a barrier
// that others wait at, masks that name lanes which are not there, and waits that never end.
#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_map>
#include <vector>

#ifndef __x86_64__
#include <ucontext.h>
#endif

extern "C" {
__attribute__((weak)) void* __tsan_create_fiber(unsigned);
__attribute__((weak)) void __tsan_destroy_fiber(void*);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void __tsan_switch_to_fiber(void*, unsigned);
__attribute__((weak)) void __tsan_acquire(void*);
__attribute__((weak)) void __tsan_release(void*);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, std::size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*);
__attribute__((weak)) void AnnotateIgnoreReadsBegin(const char*, int);
__attribute__((weak)) void AnnotateIgnoreReadsEnd(const char*, int);
__attribute__((weak)) void AnnotateIgnoreWritesBegin(const char*, int);
__attribute__((weak)) void AnnotateIgnoreWritesEnd(const char*, int);
}

#ifdef __x86_64__
extern "C" void fiber_switch(void** save, void* load);
asm(R"(
.text
.type fiber_switch,@function
fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fiber_switch,.-fiber_switch
)");
#endif

namespace {

constexpr std::size_t kStack = 256 * 1024;

enum class State { ready, at_block, at_warp, done };

struct Fiber {
  FiberThread seen;
  State state = State::done;
  // Whether it has run no block of this launch before, and runs none after.
  bool first = true, last = true;
  unsigned mask = 0;
  const char* what = "";
  std::uint64_t bits = 0, gathered[32] = {};
  char* stack = nullptr;
  void *fake_stack = nullptr, *tsan = nullptr;
#ifdef __x86_64__
  void* pointer = nullptr;
#else
  ucontext_t context;
#endif
};

std::vector<Fiber*> pool;
std::vector<Fiber*> block;
Fiber scheduler;
Fiber* current = nullptr;
FiberBody running_body = nullptr;
void** running_arguments = nullptr;
std::string failure;
char* dynamic_memory = nullptr;
std::unordered_map<const void*, void*> static_memory;
std::vector<void*> used_memory;
// What threads that meet at a barrier release and acquire; alternating, so that who is early for the next one does not
// order who is late for this one.
char block_tokens[2], warp_tokens[32][2];
// What orders a launch after those before it, and nothing within it.
char start_token, end_token;
unsigned block_turn = 0, warp_turn[32] = {};
std::size_t taken = 0;

const void* scheduler_bottom = nullptr;
std::size_t scheduler_size = 0;

void go(Fiber& from, Fiber& to) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan, 1);
  if (__sanitizer_start_switch_fiber) {
    bool back = &to == &scheduler;
    __sanitizer_start_switch_fiber(&from.fake_stack, back ? scheduler_bottom : to.stack, back ? scheduler_size : kStack);
  }
#ifdef __x86_64__
  fiber_switch(&from.pointer, to.pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
  if (__sanitizer_finish_switch_fiber) {
    const void* bottom;
    std::size_t size;
    __sanitizer_finish_switch_fiber(from.fake_stack, &bottom, &size);
  }
}

void entry() {
  if (__sanitizer_finish_switch_fiber) {
    const void* bottom;
    std::size_t size;
    __sanitizer_finish_switch_fiber(current->fake_stack, &bottom, &size);
    if (!scheduler_bottom) scheduler_bottom = bottom, scheduler_size = size;
  }
  for (;;) {
    if (__tsan_acquire && current->first) __tsan_acquire(&start_token);
    running_body(running_arguments);
    if (__tsan_release && current->last) __tsan_release(&end_token);
    current->state = State::done;
    go(*current, scheduler);
  }
}

Fiber* made() {
  auto* fiber = new Fiber;
  void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) std::perror("fiber stack"), std::abort();
  fiber->stack = static_cast<char*>(stack);
#ifdef __x86_64__
  // The frame that fiber_switch pops: six registers, then where to go; the stack is aligned as after a call.
  auto** top = reinterpret_cast<void**>(fiber->stack + kStack) - 2;
  top[0] = reinterpret_cast<void*>(entry);
  top[1] = nullptr;
  fiber->pointer = top - 6;
#else
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = kStack;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, entry, 0);
#endif
  if (__tsan_create_fiber) fiber->tsan = __tsan_create_fiber(0);
  return fiber;
}

void wait() { go(*current, scheduler); }

// While one is there, ThreadSanitizer neither sees what this thread touches nor takes new memory for written by it.
struct Unseen {
  Unseen() {
    if (AnnotateIgnoreReadsBegin) AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0);
  }
  ~Unseen() {
    if (AnnotateIgnoreReadsEnd) AnnotateIgnoreReadsEnd("", 0), AnnotateIgnoreWritesEnd("", 0);
  }
};

// Of every block its own, so that no two blocks seem to race for it; freed when all are done.
void* shared_memory(std::size_t size) {
  Unseen unseen;
  void* memory = std::malloc(size);
  std::memset(memory, 0xff, size);
  used_memory.push_back(memory);
  return memory;
}

// The next of a pool of a block's threads, or of twice as many where there are more blocks: two in a row never share a
// fiber, so nothing orders them. Fibers are few, for to ThreadSanitizer a barrier of n of them takes n² steps.
Fiber* next(std::size_t threads, std::size_t blocks) {
  std::size_t size = std::min<std::size_t>(blocks, 2) * threads;
  while (pool.size() < size) pool.push_back(made());
  Fiber* fiber = pool[taken++ % size];
  return fiber;
}

std::string where(const Fiber& fiber) {
  const auto& s = fiber.seen;
  char text[160];
  std::snprintf(text, sizeof text, "thread (%u, %u, %u) of block (%u, %u, %u)", s.thread.x, s.thread.y, s.thread.z,
                s.block.x, s.block.y, s.block.z);
  return text;
}

// Lets go of a warp's lanes that have all arrived at one collective.
bool release_warp(std::size_t first) {
  bool moved = false;
  for (std::size_t i = first; i < std::min(first + 32, block.size()); ++i) {
    Fiber& fiber = *block[i];
    if (fiber.state != State::at_warp) continue;
    bool complete = true;
    for (int lane = 0; lane < 32 && complete; ++lane) {
      if (!(fiber.mask >> lane & 1u)) continue;
      std::size_t other = first + lane;
      complete = other < block.size() && block[other]->state == State::at_warp && block[other]->mask == fiber.mask &&
                 !std::strcmp(block[other]->what, fiber.what);
    }
    if (!complete) continue;
    std::uint64_t all[32] = {};
    unsigned mask = fiber.mask;
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1u) all[lane] = block[first + lane]->bits;
    for (int lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1u)) continue;
      std::memcpy(block[first + lane]->gathered, all, sizeof all);
      block[first + lane]->state = State::ready;
    }
    moved = true;
  }
  return moved;
}

bool release() {
  bool moved = false, all = true;
  for (Fiber* fiber : block) all = all && fiber->state == State::at_block;
  if (all) {
    for (Fiber* fiber : block) fiber->state = State::ready;
    ++block_turn;
    return true;
  }
  for (std::size_t first = 0; first < block.size(); first += 32) moved = release_warp(first) || moved;
  return moved;
}

void stuck() {
  std::size_t done = 0;
  const Fiber* waiting = nullptr;
  for (const Fiber* fiber : block) {
    done += fiber->state == State::done;
    if (fiber->state != State::done && !waiting) waiting = fiber;
  }
  const char* at = waiting->state == State::at_block ? "__syncthreads" : waiting->what;
  failure = where(*waiting) + " waits at " + at + " for ever: " + std::to_string(done) + " of " +
            std::to_string(block.size()) + " threads have left, and others wait elsewhere or are not there";
}

// Who goes first, of a block's threads or of a grid's blocks: where FIBER_ORDER is 0 the first, where it is 1 the last;
// another number shuffles them, threads anew whenever all have had their turn.
struct Order {
  unsigned chosen;
  std::uint64_t random;

  Order() {
    const char* given = std::getenv("FIBER_ORDER");
    chosen = given ? static_cast<unsigned>(std::atoi(given)) : 0;
    random = 0x9e3779b97f4a7c15ull * (chosen + 1);
  }
  std::vector<std::size_t> of(std::size_t count) {
    std::vector<std::size_t> sequence(count);
    for (std::size_t i = 0; i < count; ++i) sequence[i] = chosen == 1 ? count - 1 - i : i;
    shuffle(sequence);
    return sequence;
  }
  void shuffle(std::vector<std::size_t>& sequence) {
    if (chosen < 2) return;
    for (std::size_t i = sequence.size(); i > 1; --i) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      std::swap(sequence[i - 1], sequence[random % i]);
    }
  }
};

// The place of a number among so many in three directions.
dim3 within(std::size_t number, const unsigned* sizes) {
  return {static_cast<unsigned>(number % sizes[0]), static_cast<unsigned>(number / sizes[0] % sizes[1]),
          static_cast<unsigned>(number / sizes[0] / sizes[1])};
}

void run_block(Order& order) {
  std::vector<std::size_t> sequence = order.of(block.size());
  while (failure.empty()) {
    order.shuffle(sequence);
    bool ran = false, left = false;
    for (std::size_t i : sequence) {
      if (block[i]->state == State::ready) {
        current = block[i];
        go(scheduler, *current);
        ran = true;
        if (!failure.empty()) return;
      }
      left = left || block[i]->state != State::done;
    }
    if (!left) return;
    if (!ran && !release()) return stuck();
    if (ran) release();
  }
}

}  // namespace

extern "C" {

FiberThread* fiber_self() { return &current->seen; }

void fiber_fail(const char* message) {
  failure = where(*current) + ": " + message;
  for (;;) wait();
}

void fiber_sync_block() {
  char* token = &block_tokens[block_turn & 1];
  if (__tsan_release) __tsan_release(token);
  current->state = State::at_block;
  wait();
  if (__tsan_acquire) __tsan_acquire(token);
}

const std::uint64_t* fiber_exchange(unsigned mask, const char* what, std::uint64_t bits) {
  if (!(mask >> current->seen.lane & 1u)) fiber_fail("its mask does not name the lane itself");
  current->mask = mask, current->what = what, current->bits = bits;
  current->state = State::at_warp;
  wait();
  return current->gathered;
}

void fiber_sync_warp(unsigned mask) {
  int warp = current->seen.warp;
  char* token = &warp_tokens[warp][warp_turn[warp] & 1];
  static const char* name = "__syncwarp";
  if (__tsan_release) __tsan_release(token);
  fiber_exchange(mask, name, 0);
  if (__tsan_acquire) __tsan_acquire(token);
  // The first lane that goes on turns to the other token.
  if (token == &warp_tokens[warp][warp_turn[warp] & 1]) ++warp_turn[warp];
}

void* fiber_dynamic_shared(std::size_t alignment) {
  if (!dynamic_memory) fiber_fail("dynamic shared memory is used, and the launch asks for none");
  if (reinterpret_cast<std::uintptr_t>(dynamic_memory) % alignment) fiber_fail("dynamic shared memory is misaligned");
  return dynamic_memory;
}

void* fiber_static_shared(const void* key, std::size_t size) {
  Unseen unseen;
  void*& memory = static_memory[key];
  if (!memory) memory = shared_memory(size);
  return memory;
}

const char* fiber_launch(FiberBody body, void** arguments, const unsigned* grid, const unsigned* size,
                         std::size_t shared, std::size_t bound) {
  failure.clear();
  running_body = body, running_arguments = arguments;
  Order order;
  if (__tsan_get_current_fiber) scheduler.tsan = __tsan_get_current_fiber();
  if (__tsan_release) __tsan_release(&start_token);
  std::size_t threads = static_cast<std::size_t>(size[0]) * size[1] * size[2];
  if (!threads || threads > bound)
    failure = "a block has " + std::to_string(threads) + " threads; it may have 1 to " + std::to_string(bound);
  if (grid[1] > 65535 || grid[2] > 65535)
    failure = "the grid is " + std::to_string(grid[1]) + " by " + std::to_string(grid[2]) + " in y and z";
  if (shared > 232448) failure = "a block asks for " + std::to_string(shared) + " bytes of shared memory";
  std::size_t blocks = static_cast<std::size_t>(grid[0]) * grid[1] * grid[2];
  std::size_t begun = 0;
  for (std::size_t number : order.of(blocks)) {
    if (!failure.empty()) break;
    {
      Unseen unseen;
      static_memory.clear();
    }
    block.clear();
    if (shared) dynamic_memory = static_cast<char*>(shared_memory(shared));
    dim3 place = within(number, grid);
    for (unsigned i = 0; i < threads; ++i) {
      Fiber* fiber = next(threads, blocks);
      fiber->state = State::ready;
      fiber->first = begun < 2, fiber->last = begun + 2 >= blocks;
      fiber->seen = {within(i, size),
                     place,
                     {size[0], size[1], size[2]},
                     {grid[0], grid[1], grid[2]},
                     static_cast<int>(i % 32),
                     static_cast<int>(i / 32)};
      block.push_back(fiber);
    }
    run_block(order);
    ++begun;
  }
  dynamic_memory = nullptr;
  if (__tsan_acquire) __tsan_acquire(&end_token);
  {
    Unseen unseen;
    for (void* memory : used_memory) std::free(memory);
    used_memory.clear(), static_memory.clear();
  }
  if (failure.empty()) return nullptr;
  // Fibers that stand in the middle of a kernel are of no more use.
  pool.clear(), taken = 0;
  return failure.c_str();
}
}
