// The block of a product of float32: some rows with some channels.
//
// Every output is one sum over the inputs in a fixed order: lane by lane, then across the lanes. The order depends on the
// number of inputs alone, so the rows of a batch do not depend on each other. XLA's products promise no such thing.

#ifndef QUIRE_FLOAT_BLOCK_H_
#define QUIRE_FLOAT_BLOCK_H_

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace quire {

constexpr int64_t kRows = 4;      // of a block
constexpr int64_t kChannels = 4;  // of a block
constexpr int64_t kFewRowsBytes = 24 << 10;  // of rows that stay in a core's first cache while channels pass by

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

inline void multiply_block(const Product& p, int64_t row, int64_t rows, int64_t channel, int64_t count) {
  switch (rows) {
    case 1: return multiply_channels<1>(p, row, channel, count);
    case 2: return multiply_channels<2>(p, row, channel, count);
    case 3: return multiply_channels<3>(p, row, channel, count);
    default: return multiply_channels<4>(p, row, channel, count);
  }
}

// All rows with the channels from `first` to `last`.
inline void multiply_channels_of_all_rows(const Product& p, int64_t first, int64_t last) {
  const int64_t row_bytes = std::max<int64_t>(1, p.inputs * sizeof(float));
  const int64_t few_rows = std::max<int64_t>(1, kFewRowsBytes / row_bytes / kRows) * kRows;
  for (int64_t from = 0; from < p.rows; from += few_rows) {
    const int64_t to = std::min(p.rows, from + few_rows);
    for (int64_t channel = first; channel < last; channel += kChannels) {
      for (int64_t row = from; row < to; row += kRows) {
        multiply_block(p, row, std::min(kRows, to - row), channel, std::min(kChannels, last - channel));
      }
    }
  }
}

}  // namespace quire

#endif  // QUIRE_FLOAT_BLOCK_H_
