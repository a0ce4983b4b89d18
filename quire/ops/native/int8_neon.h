// Four rows with a tile, on ARM. In assembly, as GCC orders the same intrinsics such that it runs out of registers and
// sums wait for each other: this takes 0.8 of the time on a Neoverse N1.
//
// v0-v7    dots of a group: rows 0 to 3, each with the first and the last four channels of the tile
// v8-v15   sums of all groups so far, in that order
// v16-v23  codes of the rows, each in two halves of a group
// v24-v27  codes of the tile: four inputs at a time, every second time in the other two registers
// v28      scales of the rows; v29 and v30 those of the tile
// v31      kMagicBits, with which dots begin: they become floats by taking kMagic off
//
// What a step multiplies was loaded a step before. The loads of the last group's end read that group once more: behind
// it there may be nothing.

#ifndef QUIRE_INT8_NEON_H_
#define QUIRE_INT8_NEON_H_

#define QUIRE_DOT(row, first, low, high, half, lane)                                \
  "sdot v" #first ".4s, v" #low ".16b, v" #row ".4b[" #lane "]\n"                   \
  "sdot v" #half ".4s, v" #high ".16b, v" #row ".4b[" #lane "]\n"

// Four inputs of four rows, whose codes are in these registers; `load` and `more` bring what comes next.
#define QUIRE_STEP(low, high, r0, r1, r2, r3, lane, load, more) \
  QUIRE_DOT(r0, 0, low, high, 1, lane)                          \
  load                                                          \
  QUIRE_DOT(r1, 2, low, high, 3, lane)                          \
  QUIRE_DOT(r2, 4, low, high, 5, lane)                          \
  more                                                          \
  QUIRE_DOT(r3, 6, low, high, 7, lane)

#define QUIRE_FROM(base, low, high, at) "ldp q" #low ", q" #high ", [%[" #base "], #" #at "]\n"
#define QUIRE_ONE(base, to, at) "ldr q" #to ", [%[" #base "], #" #at "]\n"

// A dot becomes a float and is scaled by its channel's scale, then added times its row's.
#define QUIRE_FLOAT(dot) "fsub v" #dot ".4s, v" #dot ".4s, v31.4s\n"
#define QUIRE_SCALE(dot, scale) "fmul v" #dot ".4s, v" #dot ".4s, v" #scale ".4s\n"
#define QUIRE_ADD(sum, dot, row) "fmla v" #sum ".4s, v" #dot ".4s, v28.s[" #row "]\n"

namespace quire {

inline void multiply_four(const RowGroup* rows, const TileGroup* tile, int64_t groups, float* out, int64_t stride) {
  static_assert(sizeof(RowGroup) == 160 && sizeof(TileGroup) == 288, "the offsets below");
  alignas(32) static const int32_t magic[8] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits,
                                               kMagicBits, kMagicBits, kMagicBits, kMagicBits};
  if (groups == 0) {
    for (int r = 0; r < 4; ++r) std::memset(out + r * stride, 0, kTile * sizeof(float));
    return;
  }
  const RowGroup* next_rows = rows;
  const TileGroup* next_tile = tile;
  asm volatile(
      QUIRE_ONE(magic, 31, 0)
      QUIRE_FROM(magic, 0, 1, 0) QUIRE_FROM(magic, 2, 3, 0) QUIRE_FROM(magic, 4, 5, 0) QUIRE_FROM(magic, 6, 7, 0)
      "movi v8.2d, #0\n movi v9.2d, #0\n movi v10.2d, #0\n movi v11.2d, #0\n"
      "movi v12.2d, #0\n movi v13.2d, #0\n movi v14.2d, #0\n movi v15.2d, #0\n"
      QUIRE_FROM(tile, 24, 25, 0)
      QUIRE_ONE(rows, 16, 0) QUIRE_ONE(rows, 18, 32) QUIRE_ONE(rows, 20, 64) QUIRE_ONE(rows, 22, 96)
      "1:\n"
      "subs %[groups], %[groups], #1\n"
      "add %[next_rows], %[rows], #160\n"
      "add %[next_tile], %[tile], #288\n"
      "csel %[next_rows], %[rows], %[next_rows], eq\n"
      "csel %[next_tile], %[tile], %[next_tile], eq\n"
      QUIRE_STEP(24, 25, 16, 18, 20, 22, 0, QUIRE_FROM(tile, 26, 27, 32), QUIRE_ONE(rows, 17, 16))
      QUIRE_STEP(26, 27, 16, 18, 20, 22, 1, QUIRE_FROM(tile, 24, 25, 64), QUIRE_ONE(rows, 19, 48))
      QUIRE_STEP(24, 25, 16, 18, 20, 22, 2, QUIRE_FROM(tile, 26, 27, 96), QUIRE_ONE(rows, 21, 80))
      QUIRE_STEP(26, 27, 16, 18, 20, 22, 3, QUIRE_FROM(tile, 24, 25, 128), QUIRE_ONE(rows, 23, 112))
      QUIRE_STEP(24, 25, 17, 19, 21, 23, 0, QUIRE_FROM(tile, 26, 27, 160), QUIRE_ONE(next_rows, 16, 0))
      QUIRE_STEP(26, 27, 17, 19, 21, 23, 1, QUIRE_FROM(tile, 24, 25, 192),
                 QUIRE_ONE(next_rows, 18, 32) QUIRE_FROM(tile, 29, 30, 256))
      QUIRE_STEP(24, 25, 17, 19, 21, 23, 2, QUIRE_FROM(tile, 26, 27, 224),
                 QUIRE_ONE(next_rows, 20, 64) QUIRE_ONE(rows, 28, 128))
      QUIRE_STEP(26, 27, 17, 19, 21, 23, 3, QUIRE_FROM(next_tile, 24, 25, 0), QUIRE_ONE(next_rows, 22, 96))
      "mov %[rows], %[next_rows]\n"
      "mov %[tile], %[next_tile]\n"
      QUIRE_FLOAT(0) QUIRE_FLOAT(1) QUIRE_FLOAT(2) QUIRE_FLOAT(3)
      QUIRE_FLOAT(4) QUIRE_FLOAT(5) QUIRE_FLOAT(6) QUIRE_FLOAT(7)
      QUIRE_SCALE(0, 29) QUIRE_SCALE(1, 30) QUIRE_SCALE(2, 29) QUIRE_SCALE(3, 30)
      QUIRE_SCALE(4, 29) QUIRE_SCALE(5, 30) QUIRE_SCALE(6, 29) QUIRE_SCALE(7, 30)
      QUIRE_ADD(8, 0, 0) QUIRE_ADD(9, 1, 0) QUIRE_FROM(magic, 0, 1, 0)
      QUIRE_ADD(10, 2, 1) QUIRE_ADD(11, 3, 1) QUIRE_FROM(magic, 2, 3, 0)
      QUIRE_ADD(12, 4, 2) QUIRE_ADD(13, 5, 2) QUIRE_FROM(magic, 4, 5, 0)
      QUIRE_ADD(14, 6, 3) QUIRE_ADD(15, 7, 3) QUIRE_FROM(magic, 6, 7, 0)
      "cbnz %[groups], 1b\n"
      "stp q8, q9, [%[out]]\n"
      "add %[out], %[out], %[stride], lsl #2\n"
      "stp q10, q11, [%[out]]\n"
      "add %[out], %[out], %[stride], lsl #2\n"
      "stp q12, q13, [%[out]]\n"
      "add %[out], %[out], %[stride], lsl #2\n"
      "stp q14, q15, [%[out]]\n"
      : [rows] "+&r"(rows), [tile] "+&r"(tile), [groups] "+&r"(groups), [out] "+&r"(out),
        [next_rows] "+&r"(next_rows), [next_tile] "+&r"(next_tile)
      : [stride] "r"(stride), [magic] "r"(magic)
      : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",
        "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30",
        "v31");
}

}  // namespace quire

#undef QUIRE_DOT
#undef QUIRE_STEP
#undef QUIRE_FROM
#undef QUIRE_ONE
#undef QUIRE_FLOAT
#undef QUIRE_SCALE
#undef QUIRE_ADD

#endif  // QUIRE_INT8_NEON_H_
