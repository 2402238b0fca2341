// Regions of huge pages, and which of them a buffer lies in.
#include "aligned_buffer.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

namespace trivet {

struct Region {
  char* mapped;
  int64_t mapped_bytes;
  char* free;  // what follows is
  char* end;
  int64_t buffers = 0;
};

namespace {

constexpr int64_t HUGE_PAGE = int64_t{2} << 20;
constexpr int64_t REGION_BYTES = 32 * HUGE_PAGE;
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t LEAST_BYTES = INT64_MAX;  // each on its own, so that a step beyond its end is seen
#else
constexpr int64_t LEAST_BYTES = 64 << 10;  // smaller ones are left to malloc
#endif

std::mutex mutex;
Region* current = nullptr;  // that new buffers are put into

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

Region* map_region(int64_t bytes) {
  const int64_t mapped_bytes = round_up(bytes, HUGE_PAGE) + HUGE_PAGE;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* begin = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(mapped), HUGE_PAGE));
  char* end = static_cast<char*>(mapped) + mapped_bytes;
  madvise(begin, end - begin, MADV_HUGEPAGE);  // a hint: refusal is no error
  return new Region{static_cast<char*>(mapped), mapped_bytes, begin, end};
}

void unmap_if_empty(Region* region) {
  if (region != nullptr && region->buffers == 0) {
    munmap(region->mapped, region->mapped_bytes);
    delete region;
  }
}

}  // namespace

AlignedBuffer::AlignedBuffer(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const int64_t rounded = round_up(bytes, 64);
  if (rounded < LEAST_BYTES) {
    if (posix_memalign(&data_, 64, rounded) != 0) data_ = nullptr;
    if (data_ == nullptr) throw std::bad_alloc();
  } else {
    const std::lock_guard<std::mutex> lock(mutex);
    if (rounded >= REGION_BYTES / 4) {
      region_ = map_region(rounded);
    } else {
      if (current == nullptr || current->end - current->free < rounded) {
        Region* next = map_region(REGION_BYTES);
        unmap_if_empty(current);
        current = next;
      }
      region_ = current;
    }
    data_ = region_->free;
    region_->free += rounded;
    ++region_->buffers;
  }
  std::memset(data_, 0, rounded);
}

void AlignedBuffer::release() {
  if (region_ == nullptr) return std::free(data_);
  const std::lock_guard<std::mutex> lock(mutex);
  --region_->buffers;
  if (region_->buffers > 0) return;
  if (region_ == current) current = nullptr;
  unmap_if_empty(region_);
}

}  // namespace trivet
