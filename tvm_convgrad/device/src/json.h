// SPDX-License-Identifier: Apache-2.0
// A JSON value of a manifest, read by tvm-ffi's parser, with its place in the manifest for messages.
#ifndef CONVGRAD_SRC_JSON_H_
#define CONVGRAD_SRC_JSON_H_

#include <tvm/ffi/any.h>

#include <cstdint>
#include <string>
#include <vector>

namespace convgrad {

namespace ffi = tvm::ffi;

class Json {
 public:
  // The object that a manifest is. Every wrong type that is found in it later is a Failure that begins with `subject`.
  static Json Parse(const std::string& text, const std::string& subject);

  bool Has(const char* key) const;
  Json At(const char* key) const;
  std::vector<Json> Items() const;
  std::string Text() const;
  std::int64_t Integer() const;
  double Number() const;
  bool IsInteger() const;
  bool IsText() const;
  bool IsNumber() const;  // an integer or a float
  bool IsNull() const;
  const ffi::Any& value() const { return value_; }
  [[noreturn]] void Refuse(const std::string& what) const;

 private:
  Json(ffi::Any value, std::string subject, std::string place)
      : value_(std::move(value)), subject_(std::move(subject)), place_(std::move(place)) {}

  ffi::Any value_;
  std::string subject_, place_;
};

// The text of a value.
std::string Written(const ffi::Any& value);

}  // namespace convgrad

#endif  // CONVGRAD_SRC_JSON_H_
