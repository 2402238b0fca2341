// What this machine can do at most: reads of memory, products out of registers, meetings of a team.
//
// Loops that do nothing else, timed: the figures that products, attention and whole steps are measured against. Each
// instruction set has a file of its own, as the products have; what is timed is what the instruction set in use offers.
#pragma once

#include <cstdint>

namespace trivet {

enum class LimitFormat { f32, bf16, i8 };

// Multiplies out of registers `turns` times.
struct ProductLoop {
  void (*run)(int64_t turns) = nullptr;  // null: there is none
  int64_t operations = 0;                // additions and multiplications of a turn
};

// Reads `bytes`, a multiple of 512; the result keeps the compiler from leaving it out.
using ReadLoop = int64_t (*)(const uint8_t* from, int64_t bytes);

ReadLoop read_loop_plain();
ReadLoop read_loop_avx2();
ReadLoop read_loop_avx512();
ProductLoop product_loop_plain(LimitFormat format);
ProductLoop product_loop_avx2(LimitFormat format);
ProductLoop product_loop_avx512(LimitFormat format, bool has_bf16, bool has_vnni);
ProductLoop product_loop_amx(LimitFormat format);

// Each writes the seconds of every round. A member of the team reads an array of its own, `bytes_each` long, `passes`
// times a round; false when there is no memory for it.
bool time_reads(int threads, int64_t bytes_each, int64_t passes, int64_t rounds, double* seconds);
// Returns the operations of a round by all threads together.
double time_products(int threads, LimitFormat format, int64_t turns, int64_t rounds, double* seconds);
// A phase in which there is nothing to do, as the decoder's phases are run.
void time_meetings(int threads, int64_t meetings, int64_t rounds, double* seconds);

}  // namespace trivet
