// Products of float32 activations with matrices of codes, as quantised checkpoints hold them.
//
// A few channels at a time are widened to float32, which stay in a core's cache while all rows pass by, and multiplied as
// float32 weights are. The contract is that of coded.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "codes.h"
#include "crew.h"
#include "float_block.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int64_t kPieces = 16;             // at least: enough for a core that is disturbed to do fewer
constexpr int64_t kPieceBytes = 128 << 10;  // of widened channels

struct Matrix {
  const uint8_t* codes;  // [channels, bytes]
  XLA_FFI_DataType type;
  int64_t bytes, channels, inputs;
  const uint8_t* scales;  // [channels, groups]
  XLA_FFI_DataType scale_type;
  const uint8_t* zeros;  // the same, or nullptr
  XLA_FFI_DataType zero_type;
  const int32_t* index;  // [inputs], or nullptr
  int64_t groups, group;
  bool scaled;  // else the scales are left to the caller
};

template <typename T>
T at(const void* from, int64_t i) {
  T found;
  std::memcpy(&found, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  return found;
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

float from_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent > 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  return (sign ? -1.0f : 1.0f) * fraction * 0x1p-24f;
}

bool is_byte(XLA_FFI_DataType scales) { return scales == XLA_FFI_DataType_U8 || scales == XLA_FFI_DataType_F8E4M3FN; }

// Four bits beside scales of a byte are floats.
bool has_four_bit_floats(const Matrix& m) { return m.type == XLA_FFI_DataType_U8 && is_byte(m.scale_type); }

// Scales of a byte are exponents of two, or e4m3.
float scale_at(const Matrix& m, int64_t i) {
  if (m.scale_type == XLA_FFI_DataType_F8E4M3FN) return eight_bit_float(at<uint8_t>(m.scales, i));
  if (m.scale_type == XLA_FFI_DataType_U8) {
    const uint32_t exponent = at<uint8_t>(m.scales, i);
    return from_bits(exponent == 0 ? 1u << 22 : exponent << 23);
  }
  if (m.scale_type == XLA_FFI_DataType_F32) return at<float>(m.scales, i);
  const uint16_t bits = at<uint16_t>(m.scales, i);
  return m.scale_type == XLA_FFI_DataType_BF16 ? from_bits(uint32_t(bits) << 16) : from_half(bits);
}

float zero_at(const Matrix& m, int64_t i) {
  if (m.zeros == nullptr) return m.type == XLA_FFI_DataType_U8 && !has_four_bit_floats(m) ? 8.0f : 0.0f;
  return m.zero_type == XLA_FFI_DataType_S8 ? at<int8_t>(m.zeros, i) : at<int16_t>(m.zeros, i);
}

void widen_run(const Matrix& m, const uint8_t* codes, int64_t first, int64_t last, float zero, float scale, float* to) {
  if (has_four_bit_floats(m)) {
    return widen_run<four_bit_floats, 2>(codes, first, last, zero, scale, to);
  }
  if (m.type == XLA_FFI_DataType_U8) return widen_run<four_bits, 2>(codes, first, last, zero, scale, to);
  if (m.type == XLA_FFI_DataType_S8) return widen_run<eight_bits, 1>(codes, first, last, zero, scale, to);
  widen_run<eight_bit_floats, 1>(codes, first, last, zero, scale, to);
}

void widen(const Matrix& m, int64_t channel, float* to) {
  const uint8_t* codes = m.codes + channel * m.bytes;
  const int64_t groups = channel * m.groups;
  if (m.index == nullptr) {
    for (int64_t g = 0; g < m.groups; ++g) {
      const int64_t first = g * m.group, last = std::min(m.inputs, first + m.group);
      widen_run(m, codes, first, last, zero_at(m, groups + g), m.scaled ? scale_at(m, groups + g) : 1.0f, to);
    }
    return;
  }
  thread_local std::vector<float> scales, zeros;
  scales.resize(m.groups);
  zeros.resize(m.groups);
  for (int64_t g = 0; g < m.groups; ++g) {
    scales[g] = m.scaled ? scale_at(m, groups + g) : 1.0f;
    zeros[g] = zero_at(m, groups + g);
  }
  widen_run(m, codes, 0, m.inputs, 0.0f, 1.0f, to);
  for (int64_t i = 0; i < m.inputs; ++i) to[i] = (to[i] - zeros[m.index[i]]) * scales[m.index[i]];
}

void multiply_all(const float* x, int64_t rows, const Matrix& m, float* out) {
  const int64_t fit = kPieceBytes / std::max<int64_t>(1, m.inputs * sizeof(float)) / kChannels;
  const int64_t share = ceil_div(ceil_div(m.channels, kChannels), kPieces);
  const int64_t piece = std::max<int64_t>(1, std::min(fit, share)) * kChannels;
  Crew::instance().run(ceil_div(m.channels, piece), [&](int64_t task) {
    const int64_t first = task * piece, count = std::min(piece, m.channels - first);
    thread_local std::vector<float> wide;
    if (static_cast<int64_t>(wide.size()) < count * m.inputs) wide.resize(count * m.inputs);
    for (int64_t c = 0; c < count; ++c) widen(m, first + c, wide.data() + c * m.inputs);
    multiply_channels_of_all_rows({x, wide.data(), out + first, rows, m.channels, m.inputs}, 0, count);
  });
}

bool is_known(XLA_FFI_DataType codes, XLA_FFI_DataType scales) {
  return (codes == XLA_FFI_DataType_U8 || codes == XLA_FFI_DataType_S8 || codes == XLA_FFI_DataType_F8E4M3FN) &&
         (scales == XLA_FFI_DataType_F32 || scales == XLA_FFI_DataType_F16 || scales == XLA_FFI_DataType_BF16 ||
          is_byte(scales));
}

// out [t, o] of x [t, i] with codes [o, bytes]; zeros and index may be empty. Those of several matrices have one axis
// more, and `sizes` rows for each; one matrix has no sizes. Rows beyond the sizes become zero.
Fault CodedProduct(In<float> x, In<void> codes, In<void> scales, In<void> zeros, In<int32_t> index, In<int32_t> sizes,
                   Out<float> out, int64_t group, bool scaled) {
  const int64_t inputs = x.sizes[1], channels = out.sizes[1], rows = x.sizes[0], matrices = std::max<int64_t>(1, sizes.count());
  const int64_t bytes = codes.sizes[codes.rank - 1], groups = scales.sizes[scales.rank - 1];
  const int64_t per_byte = codes.type == XLA_FFI_DataType_U8 ? 2 : 1;
  if (!is_known(codes.type, scales.type)) return "codes or scales of another type";
  if (bytes * per_byte != inputs || codes.count() != matrices * channels * bytes) return "codes of another shape";
  if (scales.count() != matrices * channels * groups || groups * group < inputs) return "scales of another shape";
  if (zeros.count() != 0 && zeros.count() != scales.count()) return "zero points of another shape";
  if (index.count() != 0 && index.count() != matrices * inputs) return "an order of another shape";
  if (group % per_byte != 0 && groups > 1) return "groups that begin within a byte";
  const int64_t scale_bytes = scales.type == XLA_FFI_DataType_F32 ? 4 : is_byte(scales.type) ? 1 : 2;
  const int64_t zero_bytes = zeros.type == XLA_FFI_DataType_S8 ? 1 : 2;
  int64_t row = 0;
  for (int64_t e = 0; e < matrices; ++e) {
    const int64_t count = sizes.count() ? std::min<int64_t>(sizes.data[e], rows - row) : rows;
    if (count <= 0) continue;
    const Matrix matrix = {
        static_cast<const uint8_t*>(codes.data) + e * channels * bytes, codes.type, bytes, channels, inputs,
        static_cast<const uint8_t*>(scales.data) + e * channels * groups * scale_bytes, scales.type,
        zeros.count() ? static_cast<const uint8_t*>(zeros.data) + e * channels * groups * zero_bytes : nullptr, zeros.type,
        index.count() ? index.data + e * inputs : nullptr, groups, group, scaled};
    multiply_all(x.data + row * inputs, count, matrix, out.data + row * channels);
    row += count;
  }
  std::fill(out.data + row * channels, out.data + rows * channels, 0.0f);
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_coded_product, quire::CodedProduct, "group", "scaled")
