// Products of float32 activations with float32 weights, of one matrix or of one for each group of rows.
//
// Every output is one sum over the inputs in a fixed order: lane by lane, then across the lanes. The order depends on the
// number of inputs alone, so the rows of a batch do not depend on each other. XLA's products promise no such thing.
// Both operands lie row by row, and a weight is read where it is: it needs no packing.

#include <algorithm>
#include <cstdint>

#include "crew.h"
#include "lanes.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int64_t kRows = 4;      // of a block
constexpr int64_t kChannels = 4;  // of a block
constexpr int64_t kPieces = 16;   // at least: enough for a core that is disturbed to do fewer
constexpr int64_t kPieceBytes = 512 << 10;   // of weights that stay in a core's second cache while all rows pass by
constexpr int64_t kFewRowsBytes = 24 << 10;  // of rows that stay in its first while a piece passes by

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Product {
  const float* x;        // [rows, inputs]
  const float* weights;  // [channels, inputs]
  float* out;            // [rows, channels]
  int64_t rows, channels, inputs;
};

template <int kR, int kC>
void multiply(const Product& p, int64_t row, int64_t channel) {
  const float* x = p.x + row * p.inputs;
  const float* w = p.weights + channel * p.inputs;
  const int64_t vectors = p.inputs / kLanes * kLanes;
  Lanes parts[kR][kChannels] = {};
  for (int64_t i = 0; i < vectors; i += kLanes) {
    Lanes weight[kC];
    for (int c = 0; c < kC; ++c) weight[c] = read(w + c * p.inputs + i);
    for (int r = 0; r < kR; ++r) {
      const Lanes input = read(x + r * p.inputs + i);
      for (int c = 0; c < kC; ++c) parts[r][c] = multiply_add(input, weight[c], parts[r][c]);
    }
  }
  for (int r = 0; r < kR; ++r) {
    float totals[kChannels];
    sums(parts[r], totals);
    for (int c = 0; c < kC; ++c) {
      for (int64_t i = vectors; i < p.inputs; ++i) {
        totals[c] = multiply_add(x[r * p.inputs + i], w[c * p.inputs + i], totals[c]);
      }
      p.out[(row + r) * p.channels + channel + c] = totals[c];
    }
  }
}

template <int kR>
void multiply_channels(const Product& p, int64_t row, int64_t channel, int64_t count) {
  if (count == kChannels) return multiply<kR, kChannels>(p, row, channel);
  for (int64_t c = 0; c < count; ++c) multiply<kR, 1>(p, row, channel + c);
}

void multiply_block(const Product& p, int64_t row, int64_t rows, int64_t channel, int64_t count) {
  switch (rows) {
    case 1: return multiply_channels<1>(p, row, channel, count);
    case 2: return multiply_channels<2>(p, row, channel, count);
    case 3: return multiply_channels<3>(p, row, channel, count);
    default: return multiply_channels<4>(p, row, channel, count);
  }
}

void multiply_all(const Product& p) {
  const int64_t row_bytes = std::max<int64_t>(1, p.inputs * sizeof(float));
  const int64_t few_rows = std::max<int64_t>(1, kFewRowsBytes / row_bytes / kRows) * kRows;
  const int64_t blocks = ceil_div(p.channels, kChannels);
  const int64_t pieces = std::max(kPieces, ceil_div(p.channels * row_bytes, kPieceBytes));
  const int64_t piece = std::max<int64_t>(1, ceil_div(blocks, pieces)) * kChannels;
  Crew::instance().run(ceil_div(p.channels, piece), [&](int64_t task) {
    const int64_t first = task * piece, last = std::min(p.channels, first + piece);
    for (int64_t from = 0; from < p.rows; from += few_rows) {
      const int64_t to = std::min(p.rows, from + few_rows);
      for (int64_t channel = first; channel < last; channel += kChannels) {
        for (int64_t row = from; row < to; row += kRows) {
          multiply_block(p, row, std::min(kRows, to - row), channel, std::min(kChannels, last - channel));
        }
      }
    }
  });
}

// out [t, o] of x [t, i] with weights [o, i].
Fault FloatProduct(In<float> x, In<float> weights, Out<float> out) {
  const auto d = x.sizes, w = weights.sizes;
  if (w[1] != d[1]) return "operands with different numbers of inputs";
  multiply_all({x.data, weights.data, out.data, d[0], w[0], d[1]});
  return nullptr;
}

// out [t, o] of x [t, i] with weights [e, o, i]: the first sizes[0] rows with the first matrix, and so on. Rows beyond
// the sizes become zero.
Fault FloatGroupedProduct(In<float> x, In<float> weights, In<int32_t> sizes, Out<float> out) {
  const auto d = x.sizes, w = weights.sizes;
  if (w[2] != d[1]) return "operands with different numbers of inputs";
  int64_t row = 0;
  for (int64_t e = 0; e < w[0]; ++e) {
    const int64_t rows = std::min<int64_t>(sizes.data[e], d[0] - row);
    if (rows <= 0) continue;
    multiply_all({x.data + row * d[1], weights.data + e * w[1] * w[2], out.data + row * w[1], rows, w[1], d[1]});
    row += rows;
  }
  std::fill(out.data + row * w[1], out.data + d[0] * w[1], 0.0f);
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_float_product, quire::FloatProduct)
QUIRE_OPERATION(quire_float_grouped_product, quire::FloatGroupedProduct)
