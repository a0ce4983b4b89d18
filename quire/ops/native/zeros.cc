// Arrays of zeros whose memory is taken when it is first written.

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>
#include <cstring>

#include "operation.h"

namespace quire {
namespace {

// The allocator hands out private memory, new or used before. The system takes back whole pages of it, and gives zeros
// where they are touched again.
bool give_back(char* begin, char* end) {
#ifdef __linux__
  return begin == end || madvise(begin, end - begin, MADV_DONTNEED) == 0;
#else
  return false;
#endif
}

uintptr_t page_bytes() {
#ifdef __linux__
  return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
#else
  return 4096;
#endif
}

Fault Zeros(Out<void> out, int64_t item_bytes) {
  char* const begin = static_cast<char*>(out.data);
  char* const end = begin + out.count() * item_bytes;
  const uintptr_t page = page_bytes();
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  char* const last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  if (first >= last || !give_back(first, last)) {
    std::memset(begin, 0, end - begin);
    return nullptr;
  }
  std::memset(begin, 0, first - begin);
  std::memset(last, 0, end - last);
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_zeros, quire::Zeros, "item_bytes")
