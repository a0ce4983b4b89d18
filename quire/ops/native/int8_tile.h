// The innermost product: up to four or eight rows of activations with a tile or two of eight output channels, all int8.
//
// A group is 32 numbers that share a scale. A tile holds, group by group, four inputs of each of its eight channels at a
// time, then the eight scales: what one instruction multiplies lies together on ARM and on x86 alike.
//
// Whatever the number of rows, one output is computed by the same operations in the same order: an exact int32 dot for
// each group, times the weight's scale, then a multiply-add with the activation's. So the rows of a batch do not depend
// on each other. No file that includes this may be compiled with -ffast-math or with contraction.

#ifndef QUIRE_INT8_TILE_H_
#define QUIRE_INT8_TILE_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(QUIRE_SCALAR)
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define QUIRE_NEON 1
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#include <immintrin.h>
#define QUIRE_VNNI 1
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define QUIRE_AVX2 1
#endif

namespace quire {

constexpr int64_t kGroup = 32;    // numbers that share a scale
constexpr int64_t kTile = 8;      // output channels
constexpr int64_t kRowBlock = 4;  // rows of activations

struct TileGroup {
  int8_t codes[kGroup / 4][kTile][4];
  float scales[kTile];
};

struct RowGroup {
  int8_t codes[kRowBlock][kGroup];
  float scales[kRowBlock];
  int32_t sums[kRowBlock];  // of the codes, times -128; with QUIRE_VNNI alone
};

#if defined(QUIRE_VNNI)
constexpr int64_t kTilesTogether = 2;   // that `multiply` takes at a time
constexpr int64_t kBlocksTogether = 2;  // of rows: the more, the less often weights are made ready
#else
constexpr int64_t kTilesTogether = 1;
constexpr int64_t kBlocksTogether = 1;
#endif
constexpr int64_t kChannels = kTilesTogether * kTile;
constexpr int64_t kRowsTogether = kBlocksTogether * kRowBlock;

// multiply<kRows>(rows, tiles, groups, out, stride): kRows rows, up to kRowsTogether, with kTilesTogether tiles, each of
// `groups` groups. Blocks of rows follow each other. Row r of the result, kChannels wide, goes to out + r * stride.

#if defined(QUIRE_NEON)

// A dot of 32 products of int8 is below 2^22, so a float's bits count it: 1.5 * 2^23 + dot.
constexpr int32_t kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.0f;

}  // namespace quire

#include "int8_neon.h"

namespace quire {

template <int kRows>
inline void multiply(const RowGroup* rows, const TileGroup* const* tiles, int64_t groups, float* out, int64_t stride) {
  const TileGroup* const tile = tiles[0];
  if constexpr (kRows == 4) return multiply_four(rows, tile, groups, out, stride);
  float32x4_t sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = vdupq_n_f32(0.0f);
  const float32x4_t magic = vdupq_n_f32(kMagic);
  for (int64_t g = 0; g < groups; ++g) {
    const RowGroup& a = rows[g];
    const TileGroup& w = tile[g];
    int32x4_t dot[kRows][2];
    for (int r = 0; r < kRows; ++r) dot[r][0] = dot[r][1] = vdupq_n_s32(kMagicBits);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      int8x16_t row[kRows];
      for (int r = 0; r < kRows; ++r) row[r] = vld1q_s8(a.codes[r] + 16 * half);
      const int8_t* codes = w.codes[4 * half][0];
#define QUIRE_FOUR_INPUTS(lane)                                         \
  {                                                                     \
    const int8x16_t low = vld1q_s8(codes + 32 * lane);                  \
    const int8x16_t high = vld1q_s8(codes + 32 * lane + 16);            \
    for (int r = 0; r < kRows; ++r) {                                   \
      dot[r][0] = vdotq_laneq_s32(dot[r][0], low, row[r], lane);        \
      dot[r][1] = vdotq_laneq_s32(dot[r][1], high, row[r], lane);       \
    }                                                                   \
  }
      QUIRE_FOUR_INPUTS(0)
      QUIRE_FOUR_INPUTS(1)
      QUIRE_FOUR_INPUTS(2)
      QUIRE_FOUR_INPUTS(3)
#undef QUIRE_FOUR_INPUTS
    }
    const float32x4_t low = vld1q_f32(w.scales), high = vld1q_f32(w.scales + 4);
    for (int r = 0; r < kRows; ++r) {
      const float scale = a.scales[r];
      sum[r][0] = vfmaq_n_f32(sum[r][0], vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(dot[r][0]), magic), low), scale);
      sum[r][1] = vfmaq_n_f32(sum[r][1], vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(dot[r][1]), magic), high), scale);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    vst1q_f32(out + r * stride, sum[r][0]);
    vst1q_f32(out + r * stride + 4, sum[r][1]);
  }
}

#elif defined(QUIRE_VNNI)

inline __m512i both(const void* low, const void* high) {
  const __m256i first = _mm256_loadu_si256(static_cast<const __m256i*>(low));
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), _mm256_loadu_si256(static_cast<const __m256i*>(high)), 1);
}

template <int kRows>
inline void multiply(const RowGroup* rows, const TileGroup* const* tiles, int64_t groups, float* out, int64_t stride) {
  __m512 sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = _mm512_setzero_ps();
  // The instruction takes one side unsigned: 128 is added to the weights, and 128 times the inputs' sum taken off.
  const __m512i offset = _mm512_set1_epi8(-128);
  for (int64_t g = 0; g < groups; ++g) {
    const TileGroup &first = tiles[0][g], &second = tiles[1][g];
    const auto block = [&](int r) -> const RowGroup& { return rows[r / kRowBlock * groups + g]; };
    __m512i dot[kRows];
    for (int r = 0; r < kRows; ++r) dot[r] = _mm512_set1_epi32(block(r).sums[r % kRowBlock]);
    for (int four = 0; four < kGroup / 4; ++four) {
      const __m512i codes = _mm512_xor_si512(both(first.codes[four], second.codes[four]), offset);
      for (int r = 0; r < kRows; ++r) {
        int32_t inputs;
        std::memcpy(&inputs, block(r).codes[r % kRowBlock] + 4 * four, 4);
        dot[r] = _mm512_dpbusd_epi32(dot[r], codes, _mm512_set1_epi32(inputs));
      }
    }
    const __m512 scales = _mm512_castsi512_ps(both(first.scales, second.scales));
    for (int r = 0; r < kRows; ++r) {
      const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), scales);
      sum[r] = _mm512_fmadd_ps(part, _mm512_set1_ps(block(r).scales[r % kRowBlock]), sum[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(out + r * stride, sum[r]);
}

#elif defined(QUIRE_AVX2)

template <int kRows>
inline void multiply(const RowGroup* rows, const TileGroup* const* tiles, int64_t groups, float* out, int64_t stride) {
  const TileGroup* const tile = tiles[0];
  __m256 sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    const RowGroup& a = rows[g];
    const TileGroup& w = tile[g];
    __m256i dot[kRows];
    for (int r = 0; r < kRows; ++r) dot[r] = _mm256_setzero_si256();
    for (int four = 0; four < kGroup / 4; ++four) {
      const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w.codes[four][0]));
      for (int r = 0; r < kRows; ++r) {
        int32_t inputs;
        std::memcpy(&inputs, a.codes[r] + 4 * four, 4);
        const __m256i row = _mm256_set1_epi32(inputs);
        // The instructions take one side unsigned: the sign of the inputs moves to the weights. Codes are within
        // [-127, 127], so two products do not overflow an int16.
        const __m256i size = _mm256_abs_epi8(row), turned = _mm256_sign_epi8(codes, row);
#if defined(__AVXVNNI__)
        dot[r] = _mm256_dpbusd_avx_epi32(dot[r], size, turned);
#else
        const __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(size, turned), _mm256_set1_epi16(1));
        dot[r] = _mm256_add_epi32(dot[r], pairs);
#endif
      }
    }
    const __m256 scales = _mm256_loadu_ps(w.scales);
    for (int r = 0; r < kRows; ++r) {
      const __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r]), scales);
      sum[r] = _mm256_fmadd_ps(part, _mm256_set1_ps(a.scales[r]), sum[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) _mm256_storeu_ps(out + r * stride, sum[r]);
}

#else

template <int kRows>
inline void multiply(const RowGroup* rows, const TileGroup* const* tiles, int64_t groups, float* out, int64_t stride) {
  const TileGroup* const tile = tiles[0];
  float sum[kRows][kTile] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const RowGroup& a = rows[g];
    const TileGroup& w = tile[g];
    for (int r = 0; r < kRows; ++r) {
      int32_t dot[kTile] = {};
      for (int i = 0; i < kGroup; ++i) {
        for (int c = 0; c < kTile; ++c) dot[c] += int32_t{a.codes[r][i]} * int32_t{w.codes[i / 4][c][i % 4]};
      }
      for (int c = 0; c < kTile; ++c) sum[r][c] += static_cast<float>(dot[c]) * w.scales[c] * a.scales[r];
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(out + r * stride, sum[r], sizeof(sum[r]));
}

#endif

// Groups whose largest number is below this count as zero: the inverse of their scale would be infinite, or the scale
// itself too small for a normal float.
constexpr float kSmallest = 0x1p-119f;

// `count` numbers, at most a group, as codes and their scale; the rest of the group is zero. What is not finite makes
// the scale so, and with it everything computed from it.
inline float quantize(const float* x, int64_t count, int8_t* codes) {
#if defined(QUIRE_NEON)
  if (count == kGroup) {
    float32x4_t part[8], size[8];
    for (int i = 0; i < 8; ++i) size[i] = vabsq_f32(part[i] = vld1q_f32(x + 4 * i));
    for (int step = 4; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) size[i] = vmaxq_f32(size[i], size[i + step]);
    }
    float highest = vmaxvq_f32(size[0]);  // NaN where there is one
    if (highest < kSmallest) highest = 0.0f;
    const float inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    int16x4_t narrow[8];
    for (int i = 0; i < 8; ++i) narrow[i] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(part[i], inverse)));
    for (int i = 0; i < 8; i += 4) {
      const int8x8_t low = vmovn_s16(vcombine_s16(narrow[i], narrow[i + 1]));
      const int8x8_t high = vmovn_s16(vcombine_s16(narrow[i + 2], narrow[i + 3]));
      vst1q_s8(codes + 4 * i, vcombine_s8(low, high));
    }
    return highest / 127.0f;
  }
#elif defined(QUIRE_VNNI)
  if (count == kGroup) {
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    const __m512 most = _mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high));
    const __m512 infinity = _mm512_set1_ps(INFINITY);
    const bool finite = !_mm512_cmp_ps_mask(_mm512_abs_ps(low), infinity, _CMP_NLT_UQ) &&
                        !_mm512_cmp_ps_mask(_mm512_abs_ps(high), infinity, _CMP_NLT_UQ);
    float highest = _mm512_reduce_max_ps(most);
    if (highest < kSmallest) highest = 0.0f;
    const __m512 inverse = _mm512_set1_ps(finite && highest > 0.0f ? 127.0f / highest : 0.0f);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    const __m128i zero = _mm_setzero_si128();
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), finite ? _mm512_cvtepi32_epi8(first) : zero);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16), finite ? _mm512_cvtepi32_epi8(second) : zero);
    return finite ? highest / 127.0f : NAN;
  }
#endif
  float highest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    highest = std::fmax(highest, std::fabs(x[i]));
    finite &= std::isfinite(x[i]);
  }
  if (highest < kSmallest) highest = 0.0f;
  const float inverse = finite && highest > 0.0f ? 127.0f / highest : 0.0f;
  for (int64_t i = 0; i < kGroup; ++i) {
    codes[i] = finite && i < count ? static_cast<int8_t>(std::lrintf(x[i] * inverse)) : int8_t{0};
  }
  return finite ? highest / 127.0f : NAN;
}

// Numbers of a row as codes in a group of a block of rows.
inline void quantize_row(const float* x, int64_t count, int64_t row, RowGroup& to) {
  to.scales[row] = quantize(x, count, to.codes[row]);
#if defined(QUIRE_VNNI)
  int32_t sum = 0;
  for (int64_t i = 0; i < kGroup; ++i) sum += to.codes[row][i];
  to.sums[row] = -128 * sum;
#endif
}

}  // namespace quire

#endif  // QUIRE_INT8_TILE_H_
