// Rotates queries and keys to their positions, and writes keys and values to their pages. The contract is that of
// place_heads.py.

#include <algorithm>
#include <cstdint>

#include "crew.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

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

ffi::Error PlaceHeads(ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                      ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::S32> offsets, ffi::Buffer<ffi::F32> k_in,
                      ffi::Buffer<ffi::F32> v_in, ffi::ResultBuffer<ffi::F32> q, ffi::ResultBuffer<ffi::F32> k_out,
                      ffi::ResultBuffer<ffi::F32> v_out) {
  // The pages are written where they are.
  if (k_in.typed_data() != k_out->typed_data() || v_in.typed_data() != v_out->typed_data()) {
    return ffi::Error::Internal("pages were copied");
  }
  const auto d = qkv.dimensions();
  const int64_t tokens = d[0], heads = d[1], parts = d[2], size = d[3], group = parts - 2;
  const int64_t half = cos.dimensions()[1], page_size = k_in.dimensions()[1];
  const int64_t tasks = (tokens + kTokens - 1) / kTokens;
  quire::Crew::instance().run(tasks, [&](int64_t task) {
    for (int64_t t = task * kTokens; t < std::min(tokens, (task + 1) * kTokens); ++t) {
      const float* c = cos.typed_data() + t * half;
      const float* s = sin.typed_data() + t * half;
      const int64_t place = (int64_t{pages.typed_data()[t]} * page_size + offsets.typed_data()[t]) * heads * size;
      for (int64_t head = 0; head < heads; ++head) {
        const float* x = qkv.typed_data() + (t * heads + head) * parts * size;
        float* to = q->typed_data() + (t * heads + head) * group * size;
        for (int64_t g = 0; g < group; ++g) rotate(x + g * size, c, s, half, size, to + g * size);
        rotate(x + group * size, c, s, half, size, k_out->typed_data() + place + head * size);
        std::copy_n(x + (group + 1) * size, size, v_out->typed_data() + place + head * size);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_place_heads, PlaceHeads,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
