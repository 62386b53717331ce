// SPDX-License-Identifier: Apache-2.0
// A sealed file: payload, JSON manifest, and a footer whose SHA-256 covers both (docs/ARTIFACT.md, "The seal").
#ifndef CONVGRAD_SRC_SEAL_H_
#define CONVGRAD_SRC_SEAL_H_

#include <cstdint>
#include <string>
#include <vector>

namespace convgrad {

// What a sealed file is: its magic (8 bytes), and how messages call it and its maker. All have format version 1.
struct Kind {
  const char* magic;
  const char* noun;
  const char* maker;
};

extern const Kind kArtifact;
extern const Kind kCheckpoint;

struct Sealed {
  std::string manifest;      // UTF-8 JSON
  std::string id;            // the digest in hex
  std::uint64_t payload = 0;  // bytes
};

// Checks the file at `path` from end to end; nothing in it is executed. The payload is read into `payload` if given.
Sealed Unseal(const Kind& kind, const std::string& path, std::vector<char>* payload = nullptr);

// Writes a sealed file so that a crash at any moment leaves the old file or the new one, never a part.
void WriteSealed(const Kind& kind, const std::string& path, const std::vector<char>& payload,
                 const std::string& manifest);

}  // namespace convgrad

#endif  // CONVGRAD_SRC_SEAL_H_
