// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4) of bytes that come in pieces.
#ifndef CONVGRAD_SRC_SHA256_H_
#define CONVGRAD_SRC_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace convgrad {

using Digest = std::array<unsigned char, 32>;

class Sha256 {
 public:
  void Update(const void* data, std::size_t bytes);
  // The digest of all that was given; nothing may be given afterwards.
  Digest Finish();

 private:
  void Block(const unsigned char* block);

  std::array<std::uint32_t, 8> hash_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> rest_{};
  std::size_t held_ = 0;  // bytes in rest_
  std::uint64_t total_ = 0;
};

std::string Hex(const Digest& digest);

}  // namespace convgrad

#endif  // CONVGRAD_SRC_SHA256_H_
