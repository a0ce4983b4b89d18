// Norms of rows, float32. The contract is that of ops/norms.py.
//
// A row's sums are taken in one order, whatever is beside it: XLA's reductions change theirs with the number of rows.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "crew.h"
#include "lanes.h"
#include "operation.h"

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

Fault RmsNorm(In<float> x, In<float> weight, Out<float> out, float eps, float offset) {
  const int64_t rows = x.sizes[0], size = x.sizes[1];
  for_each_row(rows, size, [&](int64_t row) {
    rms_norm(x.data + row * size, weight.data, size, eps, offset, out.data + row * size);
  });
  return nullptr;
}

Fault AddRmsNorm(In<float> x, In<float> y, In<float> weight, Out<float> total, Out<float> out, float eps,
                 float offset) {
  const int64_t rows = x.sizes[0], size = x.sizes[1];
  for_each_row(rows, size, [&](int64_t row) {
    const float* a = x.data + row * size;
    const float* b = y.data + row * size;
    float* to = total.data + row * size;
    for (int64_t i = 0; i < size; ++i) to[i] = a[i] + b[i];
    rms_norm(to, weight.data, size, eps, offset, out.data + row * size);
  });
  return nullptr;
}

Fault LayerNorm(In<float> x, In<float> weight, In<float> bias, Out<float> out, float eps) {
  const int64_t rows = x.sizes[0], size = x.sizes[1];
  const float *w = weight.data, *b = bias.data;
  for_each_row(rows, size, [&](int64_t row) {
    const float* from = x.data + row * size;
    float* to = out.data + row * size;
    const float mean = sum_of(from, size) / static_cast<float>(size);
    for (int64_t i = 0; i < size; ++i) to[i] = from[i] - mean;
    const float scale = 1.0f / std::sqrt(sum_of_squares(to, size) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i) to[i] = to[i] * scale * w[i] + b[i];
  });
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_rms_norm, quire::RmsNorm, "eps", "offset")
QUIRE_OPERATION(quire_add_rms_norm, quire::AddRmsNorm, "eps", "offset")
QUIRE_OPERATION(quire_layer_norm, quire::LayerNorm, "eps")
