// SPDX-License-Identifier: Apache-2.0
#include "sha256.h"

#include <algorithm>
#include <cstring>

namespace convgrad {
namespace {

constexpr std::uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t Rotated(std::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

}  // namespace

void Sha256::Block(const unsigned char* block) {
  std::uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = std::uint32_t{block[4 * i]} << 24 | std::uint32_t{block[4 * i + 1]} << 16 |
           std::uint32_t{block[4 * i + 2]} << 8 | std::uint32_t{block[4 * i + 3]};
  }
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t s0 = Rotated(w[i - 15], 7) ^ Rotated(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = Rotated(w[i - 2], 17) ^ Rotated(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = hash_;
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t s1 = Rotated(e, 6) ^ Rotated(e, 11) ^ Rotated(e, 25);
    const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    const std::uint32_t s0 = Rotated(a, 2) ^ Rotated(a, 13) ^ Rotated(a, 22);
    const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::uint32_t more[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) hash_[i] += more[i];
}

void Sha256::Update(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  total_ += bytes;
  while (bytes > 0) {
    if (held_ == 0 && bytes >= rest_.size()) {
      Block(from);
      from += rest_.size(), bytes -= rest_.size();
      continue;
    }
    const std::size_t taken = std::min(bytes, rest_.size() - held_);
    std::memcpy(rest_.data() + held_, from, taken);
    held_ += taken, from += taken, bytes -= taken;
    if (held_ == rest_.size()) {
      Block(rest_.data());
      held_ = 0;
    }
  }
}

Digest Sha256::Finish() {
  const std::uint64_t bits = total_ * 8;
  const unsigned char one = 0x80, zero = 0;
  Update(&one, 1);
  while (held_ != 56) Update(&zero, 1);
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
  Update(length, 8);
  Digest digest;
  for (int i = 0; i < 32; ++i) digest[i] = static_cast<unsigned char>(hash_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

std::string Hex(const Digest& digest) {
  std::string text;
  for (unsigned char byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace convgrad
