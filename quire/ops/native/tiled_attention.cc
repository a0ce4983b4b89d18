// Attention of tiles of queries over pages, for CPUs and float32; keys and values may be codes of eight bits with a scale
// for each token and head, which are widened a span at a time. The contract is that of tiled_attention.py.
//
// One task computes the queries of one tile that share one kv head: it reads each key and value once, in the order of
// the pages, and keeps a running softmax, so that nothing of the size of a context is ever written to memory.
//
// A query's result does not depend on the tile it is in. Contexts are cut into spans at multiples of kSpan, whatever
// the tile sees, and a key has the same lane in every tile; keys that a query does not see add zeros to its sums.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "codes.h"
#include "crew.h"
#include "lanes.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int64_t kSpan = 64;  // keys whose scores are computed before their values are read
constexpr int kKeys = 4;       // whose sums do not wait for each other
constexpr int kWide = 4;       // registers of a value that are summed at a time

struct Sizes {
  int64_t tokens, heads, per_head, size, page_size, width;
};

// Pages [n, page_size, heads, size] of codes, and scales in bfloat16 [n, heads, page_size].
struct Codes {
  const uint8_t* k = nullptr;
  const uint8_t* v = nullptr;
  const uint16_t* k_scales = nullptr;
  const uint16_t* v_scales = nullptr;
  bool is_float = false;
};

struct Task {
  const float* q;
  const float* k_pages;  // nullptr where there are codes
  const float* v_pages;
  Codes codes;
  const int32_t* table;
  const int32_t* slots;
  const int32_t* starts;
  const int32_t* lengths;
  const int32_t* offsets;
  const float* sinks;  // [heads, per_head], or nullptr
  float* out;
  Sizes n;
  float scale, softcap;
  int64_t window, chunk;  // 0: none

  // The first position that this one sees.
  int64_t first_seen(int64_t position) const {
    if (chunk > 0) return position / chunk * chunk;
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  }
};

inline void fetch(const float* from, int64_t size) {
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t h = 0; h < size; h += kLine) __builtin_prefetch(from + h, 0, 3);
}

// scores[r][s] of kRows queries with `count` keys: each key is read once for all of them. Scores are written for whole
// blocks of kKeys; those beyond the last key mean nothing.
template <int kRows>
void score(const float* const* queries, const float* const* keys, int64_t count, int64_t size, float* scores) {
  const int64_t vectors = size / kLanes * kLanes;
  for (int64_t s = 0; s < count; s += kKeys) {
    const float* key[kKeys];
    for (int k = 0; k < kKeys; ++k) key[k] = keys[std::min(s + k, count - 1)];
    Lanes dot[kRows][kKeys] = {};
    for (int64_t h = 0; h < vectors; h += kLanes) {
      Lanes part[kKeys];
      for (int k = 0; k < kKeys; ++k) part[k] = read(key[k] + h);
      for (int r = 0; r < kRows; ++r) {
        const Lanes query = read(queries[r] + h);
        for (int k = 0; k < kKeys; ++k) dot[r][k] = multiply_add(query, part[k], dot[r][k]);
      }
    }
    for (int r = 0; r < kRows; ++r) quire::sums(dot[r], scores + r * kSpan + s);
    if (vectors == size) continue;
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < kKeys; ++k) {
        float& score = scores[r * kSpan + s + k];
        for (int64_t h = vectors; h < size; ++h) score = multiply_add(queries[r][h], key[k][h], score);
      }
    }
  }
}

// sums[r] += weights[r][s] * values[s] for kRows rows that are `size` apart, and kWide registers from feature h on.
template <int kRows, int kWide>
void add_at(int64_t h, const float* weights, const float* const* values, int64_t count, int64_t size, float* sums) {
  Lanes part[kRows][kWide];
  for (int r = 0; r < kRows; ++r) {
    for (int w = 0; w < kWide; ++w) part[r][w] = read(sums + r * size + h + w * kLanes);
  }
  for (int64_t s = 0; s < count; ++s) {
    Lanes value[kWide];
    for (int w = 0; w < kWide; ++w) value[w] = read(values[s] + h + w * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Lanes weight = all(weights[r * kSpan + s]);
      for (int w = 0; w < kWide; ++w) part[r][w] = multiply_add(weight, value[w], part[r][w]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int w = 0; w < kWide; ++w) write(sums + r * size + h + w * kLanes, part[r][w]);
  }
}

// The same for all features: each value is read once for all rows.
template <int kRows>
void add(const float* weights, const float* const* values, int64_t count, int64_t size, float* sums) {
  int64_t h = 0;
  for (; h + kWide * kLanes <= size; h += kWide * kLanes) add_at<kRows, kWide>(h, weights, values, count, size, sums);
  for (; h + kLanes <= size; h += kLanes) add_at<kRows, 1>(h, weights, values, count, size, sums);
  for (; h < size; ++h) {
    for (int r = 0; r < kRows; ++r) {
      float& sum = sums[r * size + h];
      for (int64_t s = 0; s < count; ++s) sum = multiply_add(weights[r * kSpan + s], values[s][h], sum);
    }
  }
}

// One query's scores of a span become weights, and what it has summed so far shrinks to match. Keys [low, high) are seen.
void weigh(const Task& t, int64_t low, int64_t high, float* scores, float& highest, float& total, float* sum) {
  if (low >= high) {
    std::fill_n(scores, kSpan, 0.0f);
    return;
  }
  if (t.softcap > 0.0f) {
    for (int64_t s = low; s < high; ++s) scores[s] = t.softcap * std::tanh(scores[s] * t.scale / t.softcap);
  }
  const float scale = t.softcap > 0.0f ? 1.0f : t.scale;
  std::fill_n(scores, low, -INFINITY);
  std::fill(scores + high, scores + kSpan, -INFINITY);
  constexpr int kParts = kSpan / kLanes;
  Lanes part[kParts], most = all(highest);
  for (int i = 0; i < kParts; ++i) {
    part[i] = read(scores + i * kLanes) * scale;
    most = larger(most, part[i]);
  }
  const float best = quire::highest(most);
  if (best > highest) {
    const float shrink = highest == -INFINITY ? 0.0f : std::exp(highest - best);
    total *= shrink;
    for (int64_t h = 0; h < t.n.size; ++h) sum[h] *= shrink;
    highest = best;
  }
  Lanes added = {};
  for (int i = 0; i < kParts; ++i) {
    const Lanes weight = part[i] == -INFINITY ? Lanes{} : exponential(part[i] - best);
    write(scores + i * kLanes, weight);
    added += weight;
  }
  total += quire::sum(added);
}

void widen(const Codes& codes, const uint8_t* from, uint16_t scale_bits, int64_t size, float* to) {
  const uint32_t bits = uint32_t(scale_bits) << 16;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  if (codes.is_float) return widen_run(EightBitFloats(0.0f, scale), from, 0, size, to);
  widen_run(EightBits(0.0f, scale), from, 0, size, to);
}

// Queries of one tile and one kv head.
void attend(const Task& t, int64_t tile, int64_t head) {
  const Sizes& n = t.n;
  const int64_t count = t.lengths[tile], start = t.starts[tile];
  const int64_t rows = count * n.per_head;
  const int64_t query_stride = n.heads * n.per_head * n.size, key_stride = n.heads * n.size;
  const int64_t first_query = t.offsets[tile] * query_stride + head * n.per_head * n.size;
  const float* q = t.q + first_query;
  float* out = t.out + first_query;

  thread_local std::vector<float> scores, highest, total, sums;
  thread_local std::vector<const float*> queries;
  thread_local std::vector<float> widened;
  const bool is_coded = t.codes.k != nullptr;
  if (is_coded) widened.resize(2 * kSpan * n.size);
  scores.assign(rows * kSpan, 0.0f);
  highest.assign(rows, -INFINITY);
  total.assign(rows, 0.0f);
  if (t.sinks != nullptr) {  // a first score, without a value
    for (int64_t row = 0; row < rows; ++row) highest[row] = t.sinks[head * n.per_head + row % n.per_head];
    total.assign(rows, 1.0f);
  }
  sums.assign(rows * n.size, 0.0f);
  queries.resize(rows);
  for (int64_t row = 0; row < rows; ++row) {
    queries[row] = q + row / n.per_head * query_stride + row % n.per_head * n.size;
  }
  const int64_t end = start + count;
  const int64_t first = t.first_seen(start);
  const int32_t* table = t.table + t.slots[tile] * n.width;
  // The places of a span's positions among all that pages hold. Of those before the first, which are not read, it is the
  // place of the first. Keys are then on their way from memory.
  const auto find = [&](int64_t at, int64_t* places) {
    const int64_t begin = std::max(first, at), last = std::min(at + kSpan, end);
    int64_t page = begin / n.page_size, offset = begin % n.page_size;
    for (int64_t position = begin; position < last; ++position) {
      places[position - at] = table[page] * n.page_size + offset;
      if (++offset == n.page_size) ++page, offset = 0;
    }
    std::fill_n(places, begin - at, places[begin - at]);
    for (int64_t s = 0; !is_coded && s < last - at; ++s) {
      fetch(t.k_pages + places[s] * key_stride + head * n.size, n.size);
    }
  };
  int64_t found[2][kSpan], *places = found[0], *next = found[1];
  find(first / kSpan * kSpan, next);

  for (int64_t at = first / kSpan * kSpan; at < end; at += kSpan) {
    const int64_t span = std::min(kSpan, end - at);
    const float *keys[kSpan], *values[kSpan];
    std::swap(places, next);
    for (int64_t s = 0; s < span; ++s) {
      const int64_t place = places[s] * key_stride + head * n.size;
      if (is_coded) {
        const int64_t page = places[s] / n.page_size;
        const int64_t scale = (page * n.heads + head) * n.page_size + places[s] % n.page_size;
        float *key = widened.data() + s * n.size, *value = key + kSpan * n.size;
        widen(t.codes, t.codes.k + place, t.codes.k_scales[scale], n.size, key);
        widen(t.codes, t.codes.v + place, t.codes.v_scales[scale], n.size, value);
        keys[s] = key;
        values[s] = value;
        continue;
      }
      keys[s] = t.k_pages + place;
      values[s] = t.v_pages + place;
    }
    // Their values and the keys of the next span are on their way from memory while scores are computed.
    for (int64_t s = 0; !is_coded && s < span; ++s) fetch(values[s], n.size);
    if (at + kSpan < end) find(at + kSpan, next);
    // The queries before this one see nothing of the span.
    const int64_t from = std::max<int64_t>(0, at - start) * n.per_head;
    for (int64_t row = from; row < rows;) {
      const int64_t together = std::min<int64_t>(4, rows - row);
      float* weights = scores.data() + row * kSpan;
      float* sum = sums.data() + row * n.size;
      const float* const* these = queries.data() + row;
      switch (together) {
        case 1: score<1>(these, keys, span, n.size, weights); break;
        case 2: score<2>(these, keys, span, n.size, weights); break;
        case 3: score<3>(these, keys, span, n.size, weights); break;
        default: score<4>(these, keys, span, n.size, weights);
      }
      for (int64_t i = row; i < row + together; ++i) {
        const int64_t position = start + i / n.per_head;
        // Keys [low, high) of the span are seen by this query.
        const int64_t low = std::max<int64_t>(0, t.first_seen(position) - at);
        const int64_t high = std::min(span, position + 1 - at);
        weigh(t, low, high, scores.data() + i * kSpan, highest[i], total[i], sums.data() + i * n.size);
      }
      switch (together) {
        case 1: add<1>(weights, values, span, n.size, sum); break;
        case 2: add<2>(weights, values, span, n.size, sum); break;
        case 3: add<3>(weights, values, span, n.size, sum); break;
        default: add<4>(weights, values, span, n.size, sum);
      }
      row += together;
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* to = out + (row / n.per_head) * query_stride + (row % n.per_head) * n.size;
    const float inverse = total[row] > 0.0f ? 1.0f / total[row] : 0.0f;
    for (int64_t h = 0; h < n.size; ++h) to[h] = sums[row * n.size + h] * inverse;
  }
}

Fault run(const Task& task, int64_t tiles, int64_t num_sinks) {
  const Sizes& n = task.n;
  if (num_sinks != 0 && num_sinks != n.heads * n.per_head) return "sinks of another shape";
  std::vector<int64_t> real;
  int64_t covered = 0;  // tokens; those behind them are padding
  for (int64_t tile = 0; tile < tiles; ++tile) {
    if (task.lengths[tile] == 0) continue;
    real.push_back(tile);
    covered = std::max<int64_t>(covered, task.offsets[tile] + task.lengths[tile]);
  }
  const int64_t token_size = n.heads * n.per_head * n.size;
  std::fill(task.out + covered * token_size, task.out + n.tokens * token_size, 0.0f);
  Crew::instance().run(static_cast<int64_t>(real.size()) * n.heads,
                              [&](int64_t i) { attend(task, real[i / n.heads], i % n.heads); });
  return nullptr;
}

Fault TiledAttention(In<float> q, In<float> k_pages, In<float> v_pages, In<int32_t> table, In<int32_t> slots,
                     In<int32_t> starts, In<int32_t> lengths, In<int32_t> offsets, In<float> sinks, Out<float> out,
                     float scale, float softcap, int64_t window, int64_t chunk) {
  const auto d = q.sizes;
  const Sizes n{d[0], d[1], d[2], d[3], k_pages.sizes[1], table.sizes[1]};
  return run({q.data, k_pages.data, v_pages.data, {}, table.data, slots.data, starts.data, lengths.data, offsets.data,
              sinks.count() ? sinks.data : nullptr, out.data, n, scale, softcap, window, chunk},
             starts.sizes[0], sinks.count());
}

Fault CodedAttention(In<float> q, In<void> k_pages, In<void> v_pages, In<void> k_scales, In<void> v_scales,
                     In<int32_t> table, In<int32_t> slots, In<int32_t> starts, In<int32_t> lengths,
                     In<int32_t> offsets, In<float> sinks, Out<float> out, float scale, float softcap,
                     int64_t window, int64_t chunk) {
  if (k_scales.type != XLA_FFI_DataType_BF16 || v_scales.type != k_scales.type) return "scales have another type";
  const bool is_float = k_pages.type == XLA_FFI_DataType_F8E4M3FN;
  if (!is_float && k_pages.type != XLA_FFI_DataType_S8) return "pages have another type";
  const auto d = q.sizes;
  const Sizes n{d[0], d[1], d[2], d[3], k_pages.sizes[1], table.sizes[1]};
  const Codes codes{static_cast<const uint8_t*>(k_pages.data), static_cast<const uint8_t*>(v_pages.data),
                    static_cast<const uint16_t*>(k_scales.data), static_cast<const uint16_t*>(v_scales.data), is_float};
  return run({q.data, nullptr, nullptr, codes, table.data, slots.data, starts.data, lengths.data, offsets.data,
              sinks.count() ? sinks.data : nullptr, out.data, n, scale, softcap, window, chunk},
             starts.sizes[0], sinks.count());
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_tiled_attention, quire::TiledAttention, "scale", "softcap", "window", "chunk")
QUIRE_OPERATION(quire_coded_attention, quire::CodedAttention, "scale", "softcap", "window", "chunk")
