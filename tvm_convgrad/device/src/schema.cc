// SPDX-License-Identifier: Apache-2.0
#include "schema.h"

#include <algorithm>
#include <limits>
#include <type_traits>

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

// The number of the first element that is out of range, or the number of elements.
template <typename T>
std::size_t FirstOutside(const Range& range, const T* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const T value = values[i];
    if constexpr (std::is_unsigned_v<T>) {  // what is beyond int64 is beyond any range
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return i;
    }
    const auto number = static_cast<std::int64_t>(value);
    if (number >= range.low && number <= range.high) continue;
    if (std::find(range.others.begin(), range.others.end(), number) == range.others.end()) return i;
  }
  return count;
}

// The place of an element, such as " at [3, 17]"; "" in a tensor without axes.
std::string PlaceOf(std::size_t number, const std::vector<std::int64_t>& extents) {
  std::string text;
  for (std::size_t axis = extents.size(); axis-- > 0;) {
    const auto extent = static_cast<std::size_t>(extents[axis]);
    text = std::to_string(number % extent) + (text.empty() ? "" : ", ") + text;
    number /= extent;
  }
  return text.empty() ? "" : " at [" + text + "]";
}

template <typename T>
void CheckAs(const Range& range, const void* data, const std::vector<std::int64_t>& extents, const std::string& what) {
  const T* values = static_cast<const T*>(data);
  std::size_t count = 1;
  for (std::int64_t extent : extents) count *= static_cast<std::size_t>(extent);
  const std::size_t first = FirstOutside(range, values, count);
  if (first == count) return;
  const std::string value = std::to_string(values[first]);
  // A label that may be meant as one without a loss.
  const bool unused =
      range.kind == "classes" && range.others.empty() && (value == "-100" || value == "-1" || value == "255");
  throw Failure(what + " has the value " + value + PlaceOf(first, extents) +
                ", which is out of range; the model takes it as " + range.Shown() +
                (unused ? "; build with --ignore-index " + value + " if it marks what has no loss" : "") + ".");
}

}  // namespace

Range Range::Of(const Json& entry) {
  Range range;
  range.low = entry.At("low").Integer();
  range.high = entry.At("high").Integer();
  if (entry.Has("kind")) range.kind = entry.At("kind").Text();
  if (entry.Has("others")) {
    for (const Json& value : entry.At("others").Items()) range.others.push_back(value.Integer());
  }
  return range;
}

std::string Range::Shown() const {
  const std::string count = std::to_string(static_cast<std::uint64_t>(high) + 1);
  std::string values = std::to_string(low) + " to " + std::to_string(high);
  for (std::int64_t value : others) values += ", or " + std::to_string(value);
  if (kind == "rows") return "an index of " + count + " rows (" + values + ")";
  if (kind == "classes") return "one of " + count + " classes (" + values + ")";
  return "a value from " + values;
}

void Range::Check(const void* data, DLDataType type, const std::vector<std::int64_t>& extents,
                  const std::string& what) const {
  if (type.code == kDLInt) {
    return type.bits == 64   ? CheckAs<std::int64_t>(*this, data, extents, what)
           : type.bits == 32 ? CheckAs<std::int32_t>(*this, data, extents, what)
           : type.bits == 16 ? CheckAs<std::int16_t>(*this, data, extents, what)
                             : CheckAs<std::int8_t>(*this, data, extents, what);
  }
  return type.bits == 64   ? CheckAs<std::uint64_t>(*this, data, extents, what)
         : type.bits == 32 ? CheckAs<std::uint32_t>(*this, data, extents, what)
         : type.bits == 16 ? CheckAs<std::uint16_t>(*this, data, extents, what)
                           : CheckAs<std::uint8_t>(*this, data, extents, what);
}

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
  if (entry.Has("range")) {
    if (spec.type.code != kDLInt && spec.type.code != kDLUInt) entry.At("range").Refuse("is not of integers");
    spec.range = Range::Of(entry.At("range"));
  }
  if (entry.Has("least")) spec.least = entry.At("least").Integer();
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
  for (const std::string& symbol : spec.symbols) {
    if (symbol.empty() || !entry.Has("limits") || !entry.At("limits").Has(symbol.c_str())) continue;
    const auto pair = entry.At("limits").At(symbol.c_str()).Items();
    if (pair.size() != 2) entry.At("limits").Refuse("has no pair for " + symbol);
    spec.limits[symbol] = {pair[0].Integer(), pair[1].Integer()};
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
    const auto stated = limits.find(symbols[open]);
    if (stated != limits.end() &&
        (extents[open] < stated->second.first || extents[open] > stated->second.second)) {
      const auto [low, high] = stated->second;
      const bool is_open = high == std::numeric_limits<std::int32_t>::max();
      throw Failure(what + " has extent " + std::to_string(extents[open]) + " on axis " + std::to_string(open) +
                    ", but the model was exported for " +
                    (is_open ? "at least " + std::to_string(low) : std::to_string(low) + " to " + std::to_string(high)) +
                    " there, and relies on it.");
    }
    (*known)[symbols[open]] = extents[open];
  } else if (bytes != least || open < shape.size()) {
    throw Failure(what + " has " + std::to_string(bytes) + " bytes, but " + name + " of the model is " + Shown() + ", " +
                  (open < shape.size() ? "a multiple of " : "") + std::to_string(least) + " bytes.");
  }
  return extents;
}

}  // namespace convgrad
