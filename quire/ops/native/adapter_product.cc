// Products of small rank that are added to others: out[t] += B[s] (A[s] x[t]), where s is the adapter of row t. float32
// activations; adapters of float32 or bfloat16. The contract is that of ops/adapters.py.
//
// Rows of one adapter are multiplied together, so that its numbers are read once; rows without one cost nothing. Each sum
// is taken in an order that depends on its own length alone, so a row does not depend on the rows beside it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crew.h"
#include "lanes.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int kRows = 4;              // of a block
constexpr int kRanks = 4;             // of a block
constexpr int64_t kChunk = 256;       // outputs of a unit of work
constexpr int64_t kTaskWork = 32768;  // products of a task: what takes longer than to hand it to another core

typedef uint16_t Short;
typedef Short ShortLanes __attribute__((vector_size(kLanes * sizeof(Short))));
typedef uint32_t WordLanes __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Lanes widened(const float* from) { return read(from); }

inline Lanes widened(const Short* from) {
#if defined(QUIRE_LANES_512) && defined(__AVX512BW__)
  // Words to the upper halves of the lanes in one instruction, which leaves the unit of products and sums alone.
  const __m512i shorts = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i places = _mm512_set_epi32(0xf0000, 0xe0000, 0xd0000, 0xc0000, 0xb0000, 0xa0000, 0x90000, 0x80000, 0x70000,
                                          0x60000, 0x50000, 0x40000, 0x30000, 0x20000, 0x10000, 0);
  return (Lanes)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, places, shorts);
#elif defined(QUIRE_LANES_256)
  const __m128i shorts = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(shorts), 16);
#else
  ShortLanes shorts;
  std::memcpy(&shorts, from, sizeof(shorts));
  const WordLanes words = __builtin_convertvector(shorts, WordLanes) << 16;
  Lanes lanes;
  std::memcpy(&lanes, &words, sizeof(lanes));
  return lanes;
#endif
}

inline float wide(float x) { return x; }

inline float wide(Short x) {
  const uint32_t word = static_cast<uint32_t>(x) << 16;
  float number;
  std::memcpy(&number, &word, sizeof(number));
  return number;
}

// `length` outputs in a row that come from the same one of the weights that were joined.
struct Run {
  int64_t first, length, part;
};

template <typename W>
struct Product {
  const float* both;  // [rows, 2, inputs] where x has to be made of it, else null
  float* active;      // what is made of it, [rows, inputs]
  const float* x;     // the same, or what is given
  const W* a;      // [slots, parts, rank, inputs]
  const W* b;      // [slots, rank, outputs]
  float* out;      // [rows, outputs]
  float* small;    // [rows, parts, rank]
  int64_t inputs, outputs, parts, rank;
};

// The rows of one adapter.
struct Group {
  int64_t slot, rank;  // its own rank, of the `rank` that there is room for
  const int32_t* rows;
  int64_t count;
};

struct Unit {
  int64_t group, first, part;
};

// Calls work(unit) for each, several to a task where they are small.
template <typename Work>
void for_each(const std::vector<Unit>& units, int64_t total_work, const Work& work) {
  const int64_t count = units.size();
  const int64_t tasks = std::min(count, std::max<int64_t>(1, total_work / kTaskWork));
  if (count == 0) return;
  Crew::instance().run(tasks, [&](int64_t task) {
    for (int64_t i = count * task / tasks; i < count * (task + 1) / tasks; ++i) work(units[i]);
  });
}

template <int kR, typename W>
void shrink_rows(const Product<W>& p, const Group& group, const int32_t* rows, int64_t part, int64_t first, int ranks) {
  const float* x[kR];
  for (int r = 0; r < kR; ++r) x[r] = p.x + rows[r] * p.inputs;
  const W* a = p.a + ((group.slot * p.parts + part) * p.rank + first) * p.inputs;
  const int64_t vectors = p.inputs / kLanes * kLanes;
  Lanes sums_of[kR][kRanks] = {};
  for (int64_t i = 0; i < vectors; i += kLanes) {
    Lanes weight[kRanks];
    for (int c = 0; c < kRanks; ++c) {
      weight[c] = widened(a + std::min(c, ranks - 1) * p.inputs + i);
      __builtin_prefetch(a + (c + kRanks) * p.inputs + i);  // of the unit after this one
    }
    for (int r = 0; r < kR; ++r) {
      const Lanes input = read(x[r] + i);
      for (int c = 0; c < kRanks; ++c) sums_of[r][c] = multiply_add(input, weight[c], sums_of[r][c]);
    }
  }
  // Unrolled, so that no sum has an address: a compiler would write them to memory in every turn of the loop above.
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r) {
    float totals[kRanks];
    sums(sums_of[r], totals);
    for (int c = 0; c < ranks; ++c) {
      for (int64_t i = vectors; i < p.inputs; ++i) {
        totals[c] = multiply_add(x[r][i], wide(a[c * p.inputs + i]), totals[c]);
      }
      p.small[(rows[r] * p.parts + part) * p.rank + first + c] = totals[c];
    }
  }
}

template <int kR, typename W>
void expand_rows(const Product<W>& p, const Group& group, const int32_t* rows, const Run& run, int64_t from, int64_t to) {
  const float* small[kR];
  float* out[kR];
  for (int r = 0; r < kR; ++r) {
    small[r] = p.small + (rows[r] * p.parts + run.part) * p.rank;
    out[r] = p.out + rows[r] * p.outputs;
  }
  const W* b = p.b + group.slot * p.rank * p.outputs;
  int64_t channel = from;
  for (; channel + 2 * kLanes <= to; channel += 2 * kLanes) {
    Lanes low[kR] = {}, high[kR] = {};
    for (int64_t j = 0; j < group.rank; ++j) {
      const Lanes first = widened(b + j * p.outputs + channel), second = widened(b + j * p.outputs + channel + kLanes);
      __builtin_prefetch(b + j * p.outputs + channel + kChunk);  // of the unit after this one
      for (int r = 0; r < kR; ++r) {
        low[r] = multiply_add(all(small[r][j]), first, low[r]);
        high[r] = multiply_add(all(small[r][j]), second, high[r]);
      }
    }
    for (int r = 0; r < kR; ++r) {
      write(out[r] + channel, read(out[r] + channel) + low[r]);
      write(out[r] + channel + kLanes, read(out[r] + channel + kLanes) + high[r]);
    }
  }
  for (; channel < to; ++channel) {
    for (int r = 0; r < kR; ++r) {
      float total = 0.0f;
      for (int64_t j = 0; j < group.rank; ++j) total = multiply_add(small[r][j], wide(b[j * p.outputs + channel]), total);
      out[r][channel] += total;
    }
  }
}

// silu(both[0]) * both[1] of a row.
void gate(const float* both, int64_t inputs, float* active) {
  const float *gates = both, *ups = both + inputs;
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    const Lanes x = read(gates + i);
    write(active + i, x / (exponential(-x) + 1.0f) * read(ups + i));
  }
  for (; i < inputs; ++i) active[i] = gates[i] / (exponential(all(-gates[i]))[0] + 1.0f) * ups[i];
}

// Calls work(rows, count as a constant) for blocks of a group's rows.
template <typename Work>
void by_rows(const Group& group, const Work& work) {
  int64_t row = 0;
  for (; row + kRows <= group.count; row += kRows) work(group.rows + row, std::integral_constant<int, kRows>());
  switch (group.count - row) {
    case 1: return work(group.rows + row, std::integral_constant<int, 1>());
    case 2: return work(group.rows + row, std::integral_constant<int, 2>());
    case 3: return work(group.rows + row, std::integral_constant<int, 3>());
  }
}

template <typename W>
void gate_row(const Product<W>& p, int64_t row) {
  gate(p.both + row * 2 * p.inputs, p.inputs, p.active + row * p.inputs);
}

template <typename W>
void shrink_unit(const Product<W>& p, const Group& group, int64_t part, int64_t first) {
  const int ranks = static_cast<int>(std::min<int64_t>(kRanks, group.rank - first));
  by_rows(group, [&](const int32_t* rows, auto count) {
    shrink_rows<decltype(count)::value>(p, group, rows, part, first, ranks);
  });
}

template <typename W>
void expand_unit(const Product<W>& p, const Group& group, const std::vector<Run>& runs, int64_t first) {
  for (const Run& run : runs) {
    const int64_t from = std::max(first, run.first), to = std::min(first + kChunk, run.first + run.length);
    if (from >= to) continue;
    by_rows(group, [&](const int32_t* rows, auto count) {
      expand_rows<decltype(count)::value>(p, group, rows, run, from, to);
    });
  }
}

// Whether all of a crew have something to do where each takes an adapter at a time.
bool is_even(const std::vector<Group>& groups) {
  const int64_t crew = Crew::instance().size(), count = groups.size();
  int64_t rows = 0, most = 0;
  for (const Group& group : groups) {
    rows += group.count;
    most = std::max(most, group.count);
  }
  return count >= 2 * crew && most * crew <= rows;
}

// One task for each adapter: nobody waits between its two products, and what is between them stays in a core's cache.
template <typename W>
void multiply_each(const Product<W>& p, const std::vector<Group>& groups, const std::vector<Run>& runs) {
  Crew::instance().run(groups.size(), [&](int64_t task) {
    const Group& group = groups[task];
    for (int64_t i = 0; p.both != nullptr && i < group.count; ++i) gate_row(p, group.rows[i]);
    for (int64_t part = 0; part < p.parts; ++part) {
      for (int64_t first = 0; first < group.rank; first += kRanks) shrink_unit(p, group, part, first);
    }
    for (int64_t first = 0; first < p.outputs; first += kChunk) expand_unit(p, group, runs, first);
  });
}

template <typename W>
void multiply_all(const Product<W>& p, const std::vector<Group>& groups, const std::vector<Run>& runs) {
  if (is_even(groups)) return multiply_each(p, groups, runs);
  std::vector<Unit> units;
  int64_t work = 0;
  if (p.both != nullptr) {
    for (size_t g = 0; g < groups.size(); ++g) {
      for (int64_t row = 0; row < groups[g].count; ++row) units.push_back({static_cast<int64_t>(g), row, 0});
      work += groups[g].count * p.inputs * 16;
    }
    for_each(units, work, [&](const Unit& unit) { gate_row(p, groups[unit.group].rows[unit.first]); });
    units.clear();
    work = 0;
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    work += groups[g].count * groups[g].rank * p.parts * p.inputs;
    for (int64_t part = 0; part < p.parts; ++part) {
      for (int64_t first = 0; first < groups[g].rank; first += kRanks) {
        units.push_back({static_cast<int64_t>(g), first, part});
      }
    }
  }
  for_each(units, work, [&](const Unit& unit) { shrink_unit(p, groups[unit.group], unit.part, unit.first); });

  units.clear();
  work = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    work += groups[g].count * groups[g].rank * p.outputs;
    for (int64_t first = 0; first < p.outputs; first += kChunk) units.push_back({static_cast<int64_t>(g), first, 0});
  }
  for_each(units, work, [&](const Unit& unit) { expand_unit(p, groups[unit.group], runs, unit.first); });
}

// out [t, o] = base [t, o] + the products of x [t, i], or of gated x [t, 2, i], with a [s, p, r, i] and b [s, r, o], which
// are given without their axes. rows [t] have the number of their adapter, 0 for none; ranks [s]; runs: lengths and parts
// of the outputs, in pairs.
Fault AdapterProduct(In<float> base, In<float> x, In<int32_t> rows, In<void> a, In<void> b, In<int32_t> ranks,
                     Out<float> out, Integers runs, bool gated) {
  const int64_t count = base.sizes[0], outputs = base.sizes[1], slots = ranks.count(), inputs = x.sizes[x.rank - 1];
  int64_t parts = 0;
  for (size_t i = 1; i < runs.count; i += 2) parts = std::max(parts, runs.data[i] + 1);
  const int64_t rank = b.count() / (slots * outputs);
  if (b.count() != slots * rank * outputs || a.count() != slots * parts * rank * inputs) {
    return "an adapter of another shape than its weight";
  }
  if (a.type != b.type) return "an adapter of two types";
  if (out.data != base.data) std::memcpy(out.data, base.data, base.count() * sizeof(float));

  std::vector<int32_t> order;
  std::vector<Group> groups;
  const int32_t* adapter = rows.data;
  for (int64_t t = 0; t < count; ++t) {
    if (adapter[t] > 0 && adapter[t] <= slots) order.push_back(static_cast<int32_t>(t));
  }
  if (order.empty()) return nullptr;
  std::stable_sort(order.begin(), order.end(), [&](int32_t l, int32_t r) { return adapter[l] < adapter[r]; });
  for (size_t first = 0, last; first < order.size(); first = last) {
    const int32_t slot = adapter[order[first]] - 1;
    for (last = first; last < order.size() && adapter[order[last]] == slot + 1;) ++last;
    const int64_t own = std::min<int64_t>(ranks.data[slot], rank);
    if (own > 0) groups.push_back({slot, own, order.data() + first, static_cast<int64_t>(last - first)});
  }
  if (groups.empty()) return nullptr;

  std::vector<Run> places;
  for (size_t i = 0, first = 0; i + 1 < runs.count; first += runs.data[i], i += 2) {
    places.push_back({static_cast<int64_t>(first), runs.data[i], runs.data[i + 1]});
  }
  std::vector<float> small(count * parts * rank), active(gated ? count * inputs : 0);
  const float *both = gated ? x.data : nullptr, *inputs_of = gated ? active.data() : x.data;
  if (a.type == kType<float>) {
    multiply_all<float>({both, active.data(), inputs_of, static_cast<const float*>(a.data), static_cast<const float*>(b.data), out.data,
                         small.data(), inputs, outputs, parts, rank},
                        groups, places);
  } else if (a.type == XLA_FFI_DataType_BF16) {
    multiply_all<Short>({both, active.data(), inputs_of, static_cast<const Short*>(a.data), static_cast<const Short*>(b.data), out.data,
                         small.data(), inputs, outputs, parts, rank},
                        groups, places);
  } else {
    return "an adapter must be float32 or bfloat16";
  }
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_adapter_product, quire::AdapterProduct, "runs", "gated")
