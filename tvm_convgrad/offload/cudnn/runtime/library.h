// SPDX-License-Identifier: Apache-2.0
// libcudnn.so.9, opened when it is first needed: a copy that the process has already (PyTorch's) is shared. Descriptors
// of its backend API with their attributes, destroyed by scope.
#pragma once

#include <cudnn_graph.h>
#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "host.h"

namespace convgrad {

/*! \brief The functions that are called. */
class Library {
 public:
  static const Library& Get() {
    static const Library library;
    return library;
  }

#define CONVGRAD_CUDNN(F)                                                                                    \
  F(cudnnGetVersion)                                                                                         \
  F(cudnnGetErrorString)                                                                                     \
  F(cudnnGetLastErrorString)                                                                                 \
  F(cudnnCreate)                                                                                             \
  F(cudnnSetStream)                                                                                          \
  F(cudnnBackendCreateDescriptor)                                                                            \
  F(cudnnBackendDestroyDescriptor)                                                                           \
  F(cudnnBackendFinalize)                                                                                    \
  F(cudnnBackendSetAttribute)                                                                                \
  F(cudnnBackendGetAttribute)                                                                                \
  F(cudnnBackendExecute)
#define CONVGRAD_DECLARE(name) decltype(&::name) name = nullptr;
  CONVGRAD_CUDNN(CONVGRAD_DECLARE)
#undef CONVGRAD_DECLARE

  /*! \brief What cuDNN says of a status that is not success, and of the last call on this thread. */
  std::string Reason(cudnnStatus_t status) const {
    char text[512] = {0};
    cudnnGetLastErrorString(text, sizeof(text));
    std::string said = cudnnGetErrorString(status);
    if (text[0] != 0) said += std::string(": ") + text;
    for (char& each : said) {
      if (each == '\n' || each == '|') each = ' ';
    }
    return said;
  }

 private:
  Library() {
    void* opened = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) {
      CONVGRAD_THROW(RuntimeError) << "cudnn: libcudnn.so.9 cannot be loaded (" << dlerror()
                                  << "); pip install 'tvm-convgrad[cuda]' brings it";
    }
#define CONVGRAD_FIND(name) name = Find<decltype(&::name)>(opened, #name);
    CONVGRAD_CUDNN(CONVGRAD_FIND)
#undef CONVGRAD_FIND
  }

  template <typename T>
  static T Find(void* opened, const char* name) {
    void* found = dlsym(opened, name);
    if (found == nullptr) CONVGRAD_THROW(RuntimeError) << "cudnn: libcudnn.so.9 lacks " << name << "; it must be 9.11 or newer";
    return reinterpret_cast<T>(found);
  }
};

inline void Check(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS) {
    CONVGRAD_THROW(ValueError) << "cudnn: " << what << ": " << Library::Get().Reason(status);
  }
}

/*! \brief The type by which the backend API takes values of a C++ type. */
template <typename T>
constexpr cudnnBackendAttributeType_t TypeOf();
template <>
constexpr cudnnBackendAttributeType_t TypeOf<int64_t>() { return CUDNN_TYPE_INT64; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<float>() { return CUDNN_TYPE_FLOAT; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<double>() { return CUDNN_TYPE_DOUBLE; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<bool>() { return CUDNN_TYPE_BOOLEAN; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<char>() { return CUDNN_TYPE_CHAR; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<void*>() { return CUDNN_TYPE_VOID_PTR; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<cudnnHandle_t>() { return CUDNN_TYPE_HANDLE; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<cudnnDataType_t>() { return CUDNN_TYPE_DATA_TYPE; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<cudnnConvolutionMode_t>() { return CUDNN_TYPE_CONVOLUTION_MODE; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<cudnnBackendHeurMode_t>() { return CUDNN_TYPE_HEUR_MODE; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<cudnnPointwiseMode_t>() { return CUDNN_TYPE_POINTWISE_MODE; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<cudnnBackendKnobType_t>() { return CUDNN_TYPE_KNOB_TYPE; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<cudnnBackendNumericalNote_t>() { return CUDNN_TYPE_NUMERICAL_NOTE; }
template <>
constexpr cudnnBackendAttributeType_t TypeOf<cudnnBackendBehaviorNote_t>() { return CUDNN_TYPE_BEHAVIOR_NOTE; }

/*! \brief A descriptor of the backend API. */
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    Check(Library::Get().cudnnBackendCreateDescriptor(type, &raw_), "a descriptor cannot be made");
  }
  ~Descriptor() {
    if (raw_ != nullptr) Library::Get().cudnnBackendDestroyDescriptor(raw_);
  }
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }

  cudnnBackendDescriptor_t raw() const { return raw_; }

  template <typename T>
  Descriptor& Set(cudnnBackendAttributeName_t name, const T& value) {
    return SetArray(name, &value, 1);
  }
  Descriptor& Set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return SetArray(name, std::vector<cudnnBackendDescriptor_t>{value.raw_});
  }
  Descriptor& Set(cudnnBackendAttributeName_t name, const std::vector<int64_t>& values) {
    return SetArray(name, values.data(), values.size());
  }
  Descriptor& SetArray(cudnnBackendAttributeName_t name, const std::vector<cudnnBackendDescriptor_t>& values) {
    Check(Library::Get().cudnnBackendSetAttribute(raw_, name, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                                  static_cast<int64_t>(values.size()), values.data()),
          "an attribute cannot be set");
    return *this;
  }
  template <typename T>
  Descriptor& SetArray(cudnnBackendAttributeName_t name, const T* values, size_t count) {
    Check(Library::Get().cudnnBackendSetAttribute(raw_, name, TypeOf<T>(), static_cast<int64_t>(count), values),
          "an attribute cannot be set");
    return *this;
  }

  /*! \brief Finish; a status that is not success is the caller's to judge. */
  cudnnStatus_t Finalize() { return Library::Get().cudnnBackendFinalize(raw_); }
  Descriptor&& Finished(const char* what) {
    Check(Finalize(), what);
    return std::move(*this);
  }

  template <typename T>
  T Value(cudnnBackendAttributeName_t name) const {
    T value{};
    int64_t count = 0;
    Check(Library::Get().cudnnBackendGetAttribute(raw_, name, TypeOf<T>(), 1, &count, &value),
          "an attribute cannot be read");
    return value;
  }
  /*! \brief All values of an attribute of at most `most`. */
  template <typename T>
  std::vector<T> Values(cudnnBackendAttributeName_t name, int64_t most) const {
    std::vector<T> values(static_cast<size_t>(most));
    int64_t count = 0;
    Check(Library::Get().cudnnBackendGetAttribute(raw_, name, TypeOf<T>(), most, &count, values.data()),
          "an attribute cannot be read");
    values.resize(static_cast<size_t>(std::min(count, most)));
    return values;
  }
  /*! \brief Descriptors that an attribute holds: made here, filled by the library. */
  std::vector<Descriptor> Descriptors(cudnnBackendAttributeName_t name, cudnnBackendDescriptorType_t type,
                                      int64_t most) const {
    std::vector<Descriptor> made;
    std::vector<cudnnBackendDescriptor_t> raw;
    for (int64_t i = 0; i < most; ++i) {
      made.emplace_back(type);
      raw.push_back(made.back().raw_);
    }
    int64_t count = 0;
    Check(Library::Get().cudnnBackendGetAttribute(raw_, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, most, &count, raw.data()),
          "descriptors cannot be read");
    made.erase(made.begin() + std::min(count, most), made.end());
    return made;
  }
  /*! \brief How many descriptors an attribute holds. */
  int64_t Count(cudnnBackendAttributeName_t name) const {
    int64_t count = 0;
    Check(Library::Get().cudnnBackendGetAttribute(raw_, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
          "descriptors cannot be counted");
    return count;
  }

 private:
  cudnnBackendDescriptor_t raw_ = nullptr;
};

}  // namespace convgrad
