// Products of float32 activations with int8 weights. The contract is that of ops/weights/int8.py.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "crew.h"
#include "int8_tile.h"
#include "lanes.h"
#include "operation.h"

namespace quire {
namespace {

constexpr int64_t kPanel = 16;  // blocks of rows that stay in a core's cache while tiles pass by
constexpr int64_t kTasks = 16;  // into which a product is cut: enough for a core that is disturbed to do fewer
constexpr int64_t kTaskBytes = 512 << 10;  // of tiles at most: experts may have many rows or few
constexpr int64_t kFewRows = 12;           // which are quantised before the crew would have begun

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of `runs` times `run` numbers; every run begins a group. A gated row has a run of gates and one of what they are
// for, and stands for one run.
struct Rows {
  const float* x;
  int64_t count, runs, run;
  bool gated = false;
  int64_t run_groups() const { return ceil_div(run, kGroup); }
  int64_t groups() const { return runs * run_groups(); }
};

// Rows from `first` to `last`, which meet the same matrix.
struct Part {
  const TileGroup* tiles;
  int64_t first, last;
};

// Parts in panels of at most kPanel blocks of rows, each of which is in one panel.
struct Cut {
  std::vector<Part> panels, blocks;
  std::vector<int64_t> first_blocks;  // of each panel

  explicit Cut(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      for (int64_t row = part.first; row < part.last; row += kRowBlock) {
        if ((row - part.first) % (kPanel * kRowBlock) == 0) {
          panels.push_back({part.tiles, row, std::min(part.last, row + kPanel * kRowBlock)});
          first_blocks.push_back(blocks.size());
        }
        blocks.push_back({part.tiles, row, std::min(part.last, row + kRowBlock)});
      }
    }
  }
};

// silu(gate) * up
void pass_gate(const float* gate, const float* up, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes x = read(gate + i);
    write(to + i, x / (1.0f + exponential(all(0.0f) - x)) * read(up + i));
  }
  if (i == count) return;
  float rest[2][kLanes] = {};
  std::copy(gate + i, gate + count, rest[0]);
  std::copy(up + i, up + count, rest[1]);
  const Lanes x = read(rest[0]);
  write(rest[0], x / (1.0f + exponential(all(0.0f) - x)) * read(rest[1]));
  std::copy_n(rest[0], count - i, to + i);
}

void quantize_block(const Rows& rows, const Part& block, RowGroup* to) {
  const int64_t per_run = rows.run_groups();
  for (int64_t row = block.first; row < block.last; ++row) {
    const float* x = rows.x + row * rows.runs * rows.run * (rows.gated ? 2 : 1);
    for (int64_t g = 0; g < rows.groups(); ++g) {
      const int64_t at = g % per_run * kGroup;
      const int64_t count = std::min(kGroup, rows.run - at);
      const float* from = x + g / per_run * rows.run + at;
      float passed[kGroup];
      if (rows.gated) {
        pass_gate(from, from + rows.run, count, passed);
        from = passed;
      }
      quantize_row(from, count, row - block.first, to[g]);
    }
  }
}

void multiply_block(const RowGroup* rows, int64_t count, const TileGroup* const* tiles, int64_t groups, float* out,
                    int64_t stride) {
  switch (count) {
    case 1: return multiply<1>(rows, tiles, groups, out, stride);
    case 2: return multiply<2>(rows, tiles, groups, out, stride);
    case 3: return multiply<3>(rows, tiles, groups, out, stride);
#if defined(QUIRE_VNNI)
    case 4: return multiply<4>(rows, tiles, groups, out, stride);
    case 5: return multiply<5>(rows, tiles, groups, out, stride);
    case 6: return multiply<6>(rows, tiles, groups, out, stride);
    case 7: return multiply<7>(rows, tiles, groups, out, stride);
#endif
    default: return multiply<kRowsTogether>(rows, tiles, groups, out, stride);
  }
}

// The rows of a panel with the tiles from `first` to `last`, of which the last may be wider than what is left of `width`.
void multiply_panel(const Part& rows, const RowGroup* quantized, int64_t groups, int64_t first, int64_t last, float* out,
                    int64_t width) {
  for (int64_t t = first; t < last; t += kTilesTogether) {
    // The last tile stands for one that is missing.
    const TileGroup* these[kTilesTogether];
    for (int64_t i = 0; i < kTilesTogether; ++i) these[i] = rows.tiles + std::min(t + i, last - 1) * groups;
    const int64_t channels = std::min(kChannels, width - t * kTile);
    for (int64_t row = rows.first; row < rows.last; row += kRowsTogether) {
      const RowGroup* from = quantized + (row - rows.first) / kRowBlock * groups;
      const int64_t count = std::min(kRowsTogether, rows.last - row);
      float* to = out + row * width + t * kTile;
      if (channels == kChannels) {
        multiply_block(from, count, these, groups, to, width);
      } else {
        float whole[kRowsTogether * kChannels];
        multiply_block(from, count, these, groups, whole, kChannels);
        for (int64_t r = 0; r < count; ++r) std::copy_n(whole + r * kChannels, channels, to + r * width);
      }
    }
  }
}

// out [rows, width] of the rows of each part with its tiles. All parts are one call of the crew: waiting for each would
// leave cores idle as often.
void product(const Rows& rows, const std::vector<Part>& parts, float* out, int64_t width) {
  const Cut cut(parts);
  if (cut.blocks.empty() || width == 0) return;
  const int64_t blocks = cut.blocks.size(), panels = cut.panels.size();
  const int64_t groups = rows.groups(), num_tiles = ceil_div(width, kTile);
  thread_local std::vector<RowGroup> scratch;
  if (static_cast<int64_t>(scratch.size()) < blocks * groups) scratch.resize(blocks * groups);
  RowGroup* const quantized = scratch.data();
  Crew& crew = Crew::instance();
  const auto quantize_one = [&](int64_t block) { quantize_block(rows, cut.blocks[block], quantized + block * groups); };
  if (rows.count > kFewRows) {
    crew.run(blocks, quantize_one);
  } else {
    for (int64_t block = 0; block < blocks; ++block) quantize_one(block);
  }
  const int64_t steps = ceil_div(num_tiles, kTilesTogether), bytes = num_tiles * groups * sizeof(TileGroup);
  const int64_t wanted = std::max({int64_t{1}, kTasks / panels, ceil_div(bytes, kTaskBytes)});
  const int64_t piece = ceil_div(steps, std::min(steps, wanted)) * kTilesTogether;
  const int64_t pieces = ceil_div(num_tiles, piece);
  crew.run(pieces * panels, [&](int64_t task) {
    const int64_t panel = task / pieces, first = task % pieces * piece, last = std::min(num_tiles, first + piece);
    multiply_panel(cut.panels[panel], quantized + cut.first_blocks[panel] * groups, groups, first, last, out, width);
  });
}

// The first `rows.count` rows of the result; the others become zero.
Fault multiply_rows(const Rows& rows, In<int8_t> tiles, Out<float> out) {
  const int64_t width = out.sizes[1];
  const int64_t needed = ceil_div(width, kTile) * rows.groups() * sizeof(TileGroup);
  if (tiles.count() != needed) return "tiles of another shape";
  product(rows, {{reinterpret_cast<const TileGroup*>(tiles.data), 0, rows.count}}, out.data, width);
  std::fill(out.data + rows.count * width, out.data + out.sizes[0] * width, 0.0f);
  return nullptr;
}

Fault Int8Product(In<float> x, In<int8_t> tiles, In<int32_t> num_rows, Out<float> out) {
  const auto d = x.sizes;
  return multiply_rows({x.data, first_rows(num_rows, d[0]), d[1], d[2]}, tiles, out);
}

Fault Int8GatedProduct(In<float> x, In<int8_t> tiles, In<int32_t> num_rows, Out<float> out) {
  const auto d = x.sizes;
  return multiply_rows({x.data, first_rows(num_rows, d[0]), 1, d[2], true}, tiles, out);
}

// out [n, width] of rows x [n, 1, run], or gated ones [n, 2, run], with the tiles of several matrices: the first sizes[0]
// rows with those of the first, and so on. Rows beyond the sizes become zero.
Fault Int8GroupedProduct(In<float> x, In<int8_t> tiles, In<int32_t> sizes, Out<float> out, bool gated) {
  const int64_t count = x.sizes[0], width = out.sizes[1], matrices = sizes.count();
  const Rows rows = {x.data, count, 1, x.sizes[2], gated};
  const int64_t per_matrix = ceil_div(width, kTile) * rows.groups();
  if (x.sizes[1] != (gated ? 2 : 1)) return "rows of another shape";
  if (tiles.count() != matrices * per_matrix * static_cast<int64_t>(sizeof(TileGroup))) return "tiles of another shape";
  const TileGroup* const first = reinterpret_cast<const TileGroup*>(tiles.data);
  std::vector<Part> parts;
  int64_t row = 0;
  for (int64_t e = 0; e < matrices; ++e) {
    const int64_t own = std::min<int64_t>(sizes.data[e], count - row);
    if (own <= 0) continue;
    parts.push_back({first + e * per_matrix, row, row + own});
    row += own;
  }
  product(rows, parts, out.data, width);
  std::fill(out.data + row * width, out.data + count * width, 0.0f);
  return nullptr;
}

}  // namespace

// Weights [width, runs, run] as tiles; codes that fill up the last tile and the ends of runs are zero.
void pack_tile(const float* weights, int64_t width, int64_t runs, int64_t run, int64_t tile, TileGroup* to) {
  const int64_t per_run = ceil_div(run, kGroup);
  for (int64_t c = 0; c < kTile; ++c) {
    const int64_t channel = tile * kTile + c;
    for (int64_t g = 0; g < runs * per_run; ++g) {
      int8_t codes[kGroup] = {};
      const int64_t at = g % per_run * kGroup;
      to[g].scales[c] = 0.0f;
      if (channel < width) {
        const float* from = weights + (channel * runs + g / per_run) * run + at;
        to[g].scales[c] = quantize(from, std::min(kGroup, run - at), codes);
      }
      for (int64_t i = 0; i < kGroup; ++i) to[g].codes[i / 4][c][i % 4] = codes[i];
    }
  }
}

}  // namespace quire

QUIRE_OPERATION(quire_int8_product, quire::Int8Product)
QUIRE_OPERATION(quire_int8_gated_product, quire::Int8GatedProduct)
QUIRE_OPERATION(quire_int8_grouped_product, quire::Int8GroupedProduct, "gated")

extern "C" bool quire_int8_is_fast() {
#if defined(QUIRE_NEON) || defined(QUIRE_VNNI) || defined(QUIRE_AVX2)
  return true;
#else
  return false;
#endif
}

// Called while weights are loaded.
extern "C" void quire_int8_pack(const float* weights, int64_t width, int64_t runs, int64_t run, int8_t* tiles) {
  using namespace quire;
  const int64_t groups = runs * ceil_div(run, kGroup);
  auto* to = reinterpret_cast<TileGroup*>(tiles);
  Crew::instance().run(ceil_div(width, kTile), [&](int64_t tile) {
    pack_tile(weights, width, runs, run, tile, to + tile * groups);
  });
}
