// What attention needs of vectors beyond simd.h: one-byte types, shuffles, and functions of scores.
#pragma once

#include <cstddef>
#include <utility>

#include "simd.h"

namespace jaxpaged::JAXPAGED_ISA {

// Storage types of quantized pools, as BF16 and F16 are in simd.h.
struct Int8 {
  int8_t value;
};
struct Fp8 {  // float8_e4m3fn
  uint8_t bits;
};

typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));

// kLanes bytes as integers. GCC 12 takes the portable form apart, byte by byte.
inline IVec load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return bit_cast<IVec>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return bit_cast<IVec>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, IVec);
#endif
}

inline Vec load(const Int8* p) { return __builtin_convertvector(load_bytes(&p->value), Vec); }
inline Vec load(const Fp8* p) {
  const UVec bits = bit_cast<UVec>(load_bytes(reinterpret_cast<const int8_t*>(p))), magnitude = bits & 0x7fu;
  // A subnormal is taken for 2^-6 (1 + fraction / 8), of which 2^-6 is taken away: no float32 is subnormal on the way,
  // as the processor may be set to take those for 0.
  const UVec normal = (magnitude << 20) + (120u << 23);
  const UVec subnormal = bit_cast<UVec>(bit_cast<Vec>((magnitude << 20) + (121u << 23)) - 0x1p-6f);
  const UVec value = magnitude < 8u ? subnormal : normal;
  return bit_cast<Vec>((magnitude == 0x7fu ? UVec{} + 0x7fc00000u : value) | (bits & 0x80000000u));
}

#if defined(__AVX512BF16__)
// 2 * kLanes of them as bfloat16, which has all their values.
inline Vec load_as_bf16(const Fp8* p) {
  const __m512i bits = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __m512i subnormals = _mm512_castsi128_si512(  // 0 to 7 times 2^-9
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __mmask32 is_subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
  __m512i value = _mm512_mask_permutexvar_epi16(normal, is_subnormal, magnitude, subnormals);
  value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7fc0));
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(bits, 8), _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  return bit_cast<Vec>(_mm512_or_si512(value, sign));
}
#endif

// To nearest, ties to even; |x| <= 448 or NaN.
inline void store(Fp8* p, Vec x) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  const UVec bits = bit_cast<UVec>(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  const UVec normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - (120u << 23)) >> 20;
  // Below 2^-6 the values are multiples of 2^-9: adding 2^14 leaves that many in the low bits.
  const UVec subnormal = bit_cast<UVec>(bit_cast<Vec>(magnitude) + 0x1p14f) & 0xfu;
  const UVec value = magnitude < (121u << 23) ? subnormal : normal;
  const Bytes bytes =
      __builtin_convertvector((magnitude > 0x7f800000u ? UVec{} + 0x7fu : value) | sign, Bytes);
  std::memcpy(p, &bytes, sizeof bytes);
}

// Half of a unit upwards rounds up, as in quantize.py; NaN becomes 0.
inline void store(Int8* p, Vec x) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Vec up = x + 0.5f;
  const Vec truncated = __builtin_convertvector(__builtin_convertvector(up, IVec), Vec);
  const Vec floor = truncated > up ? truncated - 1.0f : truncated;
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(x == x ? floor : Vec{}, IVec), Bytes);
  std::memcpy(p, &bytes, sizeof bytes);
}

namespace paged {

// Two vectors of 16-bit elements, element by element: a0 b0 a1 b1 ...
struct Pairs {
  Vec low, high;  // of the first and of the second half of the elements
};
template <size_t... I>
inline Pairs zip(Vec a, Vec b, std::index_sequence<I...>) {
  typedef uint16_t Halves __attribute__((vector_size(kLanes * 4)));
  const Halves x = bit_cast<Halves>(a), y = bit_cast<Halves>(b);
  constexpr size_t n = 2 * kLanes;
  return {bit_cast<Vec>(__builtin_shufflevector(x, y, (I % 2 * n + I / 2)...)),
          bit_cast<Vec>(__builtin_shufflevector(x, y, (I % 2 * n + (I + n) / 2)...))};
}
inline Pairs zip(Vec a, Vec b) { return zip(a, b, std::make_index_sequence<2 * kLanes>()); }

// Vectors seen as quarters of four lanes, as the processors do whose fastest shuffles stay within these.
inline constexpr int kQuarters = kLanes / 4;

// Of each quarter, four lanes of a or, numbered from 4 on, of b.
template <int k0, int k1, int k2, int k3, size_t... I>
inline Vec shuffle_quarters(Vec a, Vec b, std::index_sequence<I...>) {
  constexpr int from[4] = {k0, k1, k2, k3};
  return __builtin_shufflevector(a, b, (I / 4 * 4 + from[I % 4] % 4 + from[I % 4] / 4 * kLanes)...);
}
// The even or the odd quarters of a, then those of b.
template <int kOdd, size_t... I>
inline Vec every_other_quarter(Vec a, Vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, ((I / 4 * 2 + kOdd) * 4 + I % 4)...);
}

// rows[i][j] and rows[j][i] change places: first within squares of four by four, then the squares.
inline void transpose(Vec (&rows)[kLanes]) {
  constexpr auto lanes = std::make_index_sequence<kLanes>();
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    const Vec low01 = shuffle_quarters<0, 4, 1, 5>(rows[i], rows[i + 1], lanes);
    const Vec high01 = shuffle_quarters<2, 6, 3, 7>(rows[i], rows[i + 1], lanes);
    const Vec low23 = shuffle_quarters<0, 4, 1, 5>(rows[i + 2], rows[i + 3], lanes);
    const Vec high23 = shuffle_quarters<2, 6, 3, 7>(rows[i + 2], rows[i + 3], lanes);
    rows[i] = shuffle_quarters<0, 1, 4, 5>(low01, low23, lanes);
    rows[i + 1] = shuffle_quarters<2, 3, 6, 7>(low01, low23, lanes);
    rows[i + 2] = shuffle_quarters<0, 1, 4, 5>(high01, high23, lanes);
    rows[i + 3] = shuffle_quarters<2, 3, 6, 7>(high01, high23, lanes);
  }
#pragma GCC unroll 2
  for (int pass = 1; pass < kQuarters; pass *= 2) {
    Vec dealt[kLanes];
#pragma GCC unroll 4
    for (int column = 0; column < 4; ++column) {
#pragma GCC unroll 2
      for (int i = 0; i < kQuarters / 2; ++i) {
        const Vec a = rows[8 * i + column], b = rows[8 * i + 4 + column];
        dealt[4 * i + column] = every_other_quarter<0>(a, b, lanes);
        dealt[4 * (i + kQuarters / 2) + column] = every_other_quarter<1>(a, b, lanes);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = dealt[i];
  }
}

template <size_t kBy, size_t... I>
inline Vec rotate(Vec v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, ((I + kBy) % sizeof...(I))...);
}

// The largest lane, in all lanes.
template <size_t kBy = kLanes / 2>
inline Vec largest_everywhere(Vec v) {
  if constexpr (kBy == 0) {
    return v;
  } else {
    return largest_everywhere<kBy / 2>(max(v, rotate<kBy>(v, std::make_index_sequence<kLanes>())));
  }
}

// 2^x for x <= 0, to about 2 ulp; 0 below -126, so that no weight is subnormal. NaN stays NaN.
inline Vec exp2_of_nonpositive(Vec x) {
  const Vec least = splat(-126.0f);
  const Vec clamped = least > x ? least : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec shifted = clamped + magic;
  const Vec r = clamped - (shifted - magic);
  Vec p = splat(1.535336188319500e-4f);
  p = p * r + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  const Vec power = bit_cast<Vec>((bit_cast<UVec>(shifted) << 23) + 0x3f800000u);
  return least > x ? Vec{} : p * power;
}

// tanh(x) to a few ulp. NaN stays NaN.
inline Vec tanh(Vec x) {
  const UVec sign = bit_cast<UVec>(x) & 0x80000000u;
  const Vec magnitude = bit_cast<Vec>(bit_cast<UVec>(x) ^ sign);
  const Vec shrunk = exp2_of_nonpositive(magnitude * -2.88539008177792681f);  // e^(-2 |x|)
  const Vec large = (1.0f - shrunk) / (1.0f + shrunk);
  const Vec square = x * x;  // near 0, where `large` cancels, an odd polynomial
  Vec p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return magnitude < 0.625f ? p * square * x + x : bit_cast<Vec>(bit_cast<UVec>(large) | sign);
}

}  // namespace paged
}  // namespace jaxpaged::JAXPAGED_ISA
