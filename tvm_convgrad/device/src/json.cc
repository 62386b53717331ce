// SPDX-License-Identifier: Apache-2.0
#include "json.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include "failure.h"
#include "runtime.h"

namespace convgrad {
namespace {

constexpr int kDeepest = 64;  // tvm-ffi's parser calls itself for each level, and the stack ends

int DepthOf(const std::string& text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

Json Json::Parse(const std::string& text, const std::string& subject) {
  if (DepthOf(text) > kDeepest) throw Failure(subject + " whose manifest is nested too deeply; make it again.");
  ffi::Any value;
  try {
    value = Call(Global("ffi.json.Parse"), {ffi::String(text)}, "the manifest");
  } catch (const Failure&) {
    throw Failure(subject + " whose manifest is not JSON; make it again.");
  }
  if (!value.as<ffi::Map<ffi::Any, ffi::Any>>()) {
    throw Failure(subject + " whose manifest is not a JSON object; make it again.");
  }
  return Json(std::move(value), subject, "");
}

void Json::Refuse(const std::string& what) const {
  throw Failure(subject_ + " whose manifest does not describe one (" + (place_.empty() ? "it" : place_) + " " + what +
                "); make it again.");
}

bool Json::Has(const char* key) const {
  const auto object = value_.as<ffi::Map<ffi::Any, ffi::Any>>();
  return object && object->count(ffi::String(key)) != 0;
}

Json Json::At(const char* key) const {
  const auto object = value_.as<ffi::Map<ffi::Any, ffi::Any>>();
  if (!object) Refuse("is not an object");
  if (object->count(ffi::String(key)) == 0) Refuse("has no " + std::string(key));
  return Json((*object)[ffi::String(key)], subject_, place_.empty() ? key : place_ + "." + key);
}

std::vector<Json> Json::Items() const {
  const auto array = value_.as<ffi::Array<ffi::Any>>();
  if (!array) Refuse("is not a list");
  std::vector<Json> items;
  for (const ffi::Any& each : *array) {
    items.push_back(Json(each, subject_, place_ + "[" + std::to_string(items.size()) + "]"));
  }
  return items;
}

std::string Json::Text() const {
  const auto text = value_.as<ffi::String>();
  if (!text) Refuse("is not a string");
  return *text;
}

std::int64_t Json::Integer() const {
  if (!IsInteger()) Refuse("is not an integer");
  return value_.cast<std::int64_t>();
}

double Json::Number() const {
  if (!IsNumber()) Refuse("is not a number");
  return IsInteger() ? static_cast<double>(value_.cast<std::int64_t>()) : value_.cast<double>();
}

bool Json::IsInteger() const { return value_.type_index() == kTVMFFIInt; }
bool Json::IsText() const { return value_.as<ffi::String>().has_value(); }
bool Json::IsNumber() const { return IsInteger() || value_.type_index() == kTVMFFIFloat; }
bool Json::IsNull() const { return value_.type_index() == kTVMFFINone; }

std::string Written(const ffi::Any& value) {
  return Call(Global("ffi.json.Stringify"), {value, ffi::AnyView(nullptr)}, "the manifest").cast<ffi::String>();
}

}  // namespace convgrad
