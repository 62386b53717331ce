// SPDX-License-Identifier: Apache-2.0
// The exception inside of the library: a sentence, which api.cc keeps for convgrad_last_error().
#ifndef CONVGRAD_SRC_FAILURE_H_
#define CONVGRAD_SRC_FAILURE_H_

#include <stdexcept>
#include <string>

namespace convgrad {

class Failure : public std::runtime_error {
 public:
  explicit Failure(const std::string& sentence) : std::runtime_error(sentence) {}
};

}  // namespace convgrad

#endif  // CONVGRAD_SRC_FAILURE_H_
