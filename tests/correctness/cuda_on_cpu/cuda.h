// As much of CUDA as some kernels need, on a CPU: threads are threads, blocks of a cluster run at the same time and clusters one after the other.
// device.h has what the kernel's own device functions do here.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__
#define __syncthreads() here().all->arrive_and_wait()
#define __syncwarp() here().warps[threadIdx.x / 32]->meeting.arrive_and_wait()

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct ushort4 {
  unsigned short x, y, z, w;
};
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline int min(int x, int y) { return std::min(x, y); }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= unsigned(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}

// A tensor map as it is read here.
struct alignas(64) TensorMap {
  unsigned char const* data;
  int64_t sizes[3], pitches[3], box[3];
  int element;
  int lines_alike;  // neighbours whose chunks of 16 bytes are exchanged alike: 1 of 128 bytes, 2 of 64; 0: none are
};
static_assert(sizeof(TensorMap) == 128);

// As in CUDA's own header.
struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void* hStream;
  struct Attribute {
    int id, pad;
    unsigned value[16];
  }* attrs;
  unsigned numAttrs;
};

// Where a thread is.
struct Warp {
  std::barrier<> meeting{32};
  unsigned lanes[32][8];
};
struct WarpGroup {
  std::barrier<> meeting{128};
  unsigned lanes[128][4];
};
struct Block {
  std::vector<unsigned char> memory;
  unsigned char* shared;
  std::barrier<>* all;
  std::map<int, std::unique_ptr<std::barrier<>>> some;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<WarpGroup>> warp_groups;
  std::mutex mutex;
  std::condition_variable changed;
  struct Barrier {
    int count = 0, missing = 0, phase = 0;
    int64_t bytes = 0;
  };
  std::map<unsigned, Barrier> barriers;
};
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::barrier<>* meeting;
};
inline thread_local Cluster* own_cluster;
inline thread_local unsigned own_rank;
inline thread_local dim3 threadIdx, blockIdx, gridDim;
inline Block& here() { return *own_cluster->blocks[own_rank]; }

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[I])...);
}

constexpr int STATIC_BYTES = 32768;  // of shared memory, which a kernel may have besides what a launch gives it

template <class... Parameters>
void run_kernel(CUlaunchConfig const& config, void (*kernel)(Parameters...), void** arguments) {
  const unsigned threads = config.blockDimX, blocks = config.attrs[0].value[0], clusters = config.gridDimX / blocks;
  for (unsigned tile = 0; tile < clusters * config.gridDimY * config.gridDimZ; ++tile) {
    Cluster cluster;
    std::barrier<> meeting(threads * blocks);
    std::vector<std::unique_ptr<std::barrier<>>> barriers;
    cluster.meeting = &meeting;
    for (unsigned i = 0; i < blocks; ++i) {
      auto block = std::make_unique<Block>();
      block->memory.assign(config.sharedMemBytes + STATIC_BYTES + 1024, 0xee);
      block->shared = block->memory.data() + (1024 - reinterpret_cast<uintptr_t>(block->memory.data()) % 1024);
      barriers.push_back(std::make_unique<std::barrier<>>(threads));
      block->all = barriers.back().get();
      for (unsigned warp = 0; warp < threads / 32; ++warp) {
        block->warps.push_back(std::make_unique<Warp>());
      }
      for (unsigned group = 0; group < threads / 128; ++group) {
        block->warp_groups.push_back(std::make_unique<WarpGroup>());
      }
      cluster.blocks.push_back(std::move(block));
    }
    std::vector<std::thread> running;
    for (unsigned i = 0; i < blocks * threads; ++i) {
      running.emplace_back([&, i] {
        own_cluster = &cluster;
        own_rank = i / threads;
        threadIdx.x = i % threads;
        blockIdx = dim3(tile % clusters * blocks + own_rank, tile / clusters % config.gridDimY, tile / clusters / config.gridDimY);
        gridDim = dim3(config.gridDimX, config.gridDimY, config.gridDimZ);
        call(kernel, arguments, std::index_sequence_for<Parameters...>());
      });
    }
    for (std::thread& one : running) {
      one.join();
    }
  }
}
