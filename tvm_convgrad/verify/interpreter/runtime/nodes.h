// SPDX-License-Identifier: Apache-2.0
// Reads fields of TVM's IR nodes by name, through the reflection of tvm-ffi: TVM's wheel ships no headers of its IR.
#ifndef CONVGRAD_INTERPRETER_NODES_H_
#define CONVGRAD_INTERPRETER_NODES_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/reflection/accessor.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace convgrad {

namespace ffi = tvm::ffi;

/*! \brief The last part of a node's type key: "Add" of "prim.Add". */
inline const std::string& KindOf(const ffi::Object* node) {
  static auto& names = *new std::unordered_map<int32_t, std::string>;
  auto [place, fresh] = names.try_emplace(node->type_index());
  if (fresh) {
    std::string key = node->GetTypeKey();
    place->second = key.substr(key.rfind('.') + 1);
  }
  return place->second;
}

/*! \brief A field of a node; nullptr if its type has none of this name. */
inline const TVMFFIFieldInfo* FindField(const ffi::Object* node, std::string_view name) {
  using Fields = std::unordered_map<std::string_view, const TVMFFIFieldInfo*>;
  static auto& types = *new std::unordered_map<int32_t, Fields>;
  auto [place, fresh] = types.try_emplace(node->type_index());
  if (fresh) {
    ffi::reflection::ForEachFieldInfo(TVMFFIGetTypeInfo(node->type_index()), [&](const TVMFFIFieldInfo* field) {
      place->second[std::string_view(field->name.data, field->name.size)] = field;
    });
  }
  auto found = place->second.find(name);
  return found == place->second.end() ? nullptr : found->second;
}

inline ffi::Any Field(const ffi::Object* node, std::string_view name) {
  const TVMFFIFieldInfo* field = FindField(node, name);
  if (field == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "the interpreter knows no field " << std::string(name) << " of " << KindOf(node);
  }
  return ffi::reflection::FieldGetter(field)(node);
}

/*! \brief A field that is a node; nullptr if it is None. The node lives as long as the one that has it. */
inline const ffi::Object* Child(const ffi::Object* node, std::string_view name) {
  ffi::Any value = Field(node, name);
  return value == nullptr ? nullptr : value.cast<ffi::ObjectRef>().get();
}

inline std::vector<const ffi::Object*> Children(const ffi::Object* node, std::string_view name) {
  std::vector<const ffi::Object*> found;
  for (const ffi::Any& each : Field(node, name).cast<ffi::Array<ffi::Any>>()) {
    found.push_back(each.cast<ffi::ObjectRef>().get());
  }
  return found;
}

inline int64_t IntField(const ffi::Object* node, std::string_view name) { return Field(node, name).cast<int64_t>(); }

inline std::string TextField(const ffi::Object* node, std::string_view name) {
  return std::string(Field(node, name).cast<ffi::String>());
}

/*! \brief The element type of an expression. */
inline DLDataType DTypeOf(const ffi::Object* expression) {
  const ffi::Object* type = Child(expression, "ty");
  const TVMFFIFieldInfo* field = FindField(type, "dtype");
  if (field == nullptr) return DLDataType{kDLOpaqueHandle, 64, 1};  // of a call that gives nothing
  return ffi::reflection::FieldGetter(field)(type).cast<DLDataType>();
}

}  // namespace convgrad

#endif  // CONVGRAD_INTERPRETER_NODES_H_
