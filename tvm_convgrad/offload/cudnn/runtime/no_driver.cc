// SPDX-License-Identifier: Apache-2.0
// Stands in for libcuda.so.1 on machines without an NVIDIA driver, so that cuDNN can be asked what it would use on a GPU.
// As it makes a plan it loads kernels: they "load". Everything else that it looks up, for running them, is refused.
extern "C" {

constexpr int kSuccess = 0, kNoDevice = 100;  // CUresult

int cuModuleLoadData(void** module, const void*) {
  static char loaded;
  *module = &loaded;
  return kSuccess;
}
int cuModuleUnload(void*) {
  return kSuccess;
}
int cuModuleGetFunction(void** function, void*, const char*) {
  static char found;
  *function = &found;
  return kSuccess;
}
int cuLibraryLoadData(void** library, const void*, void*, void*, unsigned, void*, void*, unsigned) {
  static char loaded;
  *library = &loaded;
  return kSuccess;
}
int cuLibraryGetKernel(void** kernel, void*, const char*) {
  static char found;
  *kernel = &found;
  return kSuccess;
}
int cuLibraryUnload(void*) {
  return kSuccess;
}
int cuKernelSetAttribute(int, int, void*, int) {
  return kSuccess;
}
int cuGetErrorString(int, const char** text) {
  *text = "there is no NVIDIA driver on this machine";
  return kSuccess;
}

#define CONVGRAD_REFUSE(name) \
  int name() { return kNoDevice; }
CONVGRAD_REFUSE(cuCtxGetCurrent)
CONVGRAD_REFUSE(cuCtxGetLimit)
CONVGRAD_REFUSE(cuCtxPopCurrent)
CONVGRAD_REFUSE(cuCtxPushCurrent)
CONVGRAD_REFUSE(cuDeviceGet)
CONVGRAD_REFUSE(cuDeviceGetCount)
CONVGRAD_REFUSE(cuDriverGetVersion)
CONVGRAD_REFUSE(cuGetErrorName)
CONVGRAD_REFUSE(cuKernelGetAttribute)
CONVGRAD_REFUSE(cuLaunchCooperativeKernel)
CONVGRAD_REFUSE(cuLaunchKernel)
CONVGRAD_REFUSE(cuLaunchKernelEx)
CONVGRAD_REFUSE(cuLibraryLoadFromFile)
CONVGRAD_REFUSE(cuLinkAddData)
CONVGRAD_REFUSE(cuLinkComplete)
CONVGRAD_REFUSE(cuLinkCreate)
CONVGRAD_REFUSE(cuLinkDestroy)
CONVGRAD_REFUSE(cuOccupancyMaxPotentialClusterSize)
CONVGRAD_REFUSE(cuStreamGetCtx)
CONVGRAD_REFUSE(cuTensorMapEncodeIm2col)
CONVGRAD_REFUSE(cuTensorMapEncodeTiled)

}  // extern "C"
