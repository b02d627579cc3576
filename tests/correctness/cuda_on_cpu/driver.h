// What driver.h.jinja has, of a kernel that runs here; KERNEL is its name. It comes after the kernel.
static void* driver_function(char const*) { return reinterpret_cast<void*>(&cuTensorMapEncodeTiled); }
static cudaError_t prepare(int, void const*, int) { return cudaSuccess; }
static cudaError_t launch_prepared(CUlaunchConfig const& config, int, void** arguments, int = 0) { return run_kernel(config, KERNEL, arguments); }
extern "C" unsigned long long gemmtune_capture(cudaStream_t) { return 0; }
