// Stands in for libamdhip64, with the types of HIP's own header: it records launches and what was loaded.
#include <cstring>
#include <string>
#include <vector>

#include <hip/hip_runtime_api.h>

struct Launched {
  unsigned grid[3], block[3], shared_bytes;
  int device, extra;
  void *stream, *function;
  unsigned char argument[4096];
};

static std::vector<Launched> launched;
static std::string refused;
static int status_of_refused, modules;
static thread_local int current;
static int failing(char const* name) { return refused == name ? status_of_refused : 0; }

extern "C" {
int fake_argument_bytes;
unsigned long long fake_capture;
int fake_count() { return static_cast<int>(launched.size()); }
Launched const* fake_launch(int i) { return &launched[i]; }
void fake_fail(char const* name, int status) {
  refused = name;
  status_of_refused = status;
}
int fake_modules() { return modules; }
int fake_device() { return current; }

hipError_t hipGetDevice(int* device) {
  *device = current;
  return hipError_t(failing("hipGetDevice"));
}
hipError_t hipSetDevice(int device) {
  if (int status = failing("hipSetDevice")) return hipError_t(status);
  current = device;
  return hipSuccess;
}
hipError_t hipModuleLoadData(hipModule_t* module, void const* image) {
  if (int status = failing("hipModuleLoadData")) return hipError_t(status);
  if (std::memcmp(image, "\x7f" "ELF", 4)) return hipErrorInvalidImage;
  *module = reinterpret_cast<hipModule_t>(static_cast<size_t>(++modules * 1000 + current));
  return hipSuccess;
}
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, char const* name) {
  if (int status = failing("hipModuleGetFunction")) return hipError_t(status);
  *function = reinterpret_cast<hipFunction_t>(reinterpret_cast<size_t>(module) * 100 + std::strlen(name));
  return hipSuccess;
}
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z, unsigned shared_bytes, hipStream_t stream, void** parameters,
                                 void** extra) {
  if (int status = failing("hipModuleLaunchKernel")) return hipError_t(status);
  Launched one{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, current, extra != nullptr, stream, function, {}};
  std::memcpy(one.argument, parameters[0], fake_argument_bytes);
  launched.push_back(one);
  return hipSuccess;
}
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t, hipStreamCaptureStatus* status, unsigned long long* id, hipGraph_t*,
                                      hipGraphNode_t const**, size_t*) {
  *status = fake_capture ? hipStreamCaptureStatusActive : hipStreamCaptureStatusNone;
  *id = fake_capture;
  return hipSuccess;
}
char const* hipGetErrorString(hipError_t status) { return status == hipErrorInvalidImage ? "device kernel image is invalid" : "out of order"; }
}
