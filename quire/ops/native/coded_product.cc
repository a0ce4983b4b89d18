// Products of float32 activations with matrices of codes, as quantised checkpoints hold them.
//
// A few channels at a time are widened to float32, which stay in a core's cache while all rows pass by, and multiplied as
// float32 weights are. Few rows meet the codes themselves. The contract is that of coded.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
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

float from_exponent(uint8_t exponent) { return from_bits(exponent == 0 ? 1u << 22 : uint32_t(exponent) << 23); }

float from_bfloat(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

// `count` floats of numbers that are stored as T, from the i-th on. One loop for each type: compilers make it wide.
template <typename T, typename Convert>
void read_as(const void* from, int64_t i, int64_t count, const Convert& convert, float* to) {
  for (int64_t g = 0; g < count; ++g) to[g] = convert(at<T>(from, i + g));
}

// Scales of a byte are exponents of two, or e4m3.
void read_scales(const Matrix& m, int64_t i, float* to) {
  switch (m.scale_type) {
    case XLA_FFI_DataType_F8E4M3FN: return widen_run(EightBitFloats(0.0f, 1.0f), m.scales + i, 0, m.groups, to);
    case XLA_FFI_DataType_U8: return read_as<uint8_t>(m.scales, i, m.groups, from_exponent, to);
    case XLA_FFI_DataType_BF16: return read_as<uint16_t>(m.scales, i, m.groups, from_bfloat, to);
    case XLA_FFI_DataType_F16: return read_as<uint16_t>(m.scales, i, m.groups, from_half, to);
    default: return read_as<float>(m.scales, i, m.groups, [](float x) { return x; }, to);
  }
}

void read_zeros(const Matrix& m, int64_t i, float* to) {
  const auto convert = [](auto x) { return static_cast<float>(x); };
  if (m.zeros != nullptr && m.zero_type == XLA_FFI_DataType_S8) return read_as<int8_t>(m.zeros, i, m.groups, convert, to);
  if (m.zeros != nullptr) return read_as<int16_t>(m.zeros, i, m.groups, convert, to);
  std::fill(to, to + m.groups, m.type == XLA_FFI_DataType_U8 && !has_four_bit_floats(m) ? 8.0f : 0.0f);
}

// Scales and zero points of a channel's groups.
struct Groups {
  void read(const Matrix& m, int64_t channel) {
    scales.assign(m.groups, 1.0f);
    zeros.resize(m.groups);
    if (m.scaled) read_scales(m, channel * m.groups, scales.data());
    read_zeros(m, channel * m.groups, zeros.data());
  }

  std::vector<float> scales, zeros;
};

// Calls work(Numbers) with the type of the numbers of its codes.
template <typename Work>
void with_numbers(const Matrix& m, const Work& work) {
  if (has_four_bit_floats(m)) return work(FourBitFloats(0.0f, 1.0f));
  if (m.type == XLA_FFI_DataType_U8) return work(FourBits(0.0f, 1.0f));
  if (m.type == XLA_FFI_DataType_S8) return work(EightBits(0.0f, 1.0f));
  work(EightBitFloats(0.0f, 1.0f));
}

template <typename Numbers>
void widen(const Matrix& m, int64_t channel, float* to) {
  const uint8_t* codes = m.codes + channel * m.bytes;
  thread_local Groups groups;
  groups.read(m, channel);
  if (m.index != nullptr) {
    widen_run(Numbers(0.0f, 1.0f), codes, 0, m.inputs, to);
    for (int64_t i = 0; i < m.inputs; ++i) to[i] = (to[i] - groups.zeros[m.index[i]]) * groups.scales[m.index[i]];
    return;
  }
  for (int64_t g = 0; g < m.groups; ++g) {
    const int64_t first = g * m.group, last = std::min(m.inputs, first + m.group);
    widen_run(Numbers(groups.zeros[g], groups.scales[g]), codes, first, last, to);
  }
}

template <typename Numbers>
void multiply_widened(const float* x, int64_t rows, const Matrix& m, int64_t first, int64_t count, float* out) {
  thread_local std::vector<float> wide;
  if (static_cast<int64_t>(wide.size()) < count * m.inputs) wide.resize(count * m.inputs);
  for (int64_t c = 0; c < count; ++c) widen<Numbers>(m, first + c, wide.data() + c * m.inputs);
  multiply_channels_of_all_rows({x, wide.data(), out + first, rows, m.channels, m.inputs}, 0, count);
}

// Few rows: numbers are made in registers, as each is used once. The sums are those of float_block.h, in the same order.
template <typename Numbers, int kR, int kC>
void multiply_block(const float* x, const Matrix& m, const Groups* groups, int64_t channel, float* out) {
  const uint8_t* codes = m.codes + channel * m.bytes;
  const int64_t vectors = m.inputs / kLanes * kLanes;
  Lanes parts[kR][kChannels] = {};
  float totals[kR][kChannels];
  for (int64_t g = 0; g < m.groups; ++g) {
    const int64_t last = std::min(vectors, (g + 1) * m.group);
    for (int64_t i = g * m.group; i < last; i += kLanes) {
      Lanes weight[kC];
      for (int c = 0; c < kC; ++c) {
        weight[c] = Numbers(groups[c].zeros[g], groups[c].scales[g])(codes + c * m.bytes, i);
      }
      for (int r = 0; r < kR; ++r) {
        const Lanes input = read(x + r * m.inputs + i);
        for (int c = 0; c < kC; ++c) parts[r][c] = multiply_add(input, weight[c], parts[r][c]);
      }
    }
  }
  for (int r = 0; r < kR; ++r) sums(parts[r], totals[r]);
  for (int c = 0; c < kC; ++c) {
    Lanes rest = {};
    if (vectors < m.inputs) {
      const Numbers numbers(groups[c].zeros[m.groups - 1], groups[c].scales[m.groups - 1]);
      rest = last_of(numbers, codes + c * m.bytes, vectors, m.inputs - vectors);
    }
    for (int r = 0; r < kR; ++r) {
      for (int64_t i = vectors; i < m.inputs; ++i) {
        totals[r][c] = multiply_add(x[r * m.inputs + i], rest[i - vectors], totals[r][c]);
      }
      out[r * m.channels + channel + c] = totals[r][c];
    }
  }
}

template <typename Numbers, int kC>
void multiply_few(const float* x, int64_t rows, const Matrix& m, int64_t channel, float* out) {
  thread_local Groups groups[kC];
  for (int c = 0; c < kC; ++c) groups[c].read(m, channel + c);
  for (int64_t row = 0; row < rows; row += kRows) {
    const float* of_rows = x + row * m.inputs;
    float* to = out + row * m.channels;
    switch (std::min(kRows, rows - row)) {
      case 1: multiply_block<Numbers, 1, kC>(of_rows, m, groups, channel, to); break;
      case 2: multiply_block<Numbers, 2, kC>(of_rows, m, groups, channel, to); break;
      case 3: multiply_block<Numbers, 3, kC>(of_rows, m, groups, channel, to); break;
      default: multiply_block<Numbers, 4, kC>(of_rows, m, groups, channel, to);
    }
  }
}

// Whole registers of codes share a scale, and rows are so few that widening again for each four costs less than memory.
template <typename Numbers>
bool is_for_few(const Matrix& m, int64_t rows) {
  constexpr int64_t kMost = Numbers::kIsCheap && kLanes > 4 ? 16 : 4;
  return rows <= kMost && m.index == nullptr && (m.groups == 1 || m.group % kLanes == 0);
}

void multiply_all(const float* x, int64_t rows, const Matrix& m, float* out) {
  with_numbers(m, [&](auto numbers) {
    using Numbers = decltype(numbers);
    const bool is_few = is_for_few<Numbers>(m, rows);
    const int64_t fit = kPieceBytes / std::max<int64_t>(1, m.inputs * sizeof(float)) / kChannels;
    const int64_t share = ceil_div(ceil_div(m.channels, kChannels), kPieces);
    const int64_t piece = std::max<int64_t>(1, is_few ? share : std::min(fit, share)) * kChannels;
    Crew::instance().run(ceil_div(m.channels, piece), [&](int64_t task) {
      const int64_t first = task * piece, last = std::min(first + piece, m.channels);
      if (!is_few) return multiply_widened<Numbers>(x, rows, m, first, last - first, out);
      int64_t channel = first;
      for (; channel + kChannels <= last; channel += kChannels) {
        multiply_few<Numbers, kChannels>(x, rows, m, channel, out);
      }
      for (; channel < last; ++channel) multiply_few<Numbers, 1>(x, rows, m, channel, out);
    });
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
