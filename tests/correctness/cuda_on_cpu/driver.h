#pragma once
// What is called of libcuda, for the kernels that run here; KERNELS has "X(name)" for each. It comes after them.
struct Function {
  char const* name;
  void (*launch)(CUlaunchConfig const&, void**);
};
#define X(kernel) {#kernel, [](CUlaunchConfig const& config, void** arguments) { run_kernel(config, kernel, arguments); }},
inline Function functions[] = {KERNELS};
#undef X

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int number) { return *device = number, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = nullptr, 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuModuleLoadData(void**, void const*) { return 0; }
int cuModuleGetFunction(void** function, void*, char const* name) {
  for (Function& one : functions) {
    if (std::strcmp(one.name, name) == 0) {
      return *function = &one, 0;
    }
  }
  return 500;
}
int cuFuncSetAttribute(void*, int, int bytes) { return bytes > 227 * 1024; }
int cuStreamGetCaptureInfo_v2(void*, int* status, uint64_t*, void*, void*, void*) { return *status = 0; }
int cuGetErrorString(int, char const** text) { return *text = "", 0; }

int cuTensorMapEncodeTiled(TensorMap* map, int type, uint32_t rank, void* data, uint64_t const* sizes, uint64_t const* pitches, uint32_t const* box,
                           uint32_t const*, int, int swizzle, int, int) {
  *map = {static_cast<unsigned char const*>(data), {1, 1, 1}, {}, {1, 1, 1}, type == 0 ? 1 : type == 7 ? 4 : 2, swizzle == 3 ? 1 : swizzle == 2 ? 2 : 0};
  map->pitches[0] = map->element;
  bool legal = reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * map->element % 16 == 0;
  for (uint32_t i = 0; i < rank; ++i) {
    map->sizes[i] = sizes[i];
    map->box[i] = box[i];
    legal = legal && sizes[i] > 0 && box[i] > 0 && box[i] <= 256;
    if (i > 0) {
      map->pitches[i] = pitches[i - 1];
      legal = legal && pitches[i - 1] % 16 == 0;
    }
  }
  return legal ? 0 : 1;
}

int cuLaunchKernelEx(CUlaunchConfig const* config, void* function, void** arguments, void**) {
  return static_cast<Function*>(function)->launch(*config, arguments), 0;
}
}
