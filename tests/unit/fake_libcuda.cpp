// Stands in for libcuda, with the types of CUDA's own header: it records launches, and writes into a tensor map what it was told of it.
#include <cstring>
#include <vector>

#include <cuda.h>

struct Map {
  int type, rank;
  cuuint64_t address, sizes[5], pitches[4];
  cuuint32_t box[5];
  int interleave, swizzle, promotion, fill;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

struct Launched {
  unsigned grid[3], block[3], shared_bytes, cluster[3];
  int overlaps, attributes;
  void *stream, *function;
  unsigned char arguments[4][4096];
};

static std::vector<Launched> launched;
static thread_local CUcontext current;
static int fails_with, contexts, modules, most_shared_bytes;

extern "C" {
int fake_argument_bytes[4];
unsigned long long fake_capture;
int fake_count() { return static_cast<int>(launched.size()); }
Launched const* fake_launch(int i) { return &launched[i]; }
void fake_fail(int status) { fails_with = status; }
int fake_modules() { return modules; }
int fake_most_shared_bytes() { return most_shared_bytes; }
int fake_contexts() { return contexts; }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = 13020;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number + 40;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ++contexts;
  *context = reinterpret_cast<CUcontext>(static_cast<long>(device) + 1000);
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = current;
  current = nullptr;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, void const* image) {
  if (current == nullptr || std::memcmp(image, "\x7f" "ELF", 4) != 0) {
    return CUDA_ERROR_INVALID_IMAGE;
  }
  *module = reinterpret_cast<CUmodule>(static_cast<long>(++modules));
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, char const* name) {
  *function = reinterpret_cast<CUfunction>(static_cast<long>(std::strlen(name)));
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  if (current == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  most_shared_bytes = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? value : -1;
  return value <= 227 * 1024 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph*, CUgraphNode const**, size_t*) {
  *status = fake_capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  *id = fake_capture;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* sizes,
                                cuuint64_t const* pitches, cuuint32_t const* box, cuuint32_t const* steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  Map told{};
  bool legal = reinterpret_cast<cuuint64_t>(map) % 64 == 0 && reinterpret_cast<cuuint64_t>(address) % 16 == 0;
  for (cuuint32_t i = 0; i < rank; ++i) {
    told.sizes[i] = sizes[i];
    told.box[i] = box[i];
    legal = legal && sizes[i] > 0 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
    if (i > 0) {
      told.pitches[i - 1] = pitches[i - 1];
      legal = legal && pitches[i - 1] % 16 == 0;
    }
  }
  told.type = type;
  told.rank = static_cast<int>(rank);
  told.address = reinterpret_cast<cuuint64_t>(address);
  told.interleave = interleave;
  told.swizzle = swizzle;
  told.promotion = promotion;
  told.fill = fill;
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &told, sizeof(told));
  return legal ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuLaunchKernelEx(CUlaunchConfig const* config, CUfunction function, void** arguments, void** extra) {
  if (current == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (fails_with != 0 || extra != nullptr) {
    return static_cast<CUresult>(fails_with);
  }
  Launched one{{config->gridDimX, config->gridDimY, config->gridDimZ}, {config->blockDimX, config->blockDimY, config->blockDimZ}, config->sharedMemBytes};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    CUlaunchAttribute const& attribute = config->attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      one.cluster[0] = attribute.value.clusterDim.x;
      one.cluster[1] = attribute.value.clusterDim.y;
      one.cluster[2] = attribute.value.clusterDim.z;
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      one.overlaps = attribute.value.programmaticStreamSerializationAllowed;
    }
  }
  one.attributes = static_cast<int>(config->numAttrs);
  one.stream = config->hStream;
  one.function = function;
  for (int i = 0; i < 4 && fake_argument_bytes[i] > 0; ++i) {
    std::memcpy(one.arguments[i], arguments[i], fake_argument_bytes[i]);
  }
  launched.push_back(one);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, char const** text) {
  *text = "as the driver says it";
  return CUDA_SUCCESS;
}
}
