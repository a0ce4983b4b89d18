// Which libraries that were built ahead can run here. Compiled for any processor of its architecture.
//
// What a processor lists is not enough: the system must save the registers too. `__builtin_cpu_supports` asks for both
// (cpuid and xgetbv), and Linux lists for ARM what it lets programs use.

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

#include <asm/hwcap.h>
#endif

extern "C" int quire_can_run(const char* level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (std::strcmp(level, "avx2") == 0) return avx2;
  if (std::strcmp(level, "avx512-vnni") == 0) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  }
#elif defined(__aarch64__) && defined(__linux__)
  if (std::strcmp(level, "dotprod") == 0) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
  return 0;
}
