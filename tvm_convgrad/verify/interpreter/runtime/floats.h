// SPDX-License-Identifier: Apache-2.0
// 16-bit floats by their bits, rounded to nearest even.
#ifndef CONVGRAD_INTERPRETER_FLOATS_H_
#define CONVGRAD_INTERPRETER_FLOATS_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace convgrad {

template <typename To, typename From>
To BitsAs(From value) {
  static_assert(sizeof(To) == sizeof(From), "one size");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

inline float FromBfloat16(uint16_t bits) { return BitsAs<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t ToBfloat16(float value) {
  uint32_t bits = BitsAs<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float WithoutDenormals(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0F, value) : value;
}

/*! \brief A sum plus the dot product of two words of two bfloat16, whose denormals are taken as zero. */
inline float DotProduct(float sum, float a, float b) {
  uint32_t first = BitsAs<uint32_t>(a), second = BitsAs<uint32_t>(b);
  auto half = [](uint32_t bits) { return WithoutDenormals(BitsAs<float>(bits)); };
  sum = std::fma(half(first & 0xFFFF0000U), half(second & 0xFFFF0000U), sum);
  return std::fma(half(first << 16), half(second << 16), sum);
}

inline float FromFloat16(uint16_t bits) {
  int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                    : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                    : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

/*! \brief A sum plus the dot product of two words of two float16. */
inline float HalfDotProduct(float sum, float a, float b) {
  uint32_t first = BitsAs<uint32_t>(a), second = BitsAs<uint32_t>(b);
  auto half = [](uint32_t bits) { return FromFloat16(static_cast<uint16_t>(bits)); };
  sum = std::fma(half(first >> 16), half(second >> 16), sum);
  return std::fma(half(first), half(second), sum);
}

inline uint16_t ToFloat16(double value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  double magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (magnitude >= 65520.0) return sign | 0x7C00;
  if (magnitude < 0x1p-14) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24));
  int exponent;
  double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  auto mantissa = static_cast<int>(std::nearbyint(std::ldexp(fraction, 11)));  // 1024 to 2048
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + (mantissa - 1024));
}

}  // namespace convgrad

#endif  // CONVGRAD_INTERPRETER_FLOATS_H_
