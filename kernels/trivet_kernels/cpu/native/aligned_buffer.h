// Zeroed memory on 64-byte lines, on huge pages where it is large.
//
// Weights and activations live here: a line of a tile or a vector never straddles two cache lines, and a stream of
// many megabytes costs few TLB misses. A model has hundreds of weights smaller than two huge pages, so large buffers
// lie side by side in regions of many such pages (aligned_buffer.cpp), which are given back when all in them are gone.
#pragma once

#include <cstdint>
#include <utility>

namespace trivet {

struct Region;

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(int64_t bytes);  // raises std::bad_alloc
  // Memory of somebody else, as it is, which must outlive this.
  static AlignedBuffer borrowed(void* data, int64_t bytes) {
    AlignedBuffer buffer;
    buffer.data_ = data;
    buffer.bytes_ = bytes;
    buffer.owned_ = false;
    return buffer;
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept { swap(other); }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~AlignedBuffer() {
    if (owned_ && data_ != nullptr) release();
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
  void release();
  void swap(AlignedBuffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(region_, other.region_);
    std::swap(owned_, other.owned_);
  }

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Region* region_ = nullptr;  // that it lies in; null: an allocation of its own
  bool owned_ = true;
};

}  // namespace trivet
