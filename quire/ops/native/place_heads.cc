// Rotates queries and keys to their positions, and writes keys and values to their pages, as they are or as codes of
// eight bits. The contract is that of place_heads.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crew.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int64_t kTokens = 16;  // of one task

// Features i and i + half are a pair; those beyond 2 * half stay as they are.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t half, int64_t size, float* to) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    to[i] = first * cos[i] - second * sin[i];
    to[i + half] = second * cos[i] + first * sin[i];
  }
  std::copy(x + 2 * half, x + size, to + 2 * half);
}

// Runs of features turned by Hadamard's matrix, as `spread` in spread.py: sums are taken in the same pairs.
inline void spread(int64_t run, int64_t size, float* x) {
  for (int64_t step = 1; step < run; step *= 2) {
    for (int64_t at = 0; at < size; at += 2 * step) {
      for (int64_t i = at; i < at + step; ++i) {
        const float first = x[i], second = x[i + step];
        x[i] = first + second;
        x[i + step] = first - second;
      }
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(run));
  for (int64_t i = 0; i < size; ++i) x[i] *= scale;
}

inline uint16_t bfloat16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (std::isnan(x)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, ties to even
}

// int8 of a head, and the scale in bfloat16, as `coded` in pages.py. What is no number has a scale that is none.
inline uint16_t code(const float* x, int64_t size, int8_t* to) {
  constexpr float kMost = 127.0f, kLeastScale = 0x1p-100f;
  float reach = 0.0f, is_number = 0.0f;  // 0, or NaN
  for (int64_t i = 0; i < size; ++i) {
    reach = std::max(reach, std::fabs(x[i]));
    is_number += x[i] - x[i];
  }
  const uint16_t bits = bfloat16_of(std::max(reach / kMost, kLeastScale) + is_number);
  const uint32_t wide = uint32_t{bits} << 16;
  float scale;
  std::memcpy(&scale, &wide, sizeof(scale));
  if (std::isnan(scale)) {
    std::fill_n(to, size, 0);
    return bits;
  }
  for (int64_t i = 0; i < size; ++i) {
    to[i] = static_cast<int8_t>(std::floor(std::min(std::max(x[i] / scale, -kMost), kMost) + 0.5f));
  }
  return bits;
}

Fault PlaceHeads(In<float> qkv, In<float> cos, In<float> sin, In<int32_t> pages, In<int32_t> offsets, In<float> k_in,
                 In<float> v_in, Out<float> q, Out<float> k_out, Out<float> v_out) {
  // The pages are written where they are.
  if (k_in.data != k_out.data || v_in.data != v_out.data) return "pages were copied";
  const auto d = qkv.sizes;
  const int64_t tokens = d[0], heads = d[1], parts = d[2], size = d[3], group = parts - 2;
  const int64_t half = cos.sizes[1], page_size = k_in.sizes[1];
  const int64_t tasks = (tokens + kTokens - 1) / kTokens;
  Crew::instance().run(tasks, [&](int64_t task) {
    for (int64_t t = task * kTokens; t < std::min(tokens, (task + 1) * kTokens); ++t) {
      const float* c = cos.data + t * half;
      const float* s = sin.data + t * half;
      const int64_t place = (int64_t{pages.data[t]} * page_size + offsets.data[t]) * heads * size;
      for (int64_t head = 0; head < heads; ++head) {
        const float* x = qkv.data + (t * heads + head) * parts * size;
        float* to = q.data + (t * heads + head) * group * size;
        for (int64_t g = 0; g < group; ++g) rotate(x + g * size, c, s, half, size, to + g * size);
        rotate(x + group * size, c, s, half, size, k_out.data + place + head * size);
        std::copy_n(x + (group + 1) * size, size, v_out.data + place + head * size);
      }
    }
  });
  return nullptr;
}

Fault PlaceCodes(In<float> qkv, In<float> cos, In<float> sin, In<int32_t> pages, In<int32_t> offsets, In<int8_t> k_in,
                 In<int8_t> v_in, In<void> k_scales_in, In<void> v_scales_in, Out<float> q, Out<int8_t> k_out,
                 Out<int8_t> v_out, Out<void> k_scales_out, Out<void> v_scales_out, int64_t run) {
  if (k_in.data != k_out.data || v_in.data != v_out.data) return "pages were copied";
  if (k_scales_in.data != k_scales_out.data || v_scales_in.data != v_scales_out.data) return "scales were copied";
  if (k_scales_in.type != XLA_FFI_DataType_BF16 || v_scales_in.type != k_scales_in.type) return "scales of another type";
  const auto d = qkv.sizes;
  const int64_t tokens = d[0], heads = d[1], parts = d[2], size = d[3], group = parts - 2;
  const int64_t half = cos.sizes[1], page_size = k_in.sizes[1];
  auto* k_scales = static_cast<uint16_t*>(k_scales_out.data);  // [n, heads, page_size]
  auto* v_scales = static_cast<uint16_t*>(v_scales_out.data);
  const int64_t tasks = (tokens + kTokens - 1) / kTokens;
  Crew::instance().run(tasks, [&](int64_t task) {
    thread_local std::vector<float> key;
    key.resize(size);
    for (int64_t t = task * kTokens; t < std::min(tokens, (task + 1) * kTokens); ++t) {
      const float* c = cos.data + t * half;
      const float* s = sin.data + t * half;
      const int64_t page = pages.data[t], offset = offsets.data[t];
      for (int64_t head = 0; head < heads; ++head) {
        const float* x = qkv.data + (t * heads + head) * parts * size;
        float* to = q.data + (t * heads + head) * group * size;
        for (int64_t g = 0; g < group; ++g) {
          rotate(x + g * size, c, s, half, size, to + g * size);
          spread(run, size, to + g * size);
        }
        rotate(x + group * size, c, s, half, size, key.data());
        spread(run, size, key.data());
        const int64_t place = ((page * page_size + offset) * heads + head) * size;
        const int64_t scale = (page * heads + head) * page_size + offset;
        k_scales[scale] = code(key.data(), size, k_out.data + place);
        v_scales[scale] = code(x + (group + 1) * size, size, v_out.data + place);
      }
    }
  });
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_place_heads, quire::PlaceHeads)
QUIRE_OPERATION(quire_place_codes, quire::PlaceCodes, "run")
