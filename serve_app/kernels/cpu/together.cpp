// The sum of what several processes of one machine have computed, in memory that they share.
//
// Each has two places for a part of its numbers, which it uses in turns. It writes, says that it has come, waits until
// all others have, and adds up everybody's in the order of ranks, so that all get the same numbers to the last bit. Who
// has come to a part has read the one before it: so a place that is written again nobody reads any more.
//
//     header    a line for each rank: how often it has come, how many sleep until it does
//     parts     rank 0: place 0, place 1 | rank 1: place 0, place 1 | ...

#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct alignas(64) Line {
  std::atomic<uint32_t> come;
  std::atomic<uint32_t> sleepers;
  int64_t unused;
  int64_t pid;  // for serve_app/parallel/shared.py
};

// serve_app/parallel/shared.py has the same.
struct Args {
  char* memory;
  const void* x;
  void* out;
  int64_t count;       // numbers
  int64_t bfloat16;    // or float32
  int64_t rank, ranks;
  int64_t part_bytes;  // of a place
  int64_t done;        // numbers that are added up already
  int64_t come;        // how often this rank has come
  int64_t written;     // whether its next part is written
  int64_t spins, wait_ns;
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until `line` says something else than `seen`, or for so long at most. Elsewhere than on Linux nobody shares memory.
void sleep_on(Line& line, uint32_t seen, int64_t ns) {
#if defined(__linux__)
  timespec rest{static_cast<time_t>(ns / 1000000000LL), static_cast<long>(ns % 1000000000LL)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&line.come), FUTEX_WAIT, seen, &rest, nullptr, 0);
#endif
}

// Whether the rank of `line` has come so often; waits for it at most until `wait_ns` from now.
bool await(Line& line, uint32_t wanted, int64_t spins, int64_t wait_ns) {
  for (int64_t i = 0; i < spins; ++i) {
    if (static_cast<int32_t>(line.come.load(std::memory_order_acquire) - wanted) >= 0) return true;
    pause();
  }
  timespec begun;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  for (;;) {
    line.sleepers.fetch_add(1);
    uint32_t seen = line.come.load();
    if (static_cast<int32_t>(seen - wanted) >= 0) {
      line.sleepers.fetch_sub(1);
      return true;
    }
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t left = wait_ns - (now.tv_sec - begun.tv_sec) * 1000000000LL - (now.tv_nsec - begun.tv_nsec);
    if (left > 0) sleep_on(line, seen, left);
    line.sleepers.fetch_sub(1);
    if (left <= 0) return false;
  }
}

void arrive(Line& line) {
  line.come.fetch_add(1);
#if defined(__linux__)
  if (line.sleepers.load())
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&line.come), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

float wide(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

// To the nearest, ties to even; NaN stays NaN.
uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

constexpr int64_t STRIP = 512;

void add_floats(const char* first, int64_t apart, int64_t ranks, float* out, int64_t count) {
  std::memcpy(out, first, count * 4);
  for (int64_t rank = 1; rank < ranks; ++rank) {
    const float* x = reinterpret_cast<const float*>(first + rank * apart);
    for (int64_t i = 0; i < count; ++i) out[i] += x[i];
  }
}

void add_halves(const char* first, int64_t apart, int64_t ranks, uint16_t* out, int64_t count) {
  float sums[STRIP];
  for (int64_t at = 0; at < count; at += STRIP) {
    int64_t some = count - at < STRIP ? count - at : STRIP;
    const uint16_t* x = reinterpret_cast<const uint16_t*>(first) + at;
    for (int64_t i = 0; i < some; ++i) sums[i] = wide(x[i]);
    for (int64_t rank = 1; rank < ranks; ++rank) {
      const uint16_t* y = reinterpret_cast<const uint16_t*>(first + rank * apart) + at;
      for (int64_t i = 0; i < some; ++i) sums[i] += wide(y[i]);
    }
    for (int64_t i = 0; i < some; ++i) out[at + i] = narrow(sums[i]);
  }
}

}  // namespace

// 0: done; 1: somebody has not come yet, call again.
extern "C" int add_up(Args* a) {
  int64_t size = a->bfloat16 ? 2 : 4, each = a->part_bytes / size;
  Line* lines = reinterpret_cast<Line*>(a->memory);
  char* parts = a->memory + a->ranks * static_cast<int64_t>(sizeof(Line));
  while (a->done < a->count) {
    int64_t some = a->count - a->done < each ? a->count - a->done : each;
    int64_t turn = a->written ? a->come - 1 : a->come;
    char* place = parts + (turn & 1) * a->part_bytes;
    if (!a->written) {
      std::memcpy(place + a->rank * 2 * a->part_bytes, static_cast<const char*>(a->x) + a->done * size, some * size);
      a->come++;
      a->written = 1;
      arrive(lines[a->rank]);
    }
    for (int64_t rank = 0; rank < a->ranks; ++rank)
      if (!await(lines[rank], static_cast<uint32_t>(a->come), a->spins, a->wait_ns)) return 1;
    if (a->bfloat16)
      add_halves(place, 2 * a->part_bytes, a->ranks, static_cast<uint16_t*>(a->out) + a->done, some);
    else
      add_floats(place, 2 * a->part_bytes, a->ranks, static_cast<float*>(a->out) + a->done, some);
    a->done += some;
    a->written = 0;
  }
  return 0;
}
