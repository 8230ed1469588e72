// Prints the byte offset of every element of a tile in the 128-byte swizzle, row by row.
#include <cstdio>

#include "fi/cuda/swizzle.cuh"

int main() {
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 128; ++column) std::printf("%d\n", fi::SwizzledTile<short, 16>::offset(row, column));
}
