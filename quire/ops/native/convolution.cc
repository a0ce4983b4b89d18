// The causal convolution over the last tokens of each slot, channel by channel. The contract is that of recurrence.py.

#include <algorithm>
#include <cstdint>

#include "crew.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int64_t kChannels = 256;  // of one task

// `before` has the last inputs, the oldest first; they move up by one.
void step(const float* x, const float* weight, const float* bias, int64_t taps, int64_t channels, int64_t stride,
          float* __restrict__ before, float* __restrict__ out) {
  for (int64_t c = 0; c < channels; ++c) {
    const float* w = weight + c * taps;
    float sum = bias[c] + x[c] * w[taps - 1];
    for (int64_t tap = taps - 2; tap >= 0; --tap) sum += before[tap * stride + c] * w[tap];
    out[c] = sum;
    for (int64_t tap = 0; tap + 1 < taps - 1; ++tap) before[tap * stride + c] = before[(tap + 1) * stride + c];
    before[(taps - 2) * stride + c] = x[c];
  }
}

Fault Convolve(In<float> x, In<float> weight, In<float> bias, In<int32_t> slots, In<int32_t> positions, In<float> old,
               Out<float> out, Out<float> inputs) {
  // The inputs that are kept are changed where they are.
  if (old.data != inputs.data) return "inputs were copied";
  const int64_t tokens = x.sizes[0], channels = x.sizes[1] * x.sizes[2], taps = weight.sizes[2];
  const int64_t tasks = (channels + kChannels - 1) / kChannels;
  Crew::instance().run(tasks, [&](int64_t task) {
    const int64_t first = task * kChannels, count = std::min(kChannels, channels - first);
    for (int64_t t = 0; t < tokens; ++t) {
      float* to = out.data + t * channels + first;
      if (positions.data[t] < 0) {
        std::fill_n(to, count, 0.0f);
        continue;
      }
      float* before = inputs.data + int64_t{slots.data[t]} * (taps - 1) * channels + first;
      if (positions.data[t] == 0) {
        for (int64_t tap = 0; tap < taps - 1; ++tap) std::fill_n(before + tap * channels, count, 0.0f);
      }
      step(x.data + t * channels + first, weight.data + first * taps, bias.data + first, taps, count, channels, before, to);
    }
  });
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_convolve, quire::Convolve)
