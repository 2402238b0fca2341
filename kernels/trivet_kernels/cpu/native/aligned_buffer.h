// Zeroed memory on 64-byte lines, with huge pages asked for where it is large.
//
// Weights and activations live here: a line of a tile or a vector never straddles two cache lines, and a stream of
// many megabytes costs few TLB misses.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace trivet {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(int64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    const std::size_t alignment = bytes >= huge_page ? huge_page : 64;
    const std::size_t rounded = (bytes + 63) / 64 * 64;  // not to whole huge pages: a model has hundreds of these
    if (posix_memalign(&data_, alignment, rounded) != 0) data_ = nullptr;
    if (data_ == nullptr) throw std::bad_alloc();
    if (bytes >= huge_page) madvise(data_, rounded, MADV_HUGEPAGE);  // a hint: refusal is no error
    std::memset(data_, 0, rounded);
  }
  // Memory that somebody else owns and keeps for as long as this is used.
  static AlignedBuffer borrowed(void* data, int64_t bytes) {
    AlignedBuffer buffer;
    buffer.data_ = data;
    buffer.bytes_ = bytes;
    buffer.is_owned_ = false;
    return buffer;
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept { swap(other); }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~AlignedBuffer() {
    if (is_owned_) std::free(data_);
  }

  int64_t bytes() const { return bytes_; }
  template <typename T>
  [[gnu::always_inline]] T* as() {
    return static_cast<T*>(data_);
  }
  template <typename T>
  [[gnu::always_inline]] const T* as() const {
    return static_cast<const T*>(data_);
  }

 private:
  static constexpr int64_t huge_page = int64_t{2} << 20;

  void swap(AlignedBuffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(is_owned_, other.is_owned_);
  }

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  bool is_owned_ = true;
};

}  // namespace trivet
