// Vectors of floats as wide as the instruction set that this translation unit is compiled for, through the vector
// extensions of GCC and Clang. Everything lies in a namespace of its own for each instruction set (JAXPAGED_ISA), since one
// library holds several versions of each kernel and the linker must not mix them up.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace jaxpaged::JAXPAGED_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));

// Storage types. Their arithmetic is that of the float32 they stand for.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline Vec splat(float x) { return Vec{} + x; }

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Scalars.

inline float to_float(float x) { return x; }
inline float to_float(BF16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(F16 x) {
#if defined(__F16C__) || defined(__AVX512F__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t exponent = x.bits & 0x7c00u, fraction = x.bits & 0x3ffu, sign = (x.bits & 0x8000u) << 16;
  if (exponent == 0) return bit_cast<float>(sign | bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  const uint32_t bias = exponent == 0x7c00u ? 0x70000000u : 0x38000000u;  // infinity and NaN stay what they are
  return bit_cast<float>(sign | (((exponent | fraction) << 13) + bias));
#endif
}

inline BF16 round_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline F16 round_f16(float x) {
#if defined(__F16C__) || defined(__AVX512F__)
  return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the fraction, rounded, in the low bits
    return {static_cast<uint16_t>(sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13))};
#endif
}
inline void store(float* to, float x) { *to = x; }
inline void store(BF16* to, float x) { *to = round_bf16(x); }
inline void store(F16* to, float x) { *to = round_f16(x); }

// Vectors: kLanes elements from memory of any alignment.

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load(const BF16* p) {
  typedef uint16_t Half __attribute__((vector_size(kLanes * 2)));
  typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
  Half half;
  std::memcpy(&half, p, sizeof half);
  return bit_cast<Vec>(__builtin_convertvector(half, UVec) << 16);
}
inline Vec load(const F16* p) {
#if defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__) && defined(__F16C__)
  return bit_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(BF16* p, Vec v) {
  typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
  typedef uint16_t Half __attribute__((vector_size(kLanes * 2)));
  const UVec bits = bit_cast<UVec>(v);
  const UVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const UVec is_nan = bit_cast<UVec>((bits & 0x7fffffffu) > 0x7f800000u);
  const UVec kept = (rounded & ~is_nan) | ((bits | 0x400000u) & is_nan);
  const Half half = __builtin_convertvector(kept >> 16, Half);
  std::memcpy(p, &half, sizeof half);
}
inline void store(F16* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) store(p + i, static_cast<float>(v[i]));
#endif
}

// The first `count` < kLanes elements, zeros behind them; nothing beyond them is touched.
template <typename T>
inline Vec load_first(const T* p, int count) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
template <typename T>
inline void store_first(T* p, Vec v, int count) {
  T padded[kLanes];
  store(padded, v);
  std::memcpy(p, padded, count * sizeof(T));
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

// Sum and largest of the lanes, in an order that is always the same.
inline float sum(Vec v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
inline float largest(Vec v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

// exp(x) to about 1 ulp; below -87.3 it is 0, above 88.3 infinite, of NaN it is NaN.
inline Vec exp(Vec x) {
  const Vec low = splat(-87.3f), high = splat(88.3f);
  const Vec raised = low > x ? low : x;  // in this order NaN passes
  const Vec clamped = high < raised ? high : raised;
  const Vec scaled = clamped * 1.44269504088896341f;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (scaled + magic) - magic;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IVec power = (__builtin_convertvector(n, IVec) + 127) << 23;
  const Vec result = p * bit_cast<Vec>(power);
  const Vec infinity = splat(__builtin_inff());
  return x > 88.3f ? infinity : (x < -87.3f ? Vec{} : result);
}

}  // namespace jaxpaged::JAXPAGED_ISA
