// Sampling from rows of logits, float32: the highest number of each, and the limits of top-k, top-p, min-p and
// typical-p. The contracts are those of `Highest` and `FilterCuts` in ops/step_attention.py.
//
// A limit is found by counting, without a sort. Distances from the highest are not negative, so that their bits sort as
// they do: a pass adds up the weights of all distances that begin with the same bits, and only those that begin as the
// limit does are read again. Sums are doubles, in one order for each row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crew.h"
#include "lanes.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int64_t kPiece = 16384;  // numbers of a task
constexpr int64_t kBlock = 1024;   // numbers that are looked through for a place, of which one block is read twice
constexpr int kAtOnce = 4;         // lanes that a core works at in turn, as one waits for what another has computed
constexpr int64_t kGroup = kAtOnce * kLanes;
constexpr int kFirstShift = 20, kDigit = 10;  // of the bits of a distance, most significant first: 11, 10, 10
constexpr int64_t kBins = 2048;
constexpr float kFarthest = 87.0f;  // from the highest that still weighs something
constexpr uint32_t kMagnitude = 0x7FFFFFFF;

struct Found {
  int64_t place;
  float number;
};

// The highest of a block, and whether it has a NaN, which is never higher.
struct BlockHighest {
  float number;
  bool has_nan;
};

BlockHighest highest_of_block(const float* x, int64_t size) {
  Lanes most[kAtOnce];
  IntLanes nan[kAtOnce] = {};
  for (Lanes& part : most) part = all(-INFINITY);
  int64_t i = 0;
  for (; i + kGroup <= size; i += kGroup) {
    for (int part = 0; part < kAtOnce; ++part) {
      const Lanes next = read(x + i + part * kLanes);
      most[part] = next > most[part] ? next : most[part];
      nan[part] |= next != next;
    }
  }
  for (int part = 1; part < kAtOnce; ++part) {
    most[0] = most[part] > most[0] ? most[part] : most[0];
    nan[0] |= nan[part];
  }
  BlockHighest found = {highest(most[0]), false};
  for (int lane = 0; lane < kLanes; ++lane) found.has_nan |= nan[0][lane] != 0;
  for (; i < size; ++i) {
    found.number = x[i] > found.number ? x[i] : found.number;
    found.has_nan |= x[i] != x[i];
  }
  return found;
}

// The first NaN, or the first of the highest numbers.
Found highest_of(const float* x, int64_t size) {
  int64_t at = 0;
  BlockHighest most = {-INFINITY, false};
  for (int64_t start = 0; start < size && !most.has_nan; start += kBlock) {
    const BlockHighest block = highest_of_block(x + start, std::min(kBlock, size - start));
    if (!block.has_nan && !(block.number > most.number)) continue;
    most = block;
    at = start;
  }
  while (at + 1 < size && !(most.has_nan ? x[at] != x[at] : x[at] == most.number)) ++at;
  return {at, x[at]};
}

Fault Highest(In<float> values, In<int32_t> num_rows, Out<int32_t> places, Out<float> numbers) {
  const int64_t rows = first_rows(num_rows, values.sizes[0]), size = values.sizes[1];
  const int64_t pieces = (size + kPiece - 1) / kPiece;
  if (size == 0) return "there is no highest of no numbers";
  std::vector<Found> found(rows * pieces);
  Crew::instance().run(rows * pieces, [&](int64_t task) {
    const int64_t start = task % pieces * kPiece;
    const float* x = values.data + task / pieces * size + start;
    found[task] = highest_of(x, std::min(kPiece, size - start));
    found[task].place += start;
  });
  for (int64_t row = 0; row < rows; ++row) {
    Found most = found[row * pieces];
    for (int64_t piece = 1; piece < pieces && most.number == most.number; ++piece) {
      const Found next = found[row * pieces + piece];
      if (next.number > most.number || next.number != next.number) most = next;
    }
    places.data[row] = static_cast<int32_t>(most.place);
    numbers.data[row] = most.number;
  }
  std::fill(places.data + rows, places.data + places.count(), 0);
  std::fill(numbers.data + rows, numbers.data + numbers.count(), 0.0f);
  return nullptr;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits & kMagnitude;
}

float distance_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Whether some of a group of keys begin with these bits.
bool has_alike(const uint32_t* keys, int shift, int32_t begin) {
  IntLanes group[kAtOnce], alike = {};
  std::memcpy(group, keys, sizeof(group));
  for (const IntLanes& lanes : group) alike |= lanes >> shift == begin;
  uint64_t words[sizeof(alike) / sizeof(uint64_t)], some = 0;
  std::memcpy(words, &alike, sizeof(alike));
  for (const uint64_t word : words) some |= word;
  return some != 0;
}

// The tokens of a row that no filter has left out: the bits of their distances, and their weights once they are asked
// for. Arrays have room for a whole group at their end.
struct Tokens {
  std::vector<uint32_t> away, some_away;
  std::vector<float> weights, some_weights;
  int64_t count = 0;

  void read_row(const float* logits, int64_t size) {
    const size_t room = size + kGroup;
    if (away.size() < room) {
      away.resize(room), some_away.resize(room);
      weights.resize(room), some_weights.resize(room);
    }
    count = size;
    for (int64_t i = 0; i < size; ++i) away[i] = bits_of(logits[i]);
  }

  // Leaves out what is farther than a limit.
  void keep(float limit) {
    const uint32_t most = bits_of(limit);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = away[i];
      away[kept] = bits;
      kept += bits <= most;
    }
    count = kept;
  }

  void weigh() {
    const Lanes farthest = all(kFarthest);
    for (int64_t i = 0; i < count; i += kGroup) {
      Lanes distances[kAtOnce], out[kAtOnce];
      std::memcpy(distances, away.data() + i, sizeof(distances));
      for (int part = 0; part < kAtOnce; ++part) {
        out[part] = distances[part] <= farthest ? exponential(-distances[part]) : Lanes{};
      }
      std::memcpy(weights.data() + i, out, sizeof(out));
    }
  }

  // The least distance such that what is no farther makes up this share of all weights.
  float limit_of_share(float share) { return limit<true>(share); }
  // Such that as many tokens are no farther.
  float limit_of_count(int64_t tokens) { return limit<false>(static_cast<double>(tokens)); }

 private:
  template <bool kWeighed>
  float limit(double target) {
    double sums[kBins], before = 0.0;
    uint32_t found = 0;
    const uint32_t* keys = away.data();
    const float* of_keys = weights.data();
    int64_t left = count;
    for (int shift = kFirstShift; shift >= 0; shift -= kDigit) {
      const int64_t bins = shift == kFirstShift ? kBins : 1 << kDigit;
      std::fill(sums, sums + bins, 0.0);
      for (int64_t i = 0; i < left; ++i) sums[keys[i] >> shift & (bins - 1)] += kWeighed ? of_keys[i] : 1.0;
      if (kWeighed && shift == kFirstShift) {  // in the order of the search, so that a share of them is reached
        double total = 0.0;
        for (int64_t bin = 0; bin < bins; ++bin) total += sums[bin];
        target *= total;
      }
      int64_t last = 0;
      double reached = before;
      for (int64_t bin = 0; bin < bins && !(reached >= target); ++bin) {
        if (!(sums[bin] > 0.0)) continue;
        last = bin;
        before = reached;
        reached += sums[bin];
      }
      found |= static_cast<uint32_t>(last) << shift;
      if (shift == 0) break;
      int64_t alike = 0;
      for (int64_t start = 0; start < left; start += kGroup) {
        if (!has_alike(keys + start, shift, static_cast<int32_t>(found >> shift))) continue;
        for (int64_t i = start; i < std::min(left, start + kGroup); ++i) {
          const uint32_t key = keys[i];
          some_away[alike] = key;
          if (kWeighed) some_weights[alike] = of_keys[i];
          alike += key >> shift == found >> shift;
        }
      }
      keys = some_away.data(), of_keys = some_weights.data(), left = alike;
    }
    return distance_of(found);
  }
};

struct Asked {
  int64_t top_k;
  float top_p, farthest, typical_p;
};

struct Limits {
  float cut, centre, spread;
};

Limits limits_of(const float* logits, int64_t size, const Asked& asked) {
  const bool has_k = asked.top_k < size, has_p = asked.top_p < 1.0f, is_typical = asked.typical_p < 1.0f;
  if (!has_k && !has_p && !is_typical) return {-asked.farthest, 0.0f, INFINITY};
  thread_local Tokens tokens;
  tokens.read_row(logits, size);
  float limit = INFINITY;
  if (has_k) {
    limit = tokens.limit_of_count(asked.top_k);
    if (has_p || is_typical) tokens.keep(limit);
  }
  if (has_p) {
    tokens.weigh();
    limit = std::min(limit, tokens.limit_of_share(asked.top_p));
  }
  limit = std::min(limit, asked.farthest);
  if (!is_typical) return {-limit, 0.0f, INFINITY};
  // A token's information is its distance from the highest and a constant, which its entropy, their mean, has too.
  tokens.keep(limit);
  tokens.weigh();
  double total = 0.0, first = 0.0;
  for (int64_t i = 0; i < tokens.count; ++i) {
    const double weight = tokens.weights[i];
    if (!(weight > 0.0)) continue;
    total += weight;
    first += weight * distance_of(tokens.away[i]);
  }
  const float centre = static_cast<float>(first / total);
  for (int64_t i = 0; i < tokens.count; ++i) tokens.away[i] = bits_of(distance_of(tokens.away[i]) - centre);
  return {-limit, centre, tokens.limit_of_share(asked.typical_p)};
}

// The logits are given back in their place.
Fault FilterCuts(In<float> logits, In<int32_t> top_k, In<float> top_p, In<float> farthest, In<float> typical_p,
                 Out<float> same, Out<float> cut, Out<float> centre, Out<float> spread) {
  const int64_t rows = logits.sizes[0], size = logits.sizes[1];
  if (same.data != logits.data) return "the logits are not given back in their place";
  Crew::instance().run(rows, [&](int64_t row) {
    const Asked asked = {top_k.data[row], top_p.data[row], farthest.data[row], typical_p.data[row]};
    const Limits limits = limits_of(logits.data + row * size, size, asked);
    cut.data[row] = limits.cut;
    centre.data[row] = limits.centre;
    spread.data[row] = limits.spread;
  });
  return nullptr;
}

}  // namespace
}  // namespace quire

QUIRE_OPERATION(quire_highest, quire::Highest)
QUIRE_OPERATION(quire_filter_cuts, quire::FilterCuts)
