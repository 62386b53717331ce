// SPDX-License-Identifier: Apache-2.0
// Part of an artifact: the initial state of a step as data of the library, and the function that copies it into new
// tensors. Compiled as C or C++, beside the header that `initial_state.py` writes, which defines STATE_FILE, the file
// with the data, STATE_TENSORS: the offset and the bytes of each tensor (an offset of -1 means zeros), and
// STATE_IS_LARGE: whether the data are out of the reach of short addresses.
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE  // madvise, where the linker's options name a standard of C
#endif
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#include "initial_state_table.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__x86_64__) && STATE_IS_LARGE  // a section for data of any size, which only a whole address reaches
#define STATE_SECTION ".lrodata.convgrad_state, \"al\", @progbits"
__asm__(
    ".pushsection .data.rel.ro.convgrad_state, \"aw\", @progbits\n"
    ".balign 8\n"
    "convgrad_state_address:\n"
    ".quad convgrad_state_data\n"
    ".popsection\n");
extern __attribute__((visibility("hidden"))) const char* const convgrad_state_address;
#else
#define STATE_SECTION ".convgrad_state, \"a\", %progbits"
extern __attribute__((visibility("hidden"))) const char convgrad_state_data[];
#define convgrad_state_address convgrad_state_data
#endif

__asm__(
    ".pushsection " STATE_SECTION "\n"
    ".balign 64\n"
    "convgrad_state_data:\n"
    ".incbin " STATE_FILE "\n"
    ".popsection\n");

static const struct {
  int64_t offset, bytes;
} tensors[] = {STATE_TENSORS};

// Take pages out of memory that are not needed any more; whoever reads them again gets them from the file.
static void drop(const char* data, int64_t bytes) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)data;
  const uintptr_t first = (begin + page - 1) / page * page, end = (begin + (uintptr_t)bytes) / page * page;
  if (first < end) madvise((void*)first, end - first, MADV_DONTNEED);
}

static int refuse(const char* why) {
  TVMFFIErrorSetRaisedFromCStr("ValueError", why);
  return -1;
}

// convgrad_initial_state(number, tensor): fill a tensor with the initial value of tensor `number` of the state.
TVM_FFI_DLL_EXPORT int __tvm_ffi_convgrad_initial_state(void* self, const TVMFFIAny* args, int32_t count,
                                                        TVMFFIAny* result) {
  const int64_t known = (int64_t)(sizeof(tensors) / sizeof(tensors[0]));
  const DLTensor* to = NULL;
  (void)self;
  if (count == 2 && args[1].type_index == kTVMFFIDLTensorPtr) {
    to = (const DLTensor*)args[1].v_ptr;
  } else if (count == 2 && args[1].type_index == kTVMFFITensor) {
    to = (const DLTensor*)((const char*)args[1].v_obj + sizeof(TVMFFIObject));
  }
  if (to == NULL || args[0].type_index != kTVMFFIInt || args[0].v_int64 < 0 || args[0].v_int64 >= known) {
    return refuse("convgrad_initial_state takes the number of a tensor of the state, and a tensor.");
  }
  const int64_t bytes = tensors[args[0].v_int64].bytes, offset = tensors[args[0].v_int64].offset;
  int64_t given = (to->dtype.bits * to->dtype.lanes + 7) / 8;
  for (int32_t i = 0; i < to->ndim; ++i) given *= to->shape[i];
  if (to->device.device_type != kDLCPU || given != bytes) {
    return refuse("convgrad_initial_state: the tensor is not on a CPU, or has another size than that of the state.");
  }
  char* data = (char*)to->data + to->byte_offset;
  if (offset < 0) {
    memset(data, 0, (size_t)bytes);
  } else if (bytes > 0) {
    memcpy(data, convgrad_state_address + offset, (size_t)bytes);
    drop(convgrad_state_address + offset, bytes);
  }
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}

#ifdef __cplusplus
}
#endif
