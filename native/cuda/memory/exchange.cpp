#include "cuda/memory/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

namespace as::cuda {
namespace {

constexpr size_t kHeader = 4096;      // bytes before the partial sums: flags, and marks of the other ranks
constexpr size_t kMarks = 2048;       // offset of the marks
constexpr size_t kGranule = 2 << 20;  // smaller allocations may share their memory with other ones
constexpr double kLeaveSeconds = 2;   // how long a rank waits for the others to leave

constexpr char kMagic[8] = {'A', 'S', 'P', 'E', 'E', 'R', '0', '5'};

// Process ids may be equal in two containers; this number is not.
uint64_t own_process() {
  static const uint64_t number = (uint64_t)std::random_device()() << 32 | std::random_device()();
  return number;
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

cudaUUID_t uuid_of(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "asking what the GPU is");
  return properties.uuid;
}

// The number that a GPU has in this process; -1: this process does not see it. Processes in different containers may
// count GPUs in different ways.
int index_of(const cudaUUID_t& gpu) {
  for (int device = device_count() - 1; device >= 0; device--)
    if (!std::memcmp(uuid_of(device).bytes, gpu.bytes, sizeof gpu.bytes)) return device;
  return -1;
}

// What ranks exchange, without this process' addresses.
RankSamples sizes_of(int world, int outputs, int vocab) {
  RankSamples samples;
  samples.peers.world = world, samples.outputs = outputs, samples.vocab = vocab;
  return samples;
}

}  // namespace

// How other ranks open a rank's memory.
struct Exchange::Address {
  char magic[8];
  uint64_t process;
  int32_t rank, world, device;  // device: as the rank's process counts GPUs
  cudaUUID_t gpu;
  int32_t outputs, vocab, by_host;
  uint64_t base, buffer_bytes, pushed;
  cudaIpcMemHandle_t handle;
  HostBlock::Name block;
};

size_t partial_bytes(int rows, int width, bool is_dtype16) {
  return is_dtype16 ? tiles_bytes(rows, width) : (size_t)rows * width * sizeof(float);
}

size_t exchange_bytes(int world, size_t buffer_bytes, size_t pushed, int outputs, int vocab, bool by_host) {
  const RankSamples samples = sizes_of(world, outputs, vocab);
  const size_t sums = kHeader + 2 * rounded(buffer_bytes, kHeader);
  if (by_host) return sums + samples.staged_bytes();
  return rounded(sums + 2 * world * rounded(pushed, kHeader) + samples.bytes(), kGranule);
}

Exchange::Exchange(const Device& device, int rank, int world, size_t buffer_bytes, size_t pushed, int outputs,
                   int vocab, double seconds, bool by_host)
    : device_(device), seconds_(seconds), by_host_(by_host) {
  if (world < 2 || world > kMaxRanks || rank < 0 || rank >= world)
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(world) +
                                ": a group has up to " + std::to_string(kMaxRanks) + " GPUs");
  device_.use();
  if (by_host) pushed = 0;
  memory_ = Memory(exchange_bytes(world, buffer_bytes, pushed, outputs, vocab, by_host), "what GPUs exchange");
  failed_ = Memory(sizeof(int), "a flag", Memory::Where::host);
  peers_.rank = rank, peers_.world = world, peers_.buffer_bytes = rounded(buffer_bytes, kHeader);
  peers_.pushed_bytes = rounded(pushed, kHeader);
  peers_.failed = failed_.as<int>(), peers_.limit = (uint64_t)(seconds * 1e9);
  samples_.outputs = outputs, samples_.vocab = vocab;
  char* places = memory_.as() + kHeader + 2 * peers_.buffer_bytes;
  if (by_host) {
    blocks_[rank] = HostBlock(block_bytes());
    peers_.sent = blocks_[rank].on_gpu() + kHeader, peers_.local = memory_.as<uint32_t>();
    samples_.staged = places;
    return;
  }
  check(cudaMemset(places, kNotYet & 0xff, 2 * world * peers_.pushed_bytes), "marking memory");
  check(cudaStreamSynchronize(nullptr), "marking memory");
}

Exchange::~Exchange() {
  try {
    if (by_host_) device_.use(), device_.wait();  // kernels use the host's memory
    else leave();
  } catch (const std::runtime_error&) {}  // the device is no longer usable
  for (void* opened : opened_) cudaIpcCloseMemHandle(opened);
}

std::string Exchange::address() {
  Address own{};
  std::memcpy(own.magic, kMagic, sizeof kMagic);
  own.process = own_process(), own.rank = peers_.rank, own.world = peers_.world, own.device = device_.index();
  own.base = reinterpret_cast<uint64_t>(memory_.as()), own.buffer_bytes = peers_.buffer_bytes;
  own.outputs = samples_.outputs, own.vocab = samples_.vocab;
  own.pushed = peers_.pushed_bytes, own.gpu = uuid_of(device_.index()), own.by_host = by_host_;
  device_.use();
  if (by_host_) own.block = blocks_[peers_.rank].name();
  else check(cudaIpcGetMemHandle(&own.handle, memory_.as()), "sharing memory with other ranks");
  return std::string(reinterpret_cast<const char*>(&own), sizeof own);
}

void Exchange::connect(const std::vector<std::string>& addresses) {
  connects_ = true;
  if (connected_ || (int)addresses.size() != peers_.world)
    throw std::invalid_argument("ranks connect once, with an address of each");
  device_.use();
  for (int r = 0; r < peers_.world; r++) {
    open(r, addresses[r]);
    char* base = by_host_ ? blocks_[r].on_gpu() : r == peers_.rank ? memory_.as() : others_[r];
    peers_.partials[r] = (r == peers_.rank ? memory_.as() : base) + kHeader;
    peers_.flags[r] = reinterpret_cast<uint32_t*>(base);
    peers_.pushed[r] = base + kHeader + 2 * peers_.buffer_bytes;
    samples_.memory[r] = peers_.pushed[r] + 2 * peers_.world * peers_.pushed_bytes;
  }
  connected_ = true;
}

size_t Exchange::block_bytes() const {
  return kHeader + 2 * peers_.buffer_bytes + sizes_of(peers_.world, samples_.outputs, samples_.vocab).bytes();
}

// Checks the address of a rank, and opens the memory of another rank.
void Exchange::open(int r, const std::string& address) {
  Address other;
  if (address.size() != sizeof other) throw std::invalid_argument("the address of a rank is incomplete");
  std::memcpy(&other, address.data(), sizeof other);
  if (std::memcmp(other.magic, kMagic, sizeof kMagic) || other.rank != r || other.world != peers_.world ||
      other.buffer_bytes != peers_.buffer_bytes || other.pushed != peers_.pushed_bytes ||
      other.outputs != samples_.outputs || other.vocab != samples_.vocab)
    throw std::invalid_argument("the address of rank " + std::to_string(r) + " is of another build, group or model");
  if ((bool)other.by_host != by_host_)
    throw std::invalid_argument("ranks " + std::to_string(peers_.rank) + " and " + std::to_string(r) +
                                " differ on whether GPUs reach each other: set ALLSPARK_PEER_ACCESS=0 for all");
  if (r == peers_.rank) return;
  if (!by_host_) return open_peer(r, other);
  if (!blocks_[r].data()) blocks_[r] = HostBlock(other.block, block_bytes());
}

void Exchange::open_peer(int r, const Address& other) {
  if (others_[r]) return;
  const int device = index_of(other.gpu);
  // Memory of a GPU that is not visible here can be opened, too.
  if (device >= 0 && !reaches_peer(device_.index(), device))
    throw std::invalid_argument("GPU " + std::to_string(device_.index()) + " does not reach the memory of GPU " +
                                std::to_string(device) + ": set ALLSPARK_PEER_ACCESS=0 for all ranks");
  if (other.process == own_process()) {
    const cudaError_t enabled = device == device_.index() ? cudaSuccess : cudaDeviceEnablePeerAccess(device, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled) check(enabled, "reaching another GPU");
    cudaGetLastError();
    others_[r] = reinterpret_cast<char*>(other.base);
  } else {
    void* opened = nullptr;
    const cudaError_t result = cudaIpcOpenMemHandle(&opened, other.handle, cudaIpcMemLazyEnablePeerAccess);
    if (result != cudaSuccess) {
      cudaGetLastError();  // reported here
      throw std::invalid_argument("the memory of rank " + std::to_string(r) + "'s GPU " + std::to_string(other.device) +
                                  " cannot be opened (" + cudaGetErrorString(result) +
                                  "): all ranks must be in one container, or in several that share IPC and process "
                                  "ids");
    }
    opened_.push_back(opened);
    others_[r] = static_cast<char*>(opened);
  }
  tell(r, Mark::open);
}

void Exchange::tell(int r, Mark mark) const {
  char* to = others_[r] + kMarks + peers_.rank * sizeof mark;
  check(cudaMemcpy(to, &mark, sizeof mark, cudaMemcpyDefault), "telling another rank");
  check(cudaStreamSynchronize(nullptr), "telling another rank");
}

Rows Exchange::partial(int call, int width, bool is_dtype16, DType16 dtype) const {
  char* data = memory_.as() + kHeader + call % 2 * peers_.buffer_bytes;
  if (is_dtype16) return {nullptr, reinterpret_cast<uint16_t*>(data), width, dtype};
  return {reinterpret_cast<float*>(data), nullptr, width};
}

uint16_t* Exchange::place(int call, int width) const {
  // Such widths have padding, which only sum_ranks() pushes. The other rank would wait for it.
  if (peers_.world != 2 || !peers_.pushed_bytes || width % 8) return nullptr;
  return reinterpret_cast<uint16_t*>(peers_.place(1 - peers_.rank, peers_.rank, call));
}

RankSamples Exchange::samples(int begin, int width, const int* step) const {
  RankSamples samples = samples_;
  samples.peers = peers_, samples.peers.step = step, samples.begin = begin, samples.width = width;
  return samples;
}

void Exchange::check_waits() const {
  const int failed = *const_cast<const volatile int*>(failed_.as<int>());
  if (!failed) return;
  constexpr const char* kWhat[] = {"a sum over ranks", "an exchange of argmaxes", "an exchange of logits",
                                   "an exchange of samples"};
  const int rank = (failed - 1) % kMaxRanks, what = (failed - 1) / kMaxRanks;
  throw std::runtime_error("rank " + std::to_string(peers_.rank) + " waited " + std::to_string((int)seconds_) +
                           " s on its GPU for rank " + std::to_string(rank) + " in " + kWhat[what] +
                           ": its process has ended, is stopped, or did not run the step; the group is given up");
}

// Memory that other ranks have open must not be freed. A rank's last write to another rank's memory says that it has
// left. A rank that could not open the memory says nothing; it is waited for all the same, in case it is late.
void Exchange::leave() {
  if (!connects_) return;
  device_.use();
  device_.wait();
  for (int r = 0; r < peers_.world; r++)
    if (others_[r]) tell(r, Mark::left);
  for (void* opened : opened_) cudaIpcCloseMemHandle(opened);
  opened_.clear();
  const auto began = std::chrono::steady_clock::now();
  while (true) {
    Mark marks[kMaxRanks] = {};
    check(cudaMemcpy(marks, memory_.as() + kMarks, sizeof marks, cudaMemcpyDeviceToHost), "waiting for other ranks");
    const auto count = [&](Mark mark) { return std::count(marks, marks + peers_.world, mark); };
    if (count(Mark::left) == peers_.world - 1) return;
    if (std::chrono::steady_clock::now() - began > std::chrono::duration<double>(kLeaveSeconds)) {
      if (count(Mark::open)) memory_.forget();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace as::cuda
