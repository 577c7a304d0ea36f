// Signals between processes: epochs in shared cache lines; waits spin briefly and then sleep in the kernel.
#include <algorithm>
#include <climits>
#include <ctime>

#include "common.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

AF_INLINE void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#ifdef __linux__
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the futex word is the low half of the epoch");

// Shared futexes (no FUTEX_PRIVATE_FLAG): the waiter and the setter are different processes.
void sleep_on(af::Slot* slot, uint64_t seen, int64_t ns) {
  const timespec limit{time_t(ns / 1000000000), long(ns % 1000000000)};
  syscall(SYS_futex, &slot->epoch, FUTEX_WAIT, uint32_t(seen), &limit, nullptr, 0);
}

void wake(af::Slot* slot) { syscall(SYS_futex, &slot->epoch, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
void sleep_on(af::Slot*, uint64_t, int64_t ns) {
  const timespec t{0, long(std::min<int64_t>(ns, 50000))};
  nanosleep(&t, nullptr);
}

void wake(af::Slot*) {}
#endif

}  // namespace

AF_EXPORT void af_signal(af::Slot* slot, uint64_t value) {
  // A sequentially consistent exchange releases what came before (streaming stores too) and, with the
  // waiter's increment-then-look, makes sure that one of the two sees the other.
  slot->epoch.exchange(value, std::memory_order_seq_cst);
  if (slot->waiters.load(std::memory_order_seq_cst) != 0) wake(slot);
}

AF_EXPORT int af_wait(af::Slot* slot, uint64_t value, const af::Header* peer, uint64_t epoch, uint64_t hash,
                      int spin_us, int timeout_ms) {
  constexpr int kPending = -1;
  const auto look = [&] {
    const bool reached = slot->epoch.load(std::memory_order_acquire) >= value;
    if (peer && peer->epoch.load(std::memory_order_acquire) == epoch &&
        peer->hash.load(std::memory_order_relaxed) != hash)
      return int(af::kMismatch);
    return reached ? int(af::kOk) : kPending;
  };

  int status = look();
  if (status != kPending) return status;
  const int64_t start = now_ns();
  while (now_ns() - start < spin_us * int64_t(1000)) {
    for (int i = 0; i < 16; ++i) relax();
    if ((status = look()) != kPending) return status;
  }

  slot->waiters.fetch_add(1, std::memory_order_seq_cst);
  for (;;) {
    const uint64_t seen = slot->epoch.load(std::memory_order_seq_cst);
    const int64_t left = start + timeout_ms * int64_t(1000000) - now_ns();
    status = look();
    if (status != kPending || left <= 0) break;
    sleep_on(slot, seen, left);
  }
  slot->waiters.fetch_sub(1, std::memory_order_seq_cst);
  return status == kPending ? int(af::kTimedOut) : status;
}

// Signal `value` to `out[rank]` of every rank, then wait for it at `in[rank]`. Returns the first status that is not
// kOk.
AF_EXPORT int af_meet(af::Slot* const* out, af::Slot* const* in, int world, uint64_t value,
                      const af::Header* const* headers, uint64_t epoch, uint64_t hash, int spin_us, int timeout_ms) {
  for (int rank = 0; rank < world; ++rank) af_signal(out[rank], value);
  int status = af::kOk;
  for (int rank = 0; rank < world && status == af::kOk; ++rank)
    status = af_wait(in[rank], value, headers[rank], epoch, hash, spin_us, timeout_ms);
  return status;
}

// Publish the call that this rank is in. `length` is at most the size of Header::text.
AF_EXPORT void af_publish(af::Header* header, uint64_t epoch, uint64_t hash, const char* text, uint64_t length) {
  header->hash.store(hash, std::memory_order_relaxed);
  header->length = std::min<uint64_t>(length, sizeof(header->text));
  std::memcpy(header->text, text, header->length);
  header->epoch.store(epoch, std::memory_order_release);
}
