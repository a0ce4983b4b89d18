// Codes of four and eight bits as floats, a register at a time: (code - zero point) * scale.

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

// Codes of four bits in the lowest bits of lanes, kLanes of them from the i-th on; i is even. Other bits are anything.
inline IntLanes four_bit_codes(const uint8_t* codes, int64_t i) {
#if defined(QUIRE_LANES_512)
  uint64_t pairs;
  std::memcpy(&pairs, codes + i / 2, sizeof(pairs));
  const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const IntLanes words = (IntLanes)_mm512_permutexvar_epi32(halves, _mm512_set1_epi64(pairs));
  const IntLanes places = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
#elif defined(QUIRE_LANES_256)
  int32_t pairs;
  std::memcpy(&pairs, codes + i / 2, sizeof(pairs));
  const IntLanes words = pairs - IntLanes{}, places = {0, 4, 8, 12, 16, 20, 24, 28};
#else
  int16_t pairs;
  std::memcpy(&pairs, codes + i / 2, sizeof(pairs));
  const IntLanes words = pairs - IntLanes{}, places = {0, 4, 8, 12};
#endif
  return words >> places;
}

// The numbers of a group of inputs. Of four bits there are sixteen, which a register of AVX-512 holds. Those that are cheap
// take fewer instructions than writing them to memory and reading them again.
struct FourBits {
  static constexpr int kPerByte = 2;
  static constexpr bool kIsCheap = true;
#if defined(QUIRE_LANES_512)
  FourBits(float zero, float scale)
      : numbers((Lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - zero) * scale) {}

  Lanes operator()(const uint8_t* codes, int64_t i) const {
    return (Lanes)_mm512_permutexvar_ps((__m512i)four_bit_codes(codes, i), (__m512)numbers);
  }

  Lanes numbers;
#else
  FourBits(float zero, float scale) : zero(all(zero)), scale(all(scale)) {}

  Lanes operator()(const uint8_t* codes, int64_t i) const {
    return (__builtin_convertvector(four_bit_codes(codes, i) & 15, Lanes) - zero) * scale;
  }

  Lanes zero, scale;
#endif
};

// e2m1: a sign, two bits of exponent, one of fraction. There is no zero point.
struct FourBitFloats {
  static constexpr int kPerByte = 2;
  static constexpr bool kIsCheap = kLanes == 16;
#if defined(QUIRE_LANES_512)
  FourBitFloats(float, float scale)
      : numbers(Lanes{0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6} * scale) {}

  Lanes operator()(const uint8_t* codes, int64_t i) const {
    return (Lanes)_mm512_permutexvar_ps((__m512i)four_bit_codes(codes, i), (__m512)numbers);
  }

  Lanes numbers;
#else
  FourBitFloats(float, float scale) : scale(all(scale)) {}

  Lanes operator()(const uint8_t* codes, int64_t i) const {
    const IntLanes all_bits = four_bit_codes(codes, i), size = all_bits & 7;
    const IntLanes usual = (size << 22) + (126 << 23);
    Lanes normal, found;
    std::memcpy(&normal, &usual, sizeof(normal));
    found = size < 2 ? __builtin_convertvector(size, Lanes) * 0.5f : normal;
    return ((all_bits & 8) != 0 ? -found : found) * scale;
  }

  Lanes scale;
#endif
};

struct EightBits {
  static constexpr int kPerByte = 1;
  static constexpr bool kIsCheap = true;
  EightBits(float zero, float scale) : zero(all(zero)), scale(all(scale)) {}

  Lanes operator()(const uint8_t* codes, int64_t i) const {
    return (__builtin_convertvector(unsigned_bytes(codes + i) << 24 >> 24, Lanes) - zero) * scale;
  }

  Lanes zero, scale;
};

// e4m3: a sign, four bits of exponent, three of fraction; without infinities, and 127 is no number.
inline Lanes eight_bit_floats(const uint8_t* codes) {
  const IntLanes all_bits = unsigned_bytes(codes), size = all_bits & 127;
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

struct EightBitFloats {
  static constexpr int kPerByte = 1;
  static constexpr bool kIsCheap = false;
  EightBitFloats(float zero, float scale) : zero(all(zero)), scale(all(scale)) {}

  Lanes operator()(const uint8_t* codes, int64_t i) const { return (eight_bit_floats(codes + i) - zero) * scale; }

  Lanes zero, scale;
};

// Fewer than kLanes codes from the i-th on, of which there are `count`; the other lanes are anything.
template <typename Numbers>
Lanes last_of(const Numbers& numbers, const uint8_t* codes, int64_t i, int64_t count) {
  uint8_t rest[kLanes] = {};
  std::memcpy(rest, codes + i / Numbers::kPerByte, (count + Numbers::kPerByte - 1) / Numbers::kPerByte);
  return numbers(rest, 0);
}

// Inputs from `first` to `last` of a channel, which share a scale; a run of four bits begins at an even one.
template <typename Numbers>
void widen_run(const Numbers& numbers, const uint8_t* codes, int64_t first, int64_t last, float* to) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) write(to + i, numbers(codes, i));
  if (i == last) return;
  const Lanes left = last_of(numbers, codes, i, last - i);
  std::memcpy(to + i, &left, (last - i) * sizeof(float));
}

}  // namespace
}  // namespace quire

#endif  // QUIRE_CODES_H_
