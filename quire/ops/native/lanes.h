// Several floats at a time, in the width of the machine's registers, and the exponential function of them.

#ifndef QUIRE_LANES_H_
#define QUIRE_LANES_H_

#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quire {

#if defined(__AVX2__)
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

inline float sum(Lanes lanes) {
#if defined(__aarch64__)
  return vaddvq_f32(reinterpret_cast<float32x4_t&>(lanes));
#else
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
#endif
}

inline float highest(Lanes lanes) {
#if defined(__aarch64__)
  return vmaxvq_f32(reinterpret_cast<float32x4_t&>(lanes));
#else
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
#endif
}

// The sums of four.
inline void sums(const Lanes* four, float* to) {
#if defined(__aarch64__)
  const auto* x = reinterpret_cast<const float32x4_t*>(four);
  vst1q_f32(to, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
#else
  for (int i = 0; i < 4; ++i) to[i] = sum(four[i]);
#endif
}

// e^x to within a few units in the last place, for any x up to 88; what is too small becomes 0 or nearly so.
inline Lanes exponential(Lanes x) {
  const Lanes lowest = all(-87.0f);
  x = x < lowest ? lowest : x;
  // x = n ln 2 + r with |r| <= ln 2 / 2. The conversion cuts off, hence the half towards the sign.
  const Lanes scaled = x * 1.44269504f;
  const IntLanes n = __builtin_convertvector(scaled + (scaled < 0.0f ? all(-0.5f) : all(0.5f)), IntLanes);
  const Lanes whole = __builtin_convertvector(n, Lanes);
  const Lanes r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Lanes y = 1.9875691500e-4f * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const IntLanes power = (n + 127) << 23;
  Lanes factor;
  std::memcpy(&factor, &power, sizeof(factor));
  return y * factor;
}

}  // namespace quire

#endif  // QUIRE_LANES_H_
