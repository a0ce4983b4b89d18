// Norms of rows, float32. The contract is that of ops/norms.py.
//
// A row's sums are taken in one order, whatever is beside it: XLA's reductions change theirs with the number of rows.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "crew.h"
#include "lanes.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace quire {
namespace {

constexpr int64_t kTaskNumbers = 16384;  // of a task: what takes longer than to hand it to another core

template <typename Work>
void for_each_row(int64_t rows, int64_t size, const Work& work) {
  const int64_t some = std::max<int64_t>(1, kTaskNumbers / std::max<int64_t>(1, size));
  Crew::instance().run((rows + some - 1) / some, [&](int64_t task) {
    for (int64_t row = task * some; row < std::min(rows, (task + 1) * some); ++row) work(row);
  });
}

float sum_of(const float* x, int64_t size) {
  Lanes part = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) part += read(x + i);
  float total = sum(part);
  for (; i < size; ++i) total += x[i];
  return total;
}

float sum_of_squares(const float* x, int64_t size) {
  Lanes part = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) part = multiply_add(read(x + i), read(x + i), part);
  float total = sum(part);
  for (; i < size; ++i) total = multiply_add(x[i], x[i], total);
  return total;
}

void rms_norm(const float* x, const float* weight, int64_t size, float eps, float offset, float* to) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) to[i] = x[i] * scale * (weight[i] + offset);
}

ffi::Error RmsNorm(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, ffi::ResultBuffer<ffi::F32> out, float eps,
                   float offset) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  for_each_row(rows, size, [&](int64_t row) {
    rms_norm(x.typed_data() + row * size, weight.typed_data(), size, eps, offset, out->typed_data() + row * size);
  });
  return ffi::Error::Success();
}

ffi::Error AddRmsNorm(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> y, ffi::Buffer<ffi::F32> weight,
                      ffi::ResultBuffer<ffi::F32> total, ffi::ResultBuffer<ffi::F32> out, float eps, float offset) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  for_each_row(rows, size, [&](int64_t row) {
    const float* a = x.typed_data() + row * size;
    const float* b = y.typed_data() + row * size;
    float* to = total->typed_data() + row * size;
    for (int64_t i = 0; i < size; ++i) to[i] = a[i] + b[i];
    rms_norm(to, weight.typed_data(), size, eps, offset, out->typed_data() + row * size);
  });
  return ffi::Error::Success();
}

ffi::Error LayerNorm(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> bias,
                     ffi::ResultBuffer<ffi::F32> out, float eps) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  const float *w = weight.typed_data(), *b = bias.typed_data();
  for_each_row(rows, size, [&](int64_t row) {
    const float* from = x.typed_data() + row * size;
    float* to = out->typed_data() + row * size;
    const float mean = sum_of(from, size) / static_cast<float>(size);
    for (int64_t i = 0; i < size; ++i) to[i] = from[i] - mean;
    const float scale = 1.0f / std::sqrt(sum_of_squares(to, size) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i) to[i] = to[i] * scale * w[i] + b[i];
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace quire

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_rms_norm, quire::RmsNorm,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_add_rms_norm, quire::AddRmsNorm,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_layer_norm, quire::LayerNorm,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps"));
