// SPDX-License-Identifier: Apache-2.0
// Calls one kernel, the function "main" of a library of TVM, without TVM and without a C library: for aarch64 under an
// emulator of Linux, where neither has to be installed or built.
//
// Standard input has the number of tensors, and each as (code, bits, dimensions, bytes), its extents and its elements,
// all integers of 64 bits; the last tensor is the result, whose elements are written to standard output.

#include <stddef.h>
#include <stdint.h>

typedef struct {
  void* data;
  struct { int32_t type, id; } device;
  int32_t ndim;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} Tensor;

typedef struct {
  int32_t type_index;
  uint32_t padding;
  union { void* pointer; int64_t integer; };
} Any;

typedef struct { void* sync; int32_t tasks; } Group;
typedef int (*Task)(int32_t, Group*, void*);

enum { kTensor = 7, kTasks = 3, kAlignment = 64, kMemory = 1 << 26 };
enum { kRead = 63, kWrite = 64, kExit = 93 };  // Linux's system calls

static long Call(long number, long first, const void* second, size_t third) {
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = first;
  register const void* x1 __asm__("x1") = second;
  register size_t x2 __asm__("x2") = third;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
}

static void Exit(int code) {
  Call(kExit, code, NULL, 0);
  __builtin_unreachable();
}

void* memset(void* to, int value, size_t bytes) {
  for (volatile char* at = to; bytes > 0; --bytes) *at++ = (char)value;
  return to;
}

void* memcpy(void* to, const void* from, size_t bytes) {
  volatile char* at = to;
  for (const char* next = from; bytes > 0; --bytes) *at++ = *next++;
  return to;
}

static char memory[kMemory] __attribute__((aligned(kAlignment)));
static size_t used = 0;

static void* Allocate(int type, int id, uint64_t bytes, int code, int bits) {
  void* result = memory + used;
  used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (used > kMemory) Exit(2);
  return result;
}

static int Free(int type, int id, void* freed) { return 0; }

static int Launch(Task task, void* data, int tasks) {
  Group group = {NULL, tasks > 0 ? tasks : kTasks};
  for (int32_t i = 0; i < group.tasks; ++i) {
    int code = task(i, &group, data);
    if (code != 0) return code;
  }
  return 0;
}

extern void* __TVMBackendAllocWorkspace;
extern void* __TVMBackendFreeWorkspace;
extern void* __TVMBackendParallelLaunch;
#pragma weak __TVMBackendAllocWorkspace
#pragma weak __TVMBackendFreeWorkspace
#pragma weak __TVMBackendParallelLaunch

int __tvm_ffi_main(void* self, const Any* arguments, int32_t count, Any* result);

static void* Take(size_t bytes) { return Allocate(1, 0, bytes, 0, 0); }

static void Read(void* to, size_t bytes) {
  for (char* at = to; bytes > 0;) {
    long got = Call(kRead, 0, at, bytes);
    if (got <= 0) Exit(3);
    at += got;
    bytes -= got;
  }
}

void _start(void) {
  if (&__TVMBackendAllocWorkspace) __TVMBackendAllocWorkspace = (void*)Allocate;
  if (&__TVMBackendFreeWorkspace) __TVMBackendFreeWorkspace = (void*)Free;
  if (&__TVMBackendParallelLaunch) __TVMBackendParallelLaunch = (void*)Launch;
  int64_t count, bytes = 0;
  Read(&count, sizeof count);
  Tensor* tensors = Take(count * sizeof(Tensor));
  Any *arguments = Take(count * sizeof(Any)), nothing = {0, 0, {NULL}};
  for (int64_t i = 0; i < count; ++i) {
    int64_t fields[4];
    Read(fields, sizeof fields);
    bytes = fields[3];
    Tensor tensor = {Take(bytes), {1, 0}, fields[2], {fields[0], fields[1], 1}, NULL, NULL, 0};
    tensor.shape = Take(fields[2] * sizeof(int64_t));
    Read(tensor.shape, fields[2] * sizeof(int64_t));
    Read(tensor.data, bytes);
    tensors[i] = tensor;
    arguments[i].type_index = kTensor;
    arguments[i].pointer = &tensors[i];
  }
  if (__tvm_ffi_main(NULL, arguments, count, &nothing) != 0) Exit(4);
  for (const char* at = tensors[count - 1].data; bytes > 0;) {
    long put = Call(kWrite, 1, at, bytes);
    if (put <= 0) Exit(5);
    at += put;
    bytes -= put;
  }
  Exit(0);
}
