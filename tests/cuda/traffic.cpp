// Counts what instrumented loads and stores ask for, by the range of memory that they fall into.
#include <cstddef>
#include <cstdint>

namespace {
constexpr int MOST = 32;
std::uint64_t first[MOST], last[MOST], counted[2][MOST];
int ranges = 0;

void count(void* pointer, std::size_t size, bool stored) {
  auto address = reinterpret_cast<std::uint64_t>(pointer);
  for (int i = 0; i < ranges; ++i)
    if (first[i] <= address && address < last[i]) {
      counted[stored][i] += size;
      return;
    }
}
}  // namespace

extern "C" {
#define COUNTED(size)                                                                 \
  void __asan_load##size##_noabort(void* pointer) { count(pointer, size, false); }    \
  void __asan_store##size##_noabort(void* pointer) { count(pointer, size, true); }
COUNTED(1)
COUNTED(2)
COUNTED(4)
COUNTED(8)
COUNTED(16)
void __asan_loadN_noabort(void* pointer, std::size_t size) { count(pointer, size, false); }
void __asan_storeN_noabort(void* pointer, std::size_t size) { count(pointer, size, true); }
void __asan_handle_no_return() {}

void traffic_begin() { ranges = 0; }
void traffic_range(std::uint64_t begin, std::uint64_t end) {
  first[ranges] = begin, last[ranges] = end, counted[0][ranges] = counted[1][ranges] = 0;
  ++ranges;
}
std::uint64_t traffic_of(int range, int stored) { return counted[stored][range]; }
}
