// What the kernel's device functions do: shared memory is addressed as on a GPU, the block's number in the upper bits. ELEMENT_BITS_E and _M are given: of
// the exponent and the significand of a 16-bit float.
#include "cuda.h"

constexpr unsigned BLOCK_SHIFT = 24;
constexpr std::chrono::minutes PATIENCE_AT_BARRIERS{3};  // a kernel that waits longer is taken to wait for ever

inline unsigned shared_address(void const* at) {
  return own_rank << BLOCK_SHIFT | unsigned(static_cast<unsigned char const*>(at) - here().shared);
}
inline unsigned char* at_address(unsigned address) {
  return own_cluster->blocks[address >> BLOCK_SHIFT]->shared + (address & ((1u << BLOCK_SHIFT) - 1));
}

inline void barrier_init(unsigned barrier, unsigned count) {
  std::lock_guard lock(here().mutex);
  here().barriers[barrier] = {int(count), int(count), 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_change(unsigned barrier, int arrivals, int64_t bytes) {
  Block& block = *own_cluster->blocks[barrier >> BLOCK_SHIFT];
  std::lock_guard lock(block.mutex);
  Block::Barrier& one = block.barriers.at(barrier);
  one.missing -= arrivals;
  one.bytes += bytes;
  if (one.missing == 0 && one.bytes == 0) {
    one.missing = one.count;
    ++one.phase;
    block.changed.notify_all();
  }
}
inline void barrier_arrive(unsigned barrier) { barrier_change(barrier, 1, 0); }
inline void barrier_arrive_expect(unsigned barrier, unsigned bytes) { barrier_change(barrier, 1, bytes); }
inline void barrier_wait(unsigned barrier, unsigned parity) {
  std::unique_lock lock(here().mutex);
  Block::Barrier& one = here().barriers.at(barrier);
  if (!here().changed.wait_for(lock, PATIENCE_AT_BARRIERS, [&] { return unsigned(one.phase & 1) != parity; })) {
    std::fprintf(stderr, "thread %u of block %u waits in vain at the barrier at %u, for parity %u\n", threadIdx.x, blockIdx.x, barrier, parity);
    std::abort();
  }
}
inline void barrier_arrive_there(unsigned barrier) { barrier_arrive(barrier); }
inline void sync_threads(int barrier, int threads) {
  Block& block = here();
  std::unique_lock lock(block.mutex);
  std::unique_ptr<std::barrier<>>& one = block.some[barrier];
  if (!one) {
    one = std::make_unique<std::barrier<>>(threads);
  }
  lock.unlock();
  one->arrive_and_wait();
}
inline thread_local std::optional<std::barrier<>::arrival_token> arrived;
inline void cluster_arrive() { arrived = own_cluster->meeting->arrive(); }
inline void cluster_wait() { own_cluster->meeting->wait(std::move(*arrived)); }
inline unsigned at_block(unsigned address, unsigned rank) { return (address & ((1u << BLOCK_SHIFT) - 1)) | rank << BLOCK_SHIFT; }
inline void store_there(unsigned there, float4 const& x, unsigned barrier) {
  std::memcpy(at_address(there), &x, 16);
  barrier_change(barrier, 0, -16);
}
inline float4 load_quad(unsigned from) {
  float4 x;
  std::memcpy(&x, at_address(from), 16);
  return x;
}
// Blocks run one after another: the flag of an earlier block is set already, and that of a later one never will be.
inline void set_flag(unsigned* flag) { *flag = 1; }
inline void wait_for_flag(unsigned const* flag) {
  if (*flag != 1) {
    std::fprintf(stderr, "thread %u of block %u waits for a later block\n", threadIdx.x, blockIdx.x);
    std::abort();
  }
}
inline float4 load_sums(float4 const* from) { return *from; }
inline void let_next_start() {}
inline void wait_for_previous() {}
inline void fetch_map(TensorMap const*) {}
inline void fetch_box(TensorMap const*, int, int) {}
inline void copy_box(unsigned to, TensorMap const* map, unsigned barrier, int inner, int middle, int outer) {
  const int64_t first[3] = {inner, middle, outer};
  const int64_t line = map->box[0] * map->element;
  unsigned char* start = at_address(to);
  for (int64_t z = 0; z < map->box[2]; ++z) {
    for (int64_t y = 0; y < map->box[1]; ++y) {
      for (int64_t x = 0; x < line; ++x) {
        const int64_t at[3] = {first[0] + x / map->element, first[1] + y, first[2] + z};
        const bool inside = at[0] < map->sizes[0] && at[1] < map->sizes[1] && at[2] < map->sizes[2];
        const int64_t row = z * map->box[1] + y, alike = map->lines_alike;
        const int64_t where = alike ? (x / 16 ^ row / alike % (8 / alike)) * 16 + x % 16 : x;
        start[row * line + where] =
            inside ? map->data[at[0] * map->element + x % map->element + at[1] * map->pitches[1] + at[2] * map->pitches[2]] : 0;
      }
    }
  }
  barrier_change(barrier, 0, -map->box[0] * map->box[1] * map->box[2] * map->element);
}
inline void copy_box_to(unsigned to, TensorMap const* map, unsigned barrier, int inner, int outer, int batch, unsigned short blocks) {
  for (unsigned rank = 0; rank < own_cluster->blocks.size(); ++rank) {
    if (blocks >> rank & 1) {
      copy_box(at_block(to, rank), map, at_block(barrier, rank), inner, outer, batch);
    }
  }
}
inline void fetch_box(TensorMap const*, int, int, int) {}
inline void copy_box(unsigned to, TensorMap const* map, unsigned barrier, int inner, int outer) { copy_box(to, map, barrier, inner, outer, 0); }

inline unsigned long long policy_of(bool) { return 0; }
inline void copy_box_by(unsigned long long, unsigned to, TensorMap const* map, unsigned barrier, int inner, int outer, int group = 0) {
  copy_box(to, map, barrier, inner, outer, group);
}

// Lanes give what they have, and see what all gave.
inline Warp& met(std::initializer_list<unsigned> given) {
  Warp& warp = *here().warps[threadIdx.x / 32];
  std::copy(given.begin(), given.end(), warp.lanes[threadIdx.x % 32]);
  warp.meeting.arrive_and_wait();
  return warp;
}
inline unsigned given_by(unsigned x, unsigned lane) {
  Warp& warp = met({x});
  const unsigned given = warp.lanes[lane][0];
  warp.meeting.arrive_and_wait();
  return given;
}
inline unsigned __shfl_sync(unsigned, unsigned x, int lane) { return given_by(x, lane); }
inline unsigned __shfl_up_sync(unsigned, unsigned x, int distance) { return given_by(x, std::max(int(threadIdx.x % 32) - distance, 0)); }
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int distance) { return given_by(x, threadIdx.x % 32 ^ distance); }
inline unsigned __ballot_sync(unsigned, bool x) {
  Warp& warp = met({x});
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    lanes |= warp.lanes[lane][0] << lane;
  }
  warp.meeting.arrive_and_wait();
  return lanes;
}
inline bool __all_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x) == ~0u; }
inline void load_matrices(unsigned (&x)[4], unsigned from) {
  Warp& warp = met({from});
  const unsigned lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&x[i], at_address(warp.lanes[i * 8 + lane / 4][0]) + lane % 4 * 4, 4);
  }
  warp.meeting.arrive_and_wait();
}
inline unsigned turn_matrix(unsigned x) {
  Warp& warp = met({x});
  const unsigned lane = threadIdx.x % 32, half = lane / 4 % 2 * 16, from = lane % 4 * 8 + lane / 8;
  const unsigned turned = (warp.lanes[from][0] >> half & 0xffff) | (warp.lanes[from + 4][0] >> half & 0xffff) << 16;
  warp.meeting.arrive_and_wait();
  return turned;
}
inline void store_words(void* to, unsigned first, unsigned second) {
  const unsigned both[2] = {first, second};
  std::memcpy(to, both, 8);
}
inline void load_matrices_turned(unsigned (&x)[4], unsigned from) {
  load_matrices(x, from);
  for (unsigned& one : x) {
    one = turn_matrix(one);
  }
}
// What is copied ahead of its use may be there at once, as in every other thread, or when it was waited for; what was there before is gone.
inline thread_local std::vector<std::vector<std::pair<unsigned, void const*>>> copies{{}};
inline void copy_ahead(unsigned to, void const* from) {
  if (threadIdx.x % 2 == 0) {
    std::memcpy(at_address(to), from, 16);
  } else {
    std::memset(at_address(to), 0xff, 16);
    copies.back().emplace_back(to, from);
  }
}
inline void copies_commit() { copies.emplace_back(); }
template <int Pending>
inline void copies_wait() {
  for (; copies.size() - 1 > Pending; copies.erase(copies.begin())) {
    for (auto [to, from] : copies.front()) {
      std::memcpy(at_address(to), from, 16);
    }
  }
}
template <size_t Count>
inline void load_words(unsigned (&x)[Count], unsigned from) {
  std::memcpy(x, at_address(from), sizeof(x));
}
template <size_t Count>
inline void load_weights(unsigned (&x)[Count], void const* from, bool inside) {
  std::fill(x, x + Count, 0);
  if (inside) {
    std::memcpy(x, from, sizeof(x));
  }
}
template <size_t Count>
inline void load_row(unsigned (&x)[Count], void const* from, bool inside) { load_weights(x, from, inside); }
template <class T>
inline void load_factor(T& x, T const* from, bool inside) { x = inside ? *from : T{}; }
inline void load_fragment(unsigned (&x)[4], void const* from, bool exists) {
  if (exists) {
    std::memcpy(x, from, sizeof(x));
  }
}
template <size_t Count>
inline void load_cached(unsigned (&x)[Count], void const* from, bool exists) {
  if (!exists) {
    return;
  }
  if (reinterpret_cast<uintptr_t>(from) % sizeof(x) != 0) {
    std::fprintf(stderr, "%zu bytes are loaded from %p\n", sizeof(x), from);
    std::abort();
  }
  std::memcpy(x, from, sizeof(x));
}
inline void load_word(unsigned& x, void const* from, bool exists) { load_cached(reinterpret_cast<unsigned(&)[1]>(x), from, exists); }
inline void multiply(float (&sums)[4], unsigned p0, unsigned p1, unsigned p2, unsigned p3, unsigned q0, unsigned q1);
inline void multiply_if(bool exists, float (&sums)[4], unsigned const (&p)[4], unsigned q0, unsigned q1) {
  if (exists) {
    multiply(sums, p[0], p[1], p[2], p[3], q0, q1);
  }
}
inline void fetch_line(void const*) {}
template <class T>
inline void settle(T&) {}

// 16-bit floats.
inline double decoded(unsigned bits) {
  const int fraction = bits & ((1 << ELEMENT_BITS_M) - 1), exponent = bits >> ELEMENT_BITS_M & ((1 << ELEMENT_BITS_E) - 1);
  const int middle = (1 << (ELEMENT_BITS_E - 1)) - 1;
  if (exponent == (1 << ELEMENT_BITS_E) - 1) {
    return fraction ? NAN : bits & 0x8000 ? -INFINITY : INFINITY;
  }
  const double size = exponent ? std::ldexp(1 + std::ldexp(fraction, -ELEMENT_BITS_M), exponent - middle)
                               : std::ldexp(fraction, 1 - middle - ELEMENT_BITS_M);
  return bits & 0x8000 ? -size : size;
}
// Of NaN, or a number that is not too large, to nearest even.
inline unsigned encoded(double x) {
  const int middle = (1 << (ELEMENT_BITS_E - 1)) - 1;
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) {
    return 0x7fff;
  }
  x = std::fabs(x);
  const int exponent = x > 0 ? std::max(std::ilogb(x), 1 - middle) : 1 - middle;
  const unsigned digits = unsigned(std::nearbyint(std::ldexp(x, ELEMENT_BITS_M - exponent)));
  return sign | (unsigned(exponent + middle - 1) << ELEMENT_BITS_M) + digits;
}
inline double half_of(unsigned word, int half) { return decoded(word >> 16 * half & 0xffff); }

inline void multiply(float (&sums)[4], unsigned p0, unsigned p1, unsigned p2, unsigned p3, unsigned q0, unsigned q1) {
  Warp& warp = met({p0, p1, p2, p3, q0, q1});
  const unsigned lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 16; ++k) {
      const double p = half_of(warp.lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
      sum += p * half_of(warp.lanes[col * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    sums[i] += float(sum);
  }
  warp.meeting.arrive_and_wait();
}
inline unsigned masked(unsigned x, unsigned mask, unsigned pattern) { return (x & mask) ^ pattern; }
inline unsigned bytes_of(unsigned x, unsigned y, unsigned which) { return __byte_perm(x, y, which); }
inline unsigned times_plus(unsigned x, unsigned factor, unsigned more) {
  const unsigned low = encoded(half_of(x, 0) * half_of(factor, 0) + half_of(more, 0));
  return low | encoded(half_of(x, 1) * half_of(factor, 1) + half_of(more, 1)) << 16;
}

inline unsigned times(unsigned x, unsigned factor) {
  return encoded(half_of(x, 0) * half_of(factor, 0)) | encoded(half_of(x, 1) * half_of(factor, 1)) << 16;
}
template <int Offset>
inline unsigned load_piece(unsigned from) {
  unsigned short x;
  std::memcpy(&x, at_address(from) + Offset, 2);
  return x;
}
template <int Offset>
inline void load_words(unsigned from, unsigned& x, unsigned& y, unsigned& z, unsigned& w) {
  unsigned words[4];
  std::memcpy(words, at_address(from) + Offset, 16);
  x = words[0], y = words[1], z = words[2], w = words[3];
}
inline void store_float(unsigned to, float x) { std::memcpy(at_address(to), &x, 4); }
// Rows of eight elements; a lane has those of two neighbouring rows in one column of each matrix.
inline void store_matrices(unsigned to, unsigned x, unsigned y) {
  Warp& warp = met({to});
  const unsigned lane = threadIdx.x % 32, given[2] = {x, y};
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned short one = given[i / 2] >> i % 2 * 16;
    std::memcpy(at_address(warp.lanes[i / 2 * 8 + lane % 4 * 2 + i % 2][0]) + lane / 4 * 2, &one, 2);
  }
  warp.meeting.arrive_and_wait();
}

// Products of a warp group; q is in lines of 64 bytes with their swizzle.
template <int Count>
inline void give_registers() {}
template <int Count>
inline void take_registers() {}
inline void products_begin() {}
inline void products_commit() {}
template <int Pending>
inline void products_wait() {}
template <class T>
inline void pin(T&) {}
template <class T>
inline void keep(T&) {}
inline void copy_bytes(unsigned to, void const* from, unsigned bytes, unsigned barrier) {
  std::memcpy(at_address(to), from, bytes);
  barrier_change(barrier, 0, -int64_t(bytes));
}
inline void load_quad(float (&x)[4], unsigned from) { std::memcpy(x, at_address(from), 16); }
inline float load_float(unsigned from) {
  float x;
  std::memcpy(&x, at_address(from), 4);
  return x;
}
inline void take_if(float4& to, bool takes, float4 const& x) { to = takes ? x : to; }
// A value that all lanes have. One that has another aborts.
inline unsigned uniform(unsigned x) {
  const unsigned first = __shfl_sync(0xffffffffu, x, 0);
  if (x != first) {
    std::fprintf(stderr, "lane %u has %u, the first one %u\n", unsigned(threadIdx.x % 32), x, first);
    std::abort();
  }
  return first;
}
// A matrix of swizzled lines of 128 bytes; "leading" tells whether K is along them.
inline unsigned long long descriptor(unsigned address, unsigned leading) { return address | static_cast<unsigned long long>(leading) << 32; }
inline unsigned long long behind(unsigned long long matrix, unsigned bytes) { return matrix + bytes; }
inline std::vector<float> const decoded_values = [] {  // of all 16-bit floats
  std::vector<float> made(1 << 16);
  for (unsigned bits = 0; bits < made.size(); ++bits) {
    made[bits] = float(decoded(bits));
  }
  return made;
}();
inline double element_at(unsigned long long matrix, unsigned line, unsigned k) {
  const unsigned address = unsigned(matrix), leading = unsigned(matrix >> 32);
  const unsigned at = leading == 16 ? address + line * 128 + k * 2 : address + line / 64 * leading + k * 128 + line % 64 * 2;
  unsigned short bits;
  std::memcpy(&bits, at_address(at ^ (at >> 7 & 7) << 4), 2);
  return decoded_values[bits];
}
inline void written_for_products() {}
template <int Count>
inline void multiply(float (&sums)[Count], unsigned long long p, unsigned long long q) {
  const unsigned thread = threadIdx.x % 128, lane = thread % 32;
  here().warp_groups[threadIdx.x / 128]->meeting.arrive_and_wait();
  for (int i = 0; i < Count; ++i) {
    const unsigned row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 16; ++k) {
      sum += element_at(p, row, k) * element_at(q, col, k);
    }
    sums[i] += float(sum);
  }
  here().warp_groups[threadIdx.x / 128]->meeting.arrive_and_wait();
}
inline unsigned long long descriptor_of_short_lines(unsigned address) { return address; }
template <int Accumulates, int Count>
inline void multiply(float (&step)[Count], unsigned const (&p)[4], unsigned long long q) {
  WarpGroup& group = *here().warp_groups[threadIdx.x / 128];
  const unsigned thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  std::copy(p, p + 4, group.lanes[thread]);
  group.meeting.arrive_and_wait();
  for (int i = 0; i < Count; ++i) {
    const unsigned row = lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned at = unsigned(q) + col * 64 + k * 2, word = group.lanes[warp * 32 + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      unsigned short bits;
      std::memcpy(&bits, at_address(at ^ (at >> 7 & 3) << 4), 2);
      sum += half_of(word, k % 2) * decoded(bits);
    }
    step[i] = float(sum) + (Accumulates ? step[i] : 0.0f);
  }
  group.meeting.arrive_and_wait();
}

// q is a matrix of swizzled lines of 128 bytes, as above.
template <int Count>
inline void multiply(float (&sums)[Count], unsigned const (&p)[4], unsigned long long q, unsigned accumulates) {
  WarpGroup& group = *here().warp_groups[threadIdx.x / 128];
  const unsigned thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  std::copy(p, p + 4, group.lanes[thread]);
  group.meeting.arrive_and_wait();
  for (int i = 0; i < Count; ++i) {
    const unsigned row = lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned word = group.lanes[warp * 32 + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      sum += decoded_values[word >> k % 2 * 16 & 0xffff] * element_at(q, col, k);
    }
    sums[i] = float(sum) + (accumulates ? sums[i] : 0.0f);
  }
  group.meeting.arrive_and_wait();
}

// Elements in memory.
struct bf16 {
  unsigned short bits;
};
struct f16 {
  unsigned short bits;
};
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const unsigned bits = unsigned(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline float to_float(f16 x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return float(y);
}
inline f16 to_f16(float x) {
  const _Float16 y = _Float16(x);
  f16 z;
  std::memcpy(&z, &y, 2);
  return z;
}
inline bf16 to_bf16(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return std::isnan(x) ? bf16{0x7fff} : bf16{static_cast<unsigned short>(bits + 0x7fff + (bits >> 16 & 1) >> 16)};
}
inline unsigned pair_from(float first, float second) {
  return ELEMENT_BITS_E == 5 ? to_f16(first).bits | to_f16(second).bits << 16 : to_bf16(first).bits | to_bf16(second).bits << 16;
}
inline unsigned two_bf16(float x, float y) { return to_bf16(x).bits | unsigned(to_bf16(y).bits) << 16; }
inline unsigned two_f16(float x, float y) { return to_f16(x).bits | unsigned(to_f16(y).bits) << 16; }
inline void store_one(float* to, float x) { *to = x; }
inline void store_one(bf16* to, float x) { *to = to_bf16(x); }
inline void store_one(f16* to, float x) { *to = to_f16(x); }
template <class T>
void store_two(T* to, float x, float y) {
  store_one(to, x);
  store_one(to + 1, y);
}
