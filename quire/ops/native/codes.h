// Codes of four and eight bits as floats, a register at a time.

#ifndef QUIRE_CODES_H_
#define QUIRE_CODES_H_

#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.h"

namespace quire {
namespace {

typedef uint8_t ByteLanes __attribute__((vector_size(kLanes)));

// Bytes as integers, kLanes of them. Compilers convert vectors of bytes one by one.
inline IntLanes unsigned_bytes(const void* from) {
#if defined(QUIRE_LANES_512)
  return (IntLanes)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(QUIRE_LANES_256)
  return (IntLanes)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#else
  ByteLanes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, IntLanes);
#endif
}

// Codes of four bits, kLanes of them from the i-th on: i is even.
inline IntLanes four_bit_codes(const uint8_t* codes, int64_t i) {
#if defined(QUIRE_LANES_512) || defined(QUIRE_LANES_256)
  uint64_t pairs = 0;
  std::memcpy(&pairs, codes + i / 2, kLanes / 2);
  const __m128i words = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(pairs));
  const __m128i low = _mm_and_si128(words, _mm_set1_epi16(15)), high = _mm_slli_epi16(_mm_srli_epi16(words, 4), 8);
  const __m128i apart = _mm_or_si128(low, high);
  return unsigned_bytes(&apart);
#else
  uint8_t apart[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) apart[lane] = codes[(i + lane) / 2] >> 4 * (lane & 1) & 15;
  return unsigned_bytes(apart);
#endif
}

// The numbers of codes, kLanes at a time from the i-th on.
inline Lanes four_bits(const uint8_t* codes, int64_t i) { return __builtin_convertvector(four_bit_codes(codes, i), Lanes); }

// e2m1: a sign, two bits of exponent, one of fraction.
inline Lanes four_bit_floats(const uint8_t* codes, int64_t i) {
  const IntLanes all_bits = four_bit_codes(codes, i), size = all_bits & 7;
  const IntLanes usual = (size << 22) + (126 << 23);
  Lanes normal, found;
  std::memcpy(&normal, &usual, sizeof(normal));
  found = size < 2 ? __builtin_convertvector(size, Lanes) * 0.5f : normal;
  return (all_bits & 8) != 0 ? -found : found;
}

inline Lanes eight_bits(const uint8_t* codes, int64_t i) {
  const IntLanes bytes = unsigned_bytes(codes + i);
  return __builtin_convertvector(bytes << 24 >> 24, Lanes);
}

// e4m3: a sign, four bits of exponent, three of fraction; without infinities, and 127 is no number.
inline Lanes eight_bit_floats(const uint8_t* codes, int64_t i) {
  const IntLanes all_bits = unsigned_bytes(codes + i), size = all_bits & 127;
  const IntLanes usual = (size << 20) + (120 << 23);
  Lanes normal, found;
  std::memcpy(&normal, &usual, sizeof(normal));
  found = size < 8 ? __builtin_convertvector(size, Lanes) * 0x1p-9f : normal;
  found = size == 127 ? all(std::numeric_limits<float>::quiet_NaN()) : found;
  IntLanes bits;
  std::memcpy(&bits, &found, sizeof(bits));
  bits |= (all_bits & 128) << 24;
  std::memcpy(&found, &bits, sizeof(found));
  return found;
}

// One of them.
inline float eight_bit_float(uint8_t code) {
  const uint32_t size = code & 127, sign = uint32_t(code & 128) << 24;
  if (size == 127) return std::numeric_limits<float>::quiet_NaN();
  if (size < 8) return (sign ? -0x1p-9f : 0x1p-9f) * size;
  const uint32_t bits = (size << 20) + (120u << 23) + sign;
  float found;
  std::memcpy(&found, &bits, sizeof(found));
  return found;
}

// Inputs from `first` to `last` of a channel, which share a scale; a run of four bits begins at an even one.
template <Lanes (*kNumbers)(const uint8_t*, int64_t), int kPerByte>
void widen_run(const uint8_t* codes, int64_t first, int64_t last, float zero, float scale, float* to) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) write(to + i, (kNumbers(codes, i) - zero) * scale);
  if (i == last) return;
  uint8_t rest[kLanes] = {};
  std::memcpy(rest, codes + i / kPerByte, (last - i + kPerByte - 1) / kPerByte);
  const Lanes left = (kNumbers(rest, 0) - zero) * scale;
  std::memcpy(to + i, &left, (last - i) * sizeof(float));
}

}  // namespace
}  // namespace quire

#endif  // QUIRE_CODES_H_
