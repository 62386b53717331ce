// SPDX-License-Identifier: Apache-2.0
#include "schema.h"

#include <limits>

#include "failure.h"

namespace convgrad {
namespace {

struct Element {
  const char* name;
  DLDataType type;
};

constexpr Element kElements[] = {
    {"float32", {kDLFloat, 32, 1}}, {"float16", {kDLFloat, 16, 1}}, {"bfloat16", {kDLBfloat, 16, 1}},
    {"float64", {kDLFloat, 64, 1}}, {"int64", {kDLInt, 64, 1}},     {"int32", {kDLInt, 32, 1}},
    {"int16", {kDLInt, 16, 1}},     {"int8", {kDLInt, 8, 1}},       {"uint8", {kDLUInt, 8, 1}},
    {"uint16", {kDLUInt, 16, 1}},   {"uint32", {kDLUInt, 32, 1}},   {"uint64", {kDLUInt, 64, 1}},
    {"bool", {kDLBool, 8, 1}},
};

}  // namespace

std::size_t BytesFor(const std::vector<std::int64_t>& shape, DLDataType type) {
  std::size_t bytes = type.bits / 8;
  for (std::int64_t extent : shape) {
    const auto factor = static_cast<std::size_t>(extent);
    if (extent < 0 || (factor != 0 && bytes > std::numeric_limits<std::int64_t>::max() / factor)) {
      throw Failure("a tensor has an extent that is negative or too large; the file that describes it is damaged.");
    }
    bytes *= factor;
  }
  return bytes;
}

Spec Spec::Of(const Json& entry) {
  Spec spec;
  spec.name = entry.At("name").Text();
  spec.dtype = entry.At("dtype").Text();
  spec.role = entry.Has("role") ? entry.At("role").Text() : "";
  bool found = false;
  for (const Element& element : kElements) {
    if (spec.dtype == element.name) spec.type = element.type, found = true;
  }
  if (!found) entry.At("dtype").Refuse("is an unknown element type");
  std::vector<std::int64_t> known;
  for (const Json& extent : entry.At("shape").Items()) {
    if (extent.IsText()) {
      spec.shape.push_back(kFree);
      spec.symbols.push_back(extent.Text());
      continue;
    }
    if (extent.Integer() < 0) extent.Refuse("is negative");
    spec.shape.push_back(extent.Integer());
    spec.symbols.push_back("");
    known.push_back(extent.Integer());
  }
  BytesFor(known, spec.type);
  return spec;
}

std::string Spec::Shown() const {
  std::string text = dtype + "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + (shape[i] == kFree ? symbols[i] : std::to_string(shape[i]));
  }
  return text + "]";
}

std::vector<std::int64_t> Spec::Accept(std::size_t bytes, std::map<std::string, std::int64_t>* known,
                                       const std::string& what) const {
  std::vector<std::int64_t> extents = shape;
  std::size_t open = shape.size();
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != kFree) continue;
    const auto found = known->find(symbols[i]);
    if (found != known->end()) {
      extents[i] = found->second;
    } else if (open == shape.size()) {
      open = i;
      extents[i] = 1;
    } else {
      throw Failure(what + " has two free extents, " + Shown() + "; build with a fixed one.");
    }
  }
  const std::size_t least = BytesFor(extents, type);
  if (open < shape.size() && least > 0 && bytes % least == 0 && bytes > 0) {
    extents[open] = static_cast<std::int64_t>(bytes / least);
    (*known)[symbols[open]] = extents[open];
  } else if (bytes != least || open < shape.size()) {
    throw Failure(what + " has " + std::to_string(bytes) + " bytes, but " + name + " of the model is " + Shown() + ", " +
                  (open < shape.size() ? "a multiple of " : "") + std::to_string(least) + " bytes.");
  }
  return extents;
}

}  // namespace convgrad
