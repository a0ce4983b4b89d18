// The recurrence of layers with a matrix for each head, token by token. The contract is that of recurrence.py.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "crew.h"
#include "operation.h"

namespace quire {
namespace {

// Rows of the matrix one after the other, so that every sum over them has one order.
void update(const float* q, const float* k, const float* v, float factor, float rate, bool corrects, int64_t key_dim,
            int64_t value_dim, float* __restrict__ matrix, float* __restrict__ value, float* __restrict__ out) {
  std::copy_n(v, value_dim, value);
  std::fill_n(out, value_dim, 0.0f);
  for (int64_t i = 0; i < key_dim; ++i) {
    float* __restrict__ row = matrix + i * value_dim;
    const float key = k[i];
    for (int64_t j = 0; j < value_dim; ++j) row[j] *= factor;
    if (!corrects) continue;
    for (int64_t j = 0; j < value_dim; ++j) value[j] -= row[j] * key;
  }
  for (int64_t j = 0; j < value_dim; ++j) value[j] *= rate;
  for (int64_t i = 0; i < key_dim; ++i) {
    float* __restrict__ row = matrix + i * value_dim;
    const float key = k[i], query = q[i];
    for (int64_t j = 0; j < value_dim; ++j) row[j] += key * value[j];
    for (int64_t j = 0; j < value_dim; ++j) out[j] += query * row[j];
  }
}

Fault Recur(In<float> q, In<float> k, In<float> v, In<float> factors, In<float> rates, In<int32_t> slots,
            In<int32_t> positions, In<float> before, Out<float> out, Out<float> matrices, bool corrects) {
  // The matrices are changed where they are.
  if (before.data != matrices.data) return "matrices were copied";
  const auto d = v.sizes;
  const int64_t tokens = d[0], group = d[2], heads = d[1] * group, value_dim = d[3], key_dim = k.sizes[2];
  const int64_t size = key_dim * value_dim;
  Crew::instance().run(heads, [&](int64_t head) {
    std::vector<float> value(value_dim);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = t * heads + head;
      if (positions.data[t] < 0) {
        std::fill_n(out.data + at * value_dim, value_dim, 0.0f);
        continue;
      }
      float* matrix = matrices.data + (int64_t{slots.data[t]} * heads + head) * size;
      if (positions.data[t] == 0) std::fill_n(matrix, size, 0.0f);
      const int64_t key = at / group * key_dim;
      update(q.data + key, k.data + key, v.data + at * value_dim, factors.data[at], rates.data[at], corrects, key_dim,
             value_dim, matrix, value.data(), out.data + at * value_dim);
    }
  });
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_recur, quire::Recur, "corrects")
