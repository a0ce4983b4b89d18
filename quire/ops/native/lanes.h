// Several floats at a time, in the width of the machine's registers.
//
// Sums are taken in one order, which no compiler may change: a file that includes this is compiled without -ffast-math
// and without contraction, and says itself where a product and a sum are rounded once.

#ifndef QUIRE_LANES_H_
#define QUIRE_LANES_H_

#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define QUIRE_LANES_512 1
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define QUIRE_LANES_256 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Lanes read(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline void write(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }

inline Lanes all(float x) { return x - Lanes{}; }

// a * b + c, rounded once where the machine can.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#if defined(QUIRE_LANES_512)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(QUIRE_LANES_256)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The same for one number.
inline float multiply_add(float a, float b, float c) {
#if defined(QUIRE_LANES_512) || defined(QUIRE_LANES_256) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Halves are added until four lanes are left: (l0 + l1) + (l2 + l3) of those is the sum.
#if defined(__aarch64__)
inline float32x4_t four_left(Lanes lanes) { return (float32x4_t)lanes; }
#elif defined(QUIRE_LANES_512)
inline __m128 four_left(Lanes lanes) {
  const __m512 x = (__m512)lanes;
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#elif defined(QUIRE_LANES_256)
inline __m128 four_left(Lanes lanes) {
  const __m256 x = (__m256)lanes;
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
#endif

inline float sum(Lanes lanes) {
#if defined(__aarch64__)
  return vaddvq_f32(four_left(lanes));
#elif defined(QUIRE_LANES_512) || defined(QUIRE_LANES_256)
  const __m128 four = four_left(lanes), pairs = _mm_hadd_ps(four, four);
  return _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs));
#else
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
#endif
}

// The sums of four, each in the order of `sum`.
inline void sums(const Lanes* four, float* to) {
#if defined(__aarch64__)
  const float32x4_t low = vpaddq_f32(four_left(four[0]), four_left(four[1]));
  vst1q_f32(to, vpaddq_f32(low, vpaddq_f32(four_left(four[2]), four_left(four[3]))));
#elif defined(QUIRE_LANES_512) || defined(QUIRE_LANES_256)
  const __m128 low = _mm_hadd_ps(four_left(four[0]), four_left(four[1]));
  _mm_storeu_ps(to, _mm_hadd_ps(low, _mm_hadd_ps(four_left(four[2]), four_left(four[3]))));
#else
  for (int i = 0; i < 4; ++i) to[i] = sum(four[i]);
#endif
}

inline float highest(Lanes lanes) {
#if defined(QUIRE_LANES_512)
  return _mm512_reduce_max_ps((__m512)lanes);
#elif defined(__aarch64__)
  return vmaxvq_f32((float32x4_t)lanes);
#else
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
#endif
}

// The larger of each pair, and the smaller. Where `b` is no number, neither is the result.
inline Lanes larger(Lanes a, Lanes b) {
#if defined(__aarch64__)
  return (Lanes)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a > b ? a : b;
#endif
}

inline Lanes smaller(Lanes a, Lanes b) {
#if defined(__aarch64__)
  return (Lanes)vminq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a < b ? a : b;
#endif
}

// e^x to within a few units in the last place. Below -87 and above 88 it is the value there: the first is nearly zero,
// the second nearly the largest float.
inline Lanes exponential(Lanes x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2. A sum with a number this large is rounded to n, and has n as its lowest bits.
  constexpr float kLarge = 12582912.0f;  // 1.5 * 2^23
  const Lanes near = smaller(all(88.0f), larger(all(-87.0f), x));
  const Lanes shifted = multiply_add(near, all(1.44269504f), all(kLarge)), n = shifted - kLarge;
  const Lanes r = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), near));
  // The polynomial of this degree that is nearest to e^r where r is.
  Lanes y = multiply_add(all(0.00831252f), r, all(0.041890156f));
  y = multiply_add(y, r, all(0.16667114f));
  y = multiply_add(y, r, all(0.4999923f));
  y = multiply_add(y, r, all(1.0f));
  y = multiply_add(y, r, all(1.0f));
  y = (Lanes)((IntLanes)y + ((IntLanes)shifted << 23));  // times 2^n
  return x == x ? y : x;
}

}  // namespace quire

#endif  // QUIRE_LANES_H_
