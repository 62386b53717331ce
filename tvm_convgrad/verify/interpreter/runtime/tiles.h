// SPDX-License-Identifier: Apache-2.0
// The tile registers of AMX-BF16 and AMX-FP16. What the hardware refuses is a Fault: registers without a shape, or whose shapes do
// not fit.
#ifndef CONVGRAD_INTERPRETER_TILES_H_
#define CONVGRAD_INTERPRETER_TILES_H_

#include <cstdint>
#include <cstring>
#include <string>

#include "floats.h"

namespace convgrad {

struct Fault {
  std::string text;
};

class Tiles {
 public:
  static constexpr int kConfiguration = 64, kRegisters = 8, kRows = 16, kWords = 16;

  bool configured() const { return shapes_[0] != 0; }

  void Configure(const uint8_t* shapes) {
    std::memcpy(shapes_, shapes, kConfiguration);
    std::memset(values_, 0, sizeof(values_));
    if (shapes_[0] != 1) throw Fault{"tile registers of palette " + std::to_string(shapes_[0])};
    for (int n = 0; n < kRegisters; ++n) {
      const int bytes = Bytes(n), rows = shapes_[48 + n];
      if (bytes > 4 * kWords || bytes % 4 != 0 || rows > kRows || (bytes == 0) != (rows == 0)) {
        throw Fault{"tile register " + std::to_string(n) + " of " + std::to_string(rows) + " rows of " +
                    std::to_string(bytes) + " bytes"};
      }
    }
  }

  void Release() { std::memset(shapes_, 0, kConfiguration); }

  /*! \brief Rows of a register, which must have a shape. */
  int rows(int n) const {
    if (!configured() || shapes_[48 + n] == 0) throw Fault{"tile register " + std::to_string(n) + " has no shape"};
    return shapes_[48 + n];
  }

  int words(int n) const { return Bytes(n) / 4; }

  float* row(int n, int64_t number) { return values_[n] + number * kWords; }

  void Clear(int n) {
    rows(n);
    std::memset(values_[n], 0, sizeof(values_[n]));
  }

  /*! \brief Add the product of registers a and b, of words of two bfloat16 or float16, to c. */
  void Multiply(int c, int a, int b, bool float16) {
    if (rows(c) != rows(a) || words(c) != words(b) || words(a) != rows(b)) {
      throw Fault{"a product of tile registers " + std::to_string(c) + ", " + std::to_string(a) + " and " +
                  std::to_string(b) + ", whose shapes do not fit"};
    }
    for (int m = 0; m < rows(c); ++m) {
      for (int k = 0; k < words(a); ++k) {
        for (int n = 0; n < words(c); ++n) {
          float& sum = row(c, m)[n];
          sum = (float16 ? HalfDotProduct : DotProduct)(sum, row(a, m)[k], row(b, k)[n]);
        }
      }
    }
  }

 private:
  int Bytes(int n) const { return shapes_[16 + 2 * n] | shapes_[17 + 2 * n] << 8; }

  uint8_t shapes_[kConfiguration] = {};
  float values_[kRegisters][kRows * kWords] = {};
};

}  // namespace convgrad

#endif  // CONVGRAD_INTERPRETER_TILES_H_
