// SPDX-License-Identifier: Apache-2.0
// TVM up to 0.19 by its C interface (tvm/runtime/c_runtime_api.h and c_backend_api.h, of which the parts that are used
// are written out here), and the C functions that a runtime exports to generated code and to Python.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

extern "C" {
typedef enum { kDLCPU = 1, kDLCUDA = 2 } DLDeviceType;
typedef enum { kDLInt = 0, kDLUInt = 1 } DLDataTypeCode;
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;
typedef union {
  int64_t v_int64;
  void* v_handle;
  const char* v_str;
} TVMValue;

void TVMAPISetLastError(const char* message);
const char* TVMGetLastError(void);
int TVMFuncGetGlobal(const char* name, void** found);
int TVMFuncCall(void* function, TVMValue* args, int* codes, int count, TVMValue* result, int* result_code);
int TVMDeviceCopyDataFromTo(DLTensor* from, DLTensor* to, void* stream);
void* TVMBackendAllocWorkspace(int device_type, int device_id, uint64_t bytes, int code, int bits);
int TVMBackendFreeWorkspace(int device_type, int device_id, void* data);
}

namespace convgrad {

/*! \brief Throws what is streamed into it, as it is destroyed. */
class Thrower {
 public:
  explicit Thrower(const char* kind) { text_ << kind << ": "; }
  ~Thrower() noexcept(false) { throw std::runtime_error(text_.str()); }
  Thrower(const Thrower&) = delete;
  Thrower& operator=(const Thrower&) = delete;
  template <typename T>
  Thrower& operator<<(const T& value) {
    text_ << value;
    return *this;
  }

 private:
  std::ostringstream text_;
};

#define CONVGRAD_THROW(kind) ::convgrad::Thrower(#kind)

constexpr int kInt = 0, kDevice = 6;  // TVM's type codes of arguments

/*! \brief What one of TVM's global functions gives; a text is the thread's until its next call. */
inline TVMValue Called(const char* name, TVMValue* args, int* codes, int count) {
  void* function = nullptr;
  TVMValue result;
  int code = 0;
  if (TVMFuncGetGlobal(name, &function) != 0 || function == nullptr) {
    CONVGRAD_THROW(RuntimeError) << "this TVM has no " << name;
  }
  if (TVMFuncCall(function, args, codes, count, &result, &code) != 0) {
    CONVGRAD_THROW(RuntimeError) << name << ": " << TVMGetLastError();
  }
  return result;
}

inline int HostThreads() { return static_cast<int>(Called("runtime.NumThreads", nullptr, nullptr, 0).v_int64); }

/*! \brief CUDA's default stream: this TVM's C API does not report which stream is set. */
inline void* CurrentStream(DLDevice) { return nullptr; }

inline void SetDevice(DLDevice device) {
  using Function = int(int);
  static auto* set = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, "cudaSetDevice"));
  if (set == nullptr) CONVGRAD_THROW(RuntimeError) << "the process has no CUDA runtime";
  const int status = set(device.device_id);
  if (status != 0) CONVGRAD_THROW(RuntimeError) << "CUDA's error " << status << " as GPU " << device.device_id << " is set";
}

/*! \brief The compute capability of a GPU, such as "9.0". */
inline std::string ComputeVersion(DLDevice device) {
  constexpr int64_t kComputeVersion = 4;
  TVMValue args[3];
  int codes[] = {kInt, kInt, kInt};
  args[0].v_int64 = device.device_type;
  args[1].v_int64 = device.device_id;
  args[2].v_int64 = kComputeVersion;
  return Called("runtime.GetDeviceAttr", args, codes, 3).v_str;
}

inline void CopyTensor(DLTensor* from, DLTensor* to, void* stream) {
  if (TVMDeviceCopyDataFromTo(from, to, stream) != 0) CONVGRAD_THROW(RuntimeError) << TVMGetLastError();
}

/*! \brief Runs `body`; what it throws becomes TVM's last error, and the result -1. */
template <typename Body>
int Guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    TVMAPISetLastError(error.what());
    return -1;
  }
}

/*! \brief As Guarded, for a body that returns a text: `answer` is that or the error, the thread's until the next one. */
template <typename Body>
int Answered(const char** answer, const Body& body) {
  static thread_local std::string text;
  int status = 0;
  try {
    text = body();
  } catch (const std::exception& error) {
    text = error.what();
    status = -1;
  }
  *answer = text.c_str();
  return status;
}

}  // namespace convgrad

// What a runtime exports. `run` computes a call; `ask` answers a question of Python about one.
#define CONVGRAD_EXPORT(name)                                                                                        \
  extern "C" __attribute__((visibility("default"))) int convgrad_##name##_run(const int64_t* numbers,                \
                                                                              DLTensor* const* tensors, int count) { \
    return convgrad::Guarded([&] { convgrad::Run(numbers, tensors, count); });                                       \
  }                                                                                                                  \
  extern "C" __attribute__((visibility("default"))) int convgrad_##name##_ask(                                       \
      const char* question, const int64_t* numbers, const char* text, int64_t number, const char** answer) {         \
    return convgrad::Answered(answer, [&] { return convgrad::Ask(question, numbers, text, number); });               \
  }
