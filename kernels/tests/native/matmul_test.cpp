// Products against a loop in double, and bit for bit against the same rows alone and other splits.
#include "matmul.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <random>
#include <vector>

#include "bfloat16.h"
#include "isa.h"
using namespace trivet;
static int failures = 0;
static const char* names[] = {"f32", "bf16", "i8", "q4_0", "q4_1", "q8_0", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "q8_minimum"};
static void run(const PackedWeight& w, const std::vector<float>& x, int64_t ldx, int64_t m, std::vector<float>& out,
                int64_t ldo, int splits, Output o = Output::store) {
  Activations a(w.format, m, w.k);
  prepare(a, x.data(), ldx, 0, m / 2);
  prepare(a, x.data(), ldx, m / 2, m);
  for (int s = 0; s < splits; ++s) {
    const int64_t b = w.panels * s / splits, e = w.panels * (s + 1) / splits;
    const int64_t cut = splits > 1 ? m / 2 / 16 * 16 : 0;
    matmul(w, a, {0, cut, b, e}, out.data(), ldo, o);
    matmul(w, a, {cut, m, b, e}, out.data(), ldo, o);
  }
}
static void fail(const char* what, WeightFormat f, int64_t n, int64_t k, int64_t m, double a, double b) {
  if (++failures < 30)
    printf("  FAIL %s %s %s n %ld k %ld m %ld: %g %g\n", what, names[int(f)], isa_name(isa_in_use()), n, k, m, a, b);
}
// Bytes of a block, values in it, and where its halves lie.
struct Source {
  int64_t bytes, values;
  std::vector<int64_t> halves;
};
static Source shape_of(WeightFormat f) {
  switch (f) {
    case WeightFormat::q4_0: return {18, 32, {0}};
    case WeightFormat::q4_1: return {20, 32, {0, 2}};
    case WeightFormat::q5_0: return {22, 32, {0}};
    case WeightFormat::q5_1: return {24, 32, {0, 2}};
    case WeightFormat::q4_k: return {144, 256, {0, 2}};
    case WeightFormat::q5_k: return {176, 256, {0, 2}};
    case WeightFormat::q6_k: return {210, 256, {208}};
    default: return {34, 32, {0}};
  }
}
static std::vector<float> i8_bits;
static void check(WeightFormat f, int64_t n, int64_t k, int64_t m, unsigned seed, bool bits_across) {
  std::mt19937 g(seed);
  std::normal_distribution<float> d;
  std::vector<float> w(n * k), x(m * k);
  for (auto& v : w) v = d(g) * 0.05f;
  for (auto& v : x) v = d(g);
  const bool blocks = f >= WeightFormat::q4_0;
  PackedWeight p(f, n, k);
  const int64_t half = std::min<int64_t>(n, n / 2 / 32 * 32);
  if (!blocks || f == WeightFormat::q8_minimum) {
    pack_f32(p, w.data(), 0, half);
    pack_f32(p, w.data() + half * k, half, n);
  } else {
    // Any bytes, but for the halves that scales and minimums are in. Values are held to the checkpoint's in Python.
    const auto [bytes, values, halves] = shape_of(f);
    const int64_t row = k / values * bytes;
    std::vector<uint8_t> q(n * row);
    for (auto& byte : q) byte = g();
    for (int64_t at = 0; at < n * row; at += bytes) {
      for (int64_t h : halves) {
        const auto value = static_cast<_Float16>(d(g) * 0.02f);
        memcpy(&q[at + h], &value, 2);
      }
    }
    pack_blocks(p, f, q.data(), 0, half);
    pack_blocks(p, f, q.data() + half * row, half, n);
  }
  if (blocks) {
    std::vector<float> back(k);
    for (int64_t j = 0; j < n; ++j) {
      unpack_row(p, j, back.data());
      for (int64_t t = 0; t < k && f == WeightFormat::q8_minimum; ++t) {
        if (!(std::fabs(back[t] - w[j * k + t]) < 0.0012f)) fail("quantised", f, n, k, m, back[t], w[j * k + t]);
      }
      std::copy(back.begin(), back.end(), w.begin() + j * k);
    }
  }
  const int64_t ldo = n + 3;
  std::vector<float> out(m * ldo, -7.0f), other = out;
  run(p, x, k, m, out, ldo, 1);
  std::vector<float> xr = x, wr = w;
  if (f == WeightFormat::bf16) {
    for (auto& v : xr) v = from_bfloat16(to_bfloat16(v));
  }
  if (f == WeightFormat::bf16) {
    for (auto& v : wr) v = from_bfloat16(to_bfloat16(v));
  }
  double worst = 0;
  std::vector<double> sums(n), greatest(n);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t t = 0; t < k; ++t) {
      sums[j] += std::fabs(wr[j * k + t]);
      greatest[j] = std::max(greatest[j], double(std::fabs(w[j * k + t])));
    }
  }
  for (int64_t i = 0; i < m; ++i) {
    double ax = 0, sx = 0;
    for (int64_t t = 0; t < k; ++t) {
      ax = std::max(ax, double(std::fabs(x[i * k + t])));
      sx += std::fabs(xr[i * k + t]);
    }
    for (int64_t j = 0; j < n; ++j) {
      const double sw = sums[j], aw = greatest[j];
      double s = 0, mag = 0;
      for (int64_t t = 0; t < k; ++t) {
        double q = double(xr[i * k + t]) * wr[j * k + t];
        s += q;
        mag += std::fabs(q);
      }
      double tq = 0;  // activations are off by half a step of their block
      if (blocks) {
        for (int64_t b = 0; b < k; b += 32) {
          double a = 0, ws = 0;
          for (int64_t t = b; t < b + 32; ++t) {
            a = std::max(a, double(std::fabs(x[i * k + t])));
            ws += std::fabs(w[j * k + t]);
          }
          tq += a / (2 * 2032) * ws;
        }
      }
      // int8: each side is off by at most half a step; floats: 2^-24 an addition, with a margin.
      double tolerance = f == WeightFormat::i8 ? 1.01 * (ax / 254 * sw + aw / 254 * sx + k * ax * aw / 254 / 254)
                         : blocks              ? 1.01 * tq + mag * 6e-6
                                               : mag * 3e-6 + 1e-30;
      double e = std::fabs(s - out[i * ldo + j]);
      worst = std::max(worst, e / tolerance);
      if (!(e <= tolerance)) fail("value", f, n, k, m, s, out[i * ldo + j]);
    }
    for (int64_t j = n; j < ldo; ++j)
      if (out[i * ldo + j] != -7.0f) fail("beyond", f, n, k, m, i, j);
  }
  for (int splits : {2, 3, 5}) {
    other.assign(m * ldo, -7.0f);
    run(p, x, k, m, other, ldo, splits);
    if (memcmp(other.data(), out.data(), out.size() * 4)) fail("split", f, n, k, m, splits, 0);
  }
  for (int64_t part : {1, 2, 3, 4, 5, 7, 9, 13, 16, 17, 31, 33, 48, 64})
    // All over a few rows; of many rows some, at every place within a block of rows.
    for (int64_t at = 0; at < m && part < m; at += (part == 1 ? 1 : part + 3) + (m > 100 ? 23 : 0)) {
      const int64_t c = std::min(part, m - at);
      std::vector<float> xs(x.begin() + at * k, x.begin() + (at + c) * k), o(c * ldo, -7.0f);
      run(p, xs, k, c, o, ldo, 1);
      if (memcmp(o.data(), out.data() + at * ldo, o.size() * 4)) fail("batch", f, n, k, m, part, at);
    }
  if (const PrepareColumns prepare_columns = columns_preparer(f)) {
    for (int64_t width : {16, 64}) {  // in blocks sixteen columns are not enough
      if (width < 32 && is_block_format(f)) continue;
      Activations a(f, m, k);
      for (int64_t c = 0; c < k; c += width) prepare_columns(a, x.data() + c, k, {0, m, c, std::min(c + width, k)});
      other.assign(m * ldo, -7.0f);
      matmul(p, a, {0, m, 0, p.panels}, other.data(), ldo, Output::store);
      if (memcmp(other.data(), out.data(), out.size() * 4)) fail("columns", f, n, k, m, width, 0);
    }
  }
  {  // every row of every panel is handed over once, with the bits that are stored otherwise
    Activations a(f, m, k);
    prepare(a, x.data(), k, 0, m);
    other.assign(m * ldo, -7.0f);
    auto take = [&](float* sums, int64_t row, int64_t rows, int64_t panel) {
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = panel * 32; j < std::min(n, panel * 32 + 32); ++j) {
          float& place = other[(row + i) * ldo + j];
          if (place != -7.0f) fail("taken twice", f, n, k, m, row + i, j);
          place = sums[i * 32 + j % 32];
          sums[i * 32 + j % 32] = NAN;  // the memory is the taker's
        }
    };
    matmul(p, a, {0, m, 0, p.panels}, taker_of(take));
    if (memcmp(other.data(), out.data(), out.size() * 4)) fail("taken", f, n, k, m, 0, 0);
  }
  other.assign(m * ldo, 0.25f);
  run(p, x, k, m, other, ldo, 2, Output::add);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      if (other[i * ldo + j] != 0.25f + out[i * ldo + j]) fail("add", f, n, k, m, i, j);
  std::vector<float> back(k);
  for (int64_t j = 0; j < n; j += 7) {
    unpack_row(p, j, back.data());
    double aw = 0;
    for (int64_t t = 0; t < k; ++t) aw = std::max(aw, double(std::fabs(w[j * k + t])));
    for (int64_t t = 0; t < k; ++t)
      if (std::fabs(back[t] - wr[j * k + t]) > (f == WeightFormat::i8 ? aw / 253 : 0))
        fail("unpack", f, n, k, m, back[t], wr[j * k + t]);
  }
  // A row with NaN or infinity spoils itself alone.
  if (m > 2) {
    std::vector<float> xn = x;
    xn[k + k / 2] = NAN;
    xn[2 * k] = INFINITY;
    other.assign(m * ldo, -7.0f);
    run(p, xn, k, m, other, ldo, 1);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        float v = other[i * ldo + j];
        if (i == 1 || i == 2 ? std::isfinite(v) : v != out[i * ldo + j]) fail("nan", f, n, k, m, i, j);
      }
  }
  if (bits_across) {
    if (i8_bits.empty())
      i8_bits = out;
    else if (memcmp(i8_bits.data(), out.data(), out.size() * 4))
      fail("across", f, n, k, m, 0, 0);
  }
  printf("%-6s %-5s n %5ld k %5ld m %4ld worst %.3f of tolerance\n", isa_name(isa_in_use()), names[int(f)], n, k, m,
         worst);
}
int main() {
  // The plain functions are slow; that they are right and add in one order shows with fewer panels and rows too.
  const auto less = [](int64_t size, int64_t plain) { return isa_in_use() == Isa::plain ? plain : size; };
  for (auto f = WeightFormat::q4_0; f <= WeightFormat::q8_minimum; f = WeightFormat(int(f) + 1)) {
    i8_bits.clear();
    const int64_t unit = shape_of(f).values;  // of k
    for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512, Isa::amx}) {
      use_isa(isa);
      if (isa_in_use() != isa) continue;
      check(f, 100, unit == 32 ? 224 : 512, 70, 3, isa != Isa::plain);
      check(f, 33, unit, 3, 1, false);
      check(f, 1, unit == 32 ? 64 : 512, 1, 2, false);
      check(f, less(256, 96), unit == 32 ? 576 : 768, less(70, 37), 4, false);
      if (f == WeightFormat::q4_1 || f == WeightFormat::q6_k) check(f, 64, 1536, less(300, 70), 6, false);
    }
  }
  for (auto f : {WeightFormat::f32, WeightFormat::bf16, WeightFormat::i8}) {
    i8_bits.clear();
    for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512, Isa::amx}) {
      use_isa(isa);
      if (isa_in_use() != isa) continue;
      check(f, 100, 200, 70, 3, f == WeightFormat::i8);
      check(f, 33, 7, 3, 1, false);
      check(f, 1, 1, 1, 2, false);
      check(f, less(256, 96), 576, less(70, 37), 4, false);
      check(f, 97, 131, 45, 5, false);
      check(f, 64, 1536, less(f == WeightFormat::i8 ? 650 : 330, 130), 6, false);  // more than a chunk of rows
    }
  }
  printf(failures ? "%d FAILURES\n" : "all right\n", failures);
  return failures != 0;
}
