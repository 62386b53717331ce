// SPDX-License-Identifier: Apache-2.0
// A checked artifact: its manifest, and that it runs on this machine with these libraries.
#ifndef CONVGRAD_SRC_ARTIFACT_H_
#define CONVGRAD_SRC_ARTIFACT_H_

#include <optional>
#include <string>
#include <vector>

#include "schema.h"

namespace convgrad {

struct Artifact {
  std::string path, id, manifest;
  std::string step;  // the digest of what is trained, for any machine; "" if the manifest has none
  std::vector<Spec> inputs, state;
  std::optional<Spec> target;  // none: an inference library
  Spec prediction;
  double rate = 0;
  bool split = false;

  // Checks the file and reads its manifest; nothing in it is executed.
  static Artifact Read(const std::string& path);
};

}  // namespace convgrad

#endif  // CONVGRAD_SRC_ARTIFACT_H_
