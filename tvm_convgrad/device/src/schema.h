// SPDX-License-Identifier: Apache-2.0
// The tensors of a library as its manifest names them, and the check of what is to be fed to it.
#ifndef CONVGRAD_SRC_SCHEMA_H_
#define CONVGRAD_SRC_SCHEMA_H_

#include <dlpack/dlpack.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "json.h"

namespace convgrad {

constexpr std::int64_t kFree = -1;  // an extent that follows from what is given

// The integers that the model takes in a tensor because it uses them as indices: from `low` to `high`, and `others`.
struct Range {
  std::int64_t low = 0, high = 0;
  std::string kind;  // what they number: "rows", "classes" or anything else
  std::vector<std::int64_t> others;

  static Range Of(const Json& entry);
  std::string Shown() const;  // such as: an index of 10 rows (-10 to 9)

  // A Failure if an integer of an array of this type and these extents is out of range.
  void Check(const void* data, DLDataType type, const std::vector<std::int64_t>& extents,
             const std::string& what) const;
};

struct Spec {
  std::string name, dtype, role;
  std::vector<std::int64_t> shape;
  std::vector<std::string> symbols;  // the name of each free extent, "" for others
  DLDataType type;
  std::optional<Range> range;
  std::int64_t least = 1;  // the least extent of the first axis that a training step takes
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> limits;  // of free extents that the model relies on

  static Spec Of(const Json& entry);
  std::string Shown() const;  // such as float32[n, 3, 8, 8]

  // The extents of an array of so many bytes; the values of free extents are looked up and kept in `known`.
  std::vector<std::int64_t> Accept(std::size_t bytes, std::map<std::string, std::int64_t>* known,
                                   const std::string& what) const;
};

// The bytes of a tensor; a Failure if they overflow.
std::size_t BytesFor(const std::vector<std::int64_t>& shape, DLDataType type);

}  // namespace convgrad

#endif  // CONVGRAD_SRC_SCHEMA_H_
