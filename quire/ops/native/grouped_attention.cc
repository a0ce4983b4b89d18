// Attention of groups of queries over pages, for CPUs and float32. The contract is that of grouped_attention.py.
//
// One task computes the queries of one group that share one kv head: it reads each key and value once, in the order of
// the pages, and keeps a running softmax, so that nothing of the size of a context is ever written to memory.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "crew.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kSpan = 32;  // keys whose scores are computed before their values are read

struct Sizes {
  int64_t groups, queries, heads, per_head, size, page_size, width;
};

struct Task {
  const float* q;
  const float* k_pages;
  const float* v_pages;
  const int32_t* table;
  const int32_t* starts;
  const int32_t* lengths;
  float* out;
  Sizes n;
  float scale, softcap;
  int64_t window;
};

// Several keys at a time: their sums do not wait for each other.
template <int kKeys>
inline void dots(const float* query, const float* keys, int64_t stride, int64_t size, float* scores) {
  float dot[kKeys] = {};
  for (int64_t h = 0; h < size; ++h) {
    for (int i = 0; i < kKeys; ++i) dot[i] += query[h] * keys[i * stride + h];
  }
  for (int i = 0; i < kKeys; ++i) scores[i] = dot[i];
}

// Several values at a time: the sum is read and written once for all of them.
template <int kValues>
inline void add(const float* weights, const float* values, int64_t stride, int64_t size, float* sum) {
  for (int64_t h = 0; h < size; ++h) {
    float part = sum[h];
    for (int i = 0; i < kValues; ++i) part += weights[i] * values[i * stride + h];
    sum[h] = part;
  }
}

// Queries of one group and one kv head.
void attend(const Task& t, int64_t group, int64_t head) {
  const Sizes& n = t.n;
  const int64_t count = t.lengths[group], start = t.starts[group];
  const int64_t rows = count * n.per_head;
  const int64_t query_stride = n.heads * n.per_head * n.size, key_stride = n.heads * n.size;
  const float* q = t.q + (group * n.queries * n.heads + head) * n.per_head * n.size;
  float* out = t.out + (group * n.queries * n.heads + head) * n.per_head * n.size;
  for (int64_t b = count; b < n.queries; ++b) {
    std::fill_n(out + b * query_stride, n.per_head * n.size, 0.0f);
  }
  if (count == 0) return;

  std::vector<float> scores(rows * kSpan), highest(rows, -INFINITY), total(rows, 0.0f), sum(rows * n.size, 0.0f);
  const int64_t end = start + count;
  const int64_t first = t.window > 0 ? std::max<int64_t>(0, start - t.window + 1) : 0;
  const int32_t* table = t.table + group * n.width;

  for (int64_t at = first; at < end;) {
    // A span ends with its page, so that its keys lie at one stride.
    const int64_t offset = at % n.page_size;
    const int64_t span = std::min({kSpan, n.page_size - offset, end - at});
    const int64_t place = (table[at / n.page_size] * n.page_size + offset) * key_stride + head * n.size;
    const float* keys = t.k_pages + place;
    const float* values = t.v_pages + place;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t b = row / n.per_head, g = row % n.per_head, position = start + b;
      // Keys [low, high) of the span are seen by this query.
      const int64_t low = t.window > 0 ? std::max<int64_t>(0, position - t.window + 1 - at) : 0;
      const int64_t high = std::min(span, position + 1 - at);
      if (low >= high) continue;
      const float* query = q + b * query_stride + g * n.size;
      float* score = scores.data() + row * kSpan;
      float best = highest[row];
      int64_t s = low;
      for (; s + 4 <= high; s += 4) dots<4>(query, keys + s * key_stride, key_stride, n.size, score + s);
      for (; s < high; ++s) dots<1>(query, keys + s * key_stride, key_stride, n.size, score + s);
      for (s = low; s < high; ++s) {
        score[s] *= t.scale;
        if (t.softcap > 0.0f) score[s] = t.softcap * std::tanh(score[s] / t.softcap);
        best = std::max(best, score[s]);
      }
      float* acc = sum.data() + row * n.size;
      if (best > highest[row]) {
        const float shrink = highest[row] == -INFINITY ? 0.0f : std::exp(highest[row] - best);
        total[row] *= shrink;
        for (int64_t h = 0; h < n.size; ++h) acc[h] *= shrink;
        highest[row] = best;
      }
      for (s = low; s < high; ++s) {
        score[s] = std::exp(score[s] - best);
        total[row] += score[s];
      }
      for (s = low; s + 4 <= high; s += 4) add<4>(score + s, values + s * key_stride, key_stride, n.size, acc);
      for (; s < high; ++s) add<1>(score + s, values + s * key_stride, key_stride, n.size, acc);
    }
    at += span;
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* to = out + (row / n.per_head) * query_stride + (row % n.per_head) * n.size;
    const float inverse = total[row] > 0.0f ? 1.0f / total[row] : 0.0f;
    for (int64_t h = 0; h < n.size; ++h) to[h] = sum[row * n.size + h] * inverse;
  }
}

ffi::Error GroupedAttention(ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k_pages, ffi::Buffer<ffi::F32> v_pages,
                            ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> starts,
                            ffi::Buffer<ffi::S32> lengths, ffi::ResultBuffer<ffi::F32> out, float scale, float softcap,
                            int64_t window) {
  const auto d = q.dimensions();
  const Sizes n{d[0], d[1], d[2], d[3], d[4], k_pages.dimensions()[1], table.dimensions()[1]};
  const Task task{q.typed_data(),      k_pages.typed_data(), v_pages.typed_data(), table.typed_data(),
                  starts.typed_data(), lengths.typed_data(), out->typed_data(),    n,
                  scale,               softcap,              window};
  quire::Crew::instance().run(n.groups * n.heads, [&](int64_t i) { attend(task, i / n.heads, i % n.heads); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_grouped_attention, GroupedAttention,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window"));
