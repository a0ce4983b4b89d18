// Products of float32 activations with float32 weights, of one matrix or of one for each group of rows.
//
// Both operands lie row by row, and a weight is read where it is: it needs no packing.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "crew.h"
#include "float_block.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int64_t kPieces = 16;             // at least: enough for a core that is disturbed to do fewer
constexpr int64_t kPieceBytes = 512 << 10;  // of weights that stay in a core's second cache while all rows pass by

// Products of one shape of weights, in one call of the crew: waiting for each would leave cores idle as often.
void multiply_all(const std::vector<Product>& products) {
  if (products.empty()) return;
  const int64_t count = products.size(), channels = products[0].channels;
  const int64_t blocks = ceil_div(channels, kChannels);
  const int64_t bytes = std::max<int64_t>(1, channels * products[0].inputs * sizeof(float));
  const int64_t pieces = std::max(ceil_div(kPieces, count), ceil_div(bytes, kPieceBytes));
  const int64_t piece = std::max<int64_t>(1, ceil_div(blocks, pieces)) * kChannels;
  const int64_t each = ceil_div(channels, piece);
  Crew::instance().run(count * each, [&](int64_t task) {
    const int64_t first = task % each * piece;
    multiply_channels_of_all_rows(products[task / each], first, std::min(channels, first + piece));
  });
}

// out [t, o] of the first rows of x [t, i] with weights [o, i]. The other rows become zero.
Fault FloatProduct(In<float> x, In<float> weights, In<int32_t> num_rows, Out<float> out) {
  const auto d = x.sizes, w = weights.sizes;
  if (w[1] != d[1]) return "operands with different numbers of inputs";
  const int64_t rows = first_rows(num_rows, d[0]);
  multiply_all({{x.data, weights.data, out.data, rows, w[0], d[1]}});
  std::fill(out.data + rows * w[0], out.data + d[0] * w[0], 0.0f);
  return nullptr;
}

// out [t, o] of x [t, i] with weights [e, o, i]: the first sizes[0] rows with the first matrix, and so on. Rows beyond
// the sizes become zero.
Fault FloatGroupedProduct(In<float> x, In<float> weights, In<int32_t> sizes, Out<float> out) {
  const auto d = x.sizes, w = weights.sizes;
  if (w[2] != d[1]) return "operands with different numbers of inputs";
  std::vector<Product> products;
  int64_t row = 0;
  for (int64_t e = 0; e < w[0]; ++e) {
    const int64_t rows = std::min<int64_t>(sizes.data[e], d[0] - row);
    if (rows <= 0) continue;
    products.push_back({x.data + row * d[1], weights.data + e * w[1] * w[2], out.data + row * w[1], rows, w[1], d[1]});
    row += rows;
  }
  multiply_all(products);
  std::fill(out.data + row * w[1], out.data + d[0] * w[1], 0.0f);
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_float_product, quire::FloatProduct)
QUIRE_OPERATION(quire_float_grouped_product, quire::FloatGroupedProduct)
