// Rotates queries and keys to their positions, and writes keys and values to their pages. The contract is that of
// place_heads.py.

#include <algorithm>
#include <cstdint>

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

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_place_heads, quire::PlaceHeads)
