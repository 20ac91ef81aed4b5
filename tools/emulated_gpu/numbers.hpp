// The number formats of a GPU and the arithmetic of its instructions.
//
// Approximate instructions are exact here, and subnormal numbers are not flushed to zero. Source: NVIDIA, PTX ISA 9.0.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

using half = _Float16;

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value) {  // round to nearest, ties to even
    uint32_t whole = std::bit_cast<uint32_t>(value);
    bits = value != value ? 0x7fff : (whole + 0x7fff + ((whole >> 16) & 1)) >> 16;
  }
};

template <class T>
struct Pair {
  T x, y;
};

using half2 = Pair<half>;
using bfloat2 = Pair<bfloat>;

inline float number(float x) { return x; }
inline double number(double x) { return x; }
inline float number(half x) { return x; }
inline float number(bfloat x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

template <size_t size>
struct Unsigned;
template <>
struct Unsigned<2> { using type = uint16_t; };
template <>
struct Unsigned<4> { using type = uint32_t; };
template <>
struct Unsigned<8> { using type = uint64_t; };

template <class T, class R>
T as(R value) {  // the value of a register as a type
  if constexpr (std::is_integral_v<T>) return static_cast<T>(value);
  else return std::bit_cast<T>(static_cast<typename Unsigned<sizeof(T)>::type>(value));
}

template <class R, class T>
R to(T value) {  // the bits of a value, for a register
  if constexpr (std::is_integral_v<T>) return static_cast<R>(value);
  else return static_cast<R>(std::bit_cast<typename Unsigned<sizeof(T)>::type>(value));
}

template <class T, class F, class... Rest>
T each(F f, T first, Rest... rest) {  // for both halves of a pair; 16-bit formats are computed in double
  if constexpr (std::is_same_v<T, half2> || std::is_same_v<T, bfloat2>) {
    return {each(f, first.x, rest.x...), each(f, first.y, rest.y...)};
  } else if constexpr (sizeof(T) == 2) {
    return T(float(f(double(number(first)), double(number(rest))...)));
  } else {
    return f(first, rest...);
  }
}

// Integers wrap, so they are computed as unsigned.
#define DEFINE_BINARY(name, sign)                                                        \
  template <class T>                                                                     \
  T name(T a, T b) {                                                                     \
    if constexpr (std::is_integral_v<T>) return T(uint64_t(a) sign uint64_t(b));         \
    else return each([](auto x, auto y) { return x sign y; }, a, b);                     \
  }

DEFINE_BINARY(add_of, +)
DEFINE_BINARY(sub_of, -)
DEFINE_BINARY(mul_of, *)
#undef DEFINE_BINARY

template <class T>
T mul_high_of(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  static_assert(sizeof(T) == 4);
  return T((Wide(a) * Wide(b)) >> 32);
}

template <class T>
T div_of(T a, T b) {
  if constexpr (std::is_integral_v<T>) return b == 0 ? T(-1) : std::is_signed_v<T> && b == T(-1) ? T(0 - uint64_t(a)) : T(a / b);
  else return a / b;
}

template <class T>
T rem_of(T a, T b) { return b ? a % b : a; }

template <class T>
T fma_of(T a, T b, T c) {
  return each([](auto x, auto y, auto z) { return std::fma(x, y, z); }, a, b, c);
}

template <class T>
T min_of(T a, T b) {
  if constexpr (std::is_integral_v<T>) return std::min(a, b);
  else return each([](auto x, auto y) { return std::fmin(x, y); }, a, b);
}

template <class T>
T max_of(T a, T b) {
  if constexpr (std::is_integral_v<T>) return std::max(a, b);
  else return each([](auto x, auto y) { return std::fmax(x, y); }, a, b);
}

template <class T>
T and_of(T a, T b) { return a & b; }
template <class T>
T or_of(T a, T b) { return a | b; }
template <class T>
T xor_of(T a, T b) { return a ^ b; }
template <class T>
T copysign_of(T sign, T a) { return std::copysign(a, sign); }

template <class T>
T not_of(T a) {
  if constexpr (std::is_same_v<T, bool>) return !a;
  else return T(~a);
}

template <class T>
T neg_of(T a) {
  if constexpr (std::is_integral_v<T>) return T(0 - uint64_t(a));
  else return -a;
}

template <class T>
T abs_of(T a) { return each([](auto x) { return std::fabs(x); }, a); }
template <class T>
T ex2_of(T a) { return std::exp2(a); }
template <class T>
T lg2_of(T a) { return std::log2(a); }
template <class T>
T sin_of(T a) { return std::sin(a); }
template <class T>
T cos_of(T a) { return std::cos(a); }
template <class T>
T rcp_of(T a) { return 1 / a; }
template <class T>
T rsqrt_of(T a) { return 1 / std::sqrt(a); }
template <class T>
T tanh_of(T a) { return std::tanh(a); }
template <class T>
uint32_t clz_of(T a) { return std::countl_zero(a); }

template <class T>
T shl_of(T a, uint32_t by) { return by < 8 * sizeof(T) ? T(a << by) : T(0); }
template <class T>
T shr_of(T a, uint32_t by) { return by < 8 * sizeof(T) ? T(a >> by) : std::is_signed_v<T> && a < 0 ? T(-1) : T(0); }

template <class T>
T bfe_of(T a, uint32_t start, uint32_t count) {  // a signed field is sign-extended
  constexpr uint32_t width = 8 * sizeof(T);
  start &= 255, count &= 255;
  if (!count) return 0;
  uint32_t last = std::min(start + count, width) - 1;
  if (start >= width) return std::is_signed_v<T> && a < 0 ? T(-1) : T(0);
  return shr_of(shl_of(a, width - 1 - last), width - 1 - last + start);
}

template <class T>
T bfi_of(T a, T into, uint32_t start, uint32_t count) {
  start &= 255, count &= 255;
  T mask = shl_of(count < 8 * sizeof(T) ? T((T(1) << count) - 1) : T(-1), start);
  return (into & ~mask) | (shl_of(a, start) & mask);
}

inline uint32_t prmt_of(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t which = selector >> (4 * i) & 15, byte = bytes >> (8 * (which & 7)) & 255;
    result |= (which & 8 ? (byte & 128 ? 255 : 0) : byte) << (8 * i);
  }
  return result;
}

template <class T>
T rni_of(T x) { return std::nearbyint(x); }
template <class T>
T rzi_of(T x) { return std::trunc(x); }
template <class T>
T rmi_of(T x) { return std::floor(x); }
template <class T>
T rpi_of(T x) { return std::ceil(x); }

template <class I, class T>
I nearest(T x) {  // round to an integer type, clamped to its range
  using Limits = std::numeric_limits<I>;
  return x != x ? I(0) : x <= T(Limits::min()) ? Limits::min() : x >= T(Limits::max()) ? Limits::max() : I(x);
}

template <class T, class I>
T convert(I value) {
  if constexpr (std::is_same_v<T, double>) return double(value);
  else return T(float(value));
}

template <class T, class I>
T convert_down(I value) {
  T result = convert<T>(value);
  return double(result) > double(value) ? std::nextafter(result, -std::numeric_limits<T>::infinity()) : result;
}

inline float of_fp8(uint8_t bits, int num_exponent_bits) {
  int num_fraction_bits = 7 - num_exponent_bits, bias = (1 << (num_exponent_bits - 1)) - 1;
  int exponent = (bits & 127) >> num_fraction_bits, fraction = bits & ((1 << num_fraction_bits) - 1);
  float sign = bits & 128 ? -1.f : 1.f;
  if (num_exponent_bits == 4 && (bits & 127) == 127) return NAN;
  if (num_exponent_bits == 5 && exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (!exponent) return sign * std::ldexp(float(fraction), 1 - bias - num_fraction_bits);
  return sign * std::ldexp(float(fraction | 1 << num_fraction_bits), exponent - bias - num_fraction_bits);
}

inline uint8_t to_fp8(float value, int num_exponent_bits) {  // the nearest finite number, ties to even
  uint8_t low = 0, high = num_exponent_bits == 4 ? 0x7e : 0x7b, sign = std::signbit(value) ? 128 : 0;
  float size = std::fabs(value);
  if (value != value) return 0x7f;
  if (size >= of_fp8(high, num_exponent_bits)) return sign | high;
  while (high - low > 1) {  // codes are in numeric order
    uint8_t middle = (low + high) / 2;
    (of_fp8(middle, num_exponent_bits) <= size ? low : high) = middle;
  }
  float below = size - of_fp8(low, num_exponent_bits), above = of_fp8(high, num_exponent_bits) - size;
  return sign | (below < above || (below == above && !(low & 1)) ? low : high);
}

inline uint32_t to_e4m3(float x) { return to_fp8(x, 4); }
inline uint32_t to_e5m2(float x) { return to_fp8(x, 5); }
inline uint32_t half2_of_fp8(uint16_t two, int num_exponent_bits) {
  return to<uint32_t>(half2{half(of_fp8(two & 255, num_exponent_bits)), half(of_fp8(two >> 8, num_exponent_bits))});
}
inline uint32_t half2_of_e4m3x2(uint16_t two) { return half2_of_fp8(two, 4); }
inline uint32_t half2_of_e5m2x2(uint16_t two) { return half2_of_fp8(two, 5); }

template <class P, class W>
std::array<P, sizeof(W) / sizeof(P)> parts(W whole) {
  return std::bit_cast<std::array<P, sizeof(W) / sizeof(P)>>(whole);
}

template <class W, class P>
W joined(std::array<P, sizeof(W) / sizeof(P)> parts) { return std::bit_cast<W>(parts); }

// Memory.

template <class T, int count>
std::array<T, count> load(const uint8_t* from) {
  std::array<T, count> values;
  memcpy(&values, from, sizeof values);
  return values;
}

template <class T, int count>
void store(uint8_t* to, std::array<T, count> values) { memcpy(to, &values, sizeof values); }

template <class T, class F>
T change(uint8_t* place, F f) {  // one thread runs at a time, so this is atomic
  T before = load<T, 1>(place)[0];
  store<T, 1>(place, {f(before)});
  return before;
}

template <class T>
T atom_add(uint8_t* place, T value) { return change<T>(place, [=](T old) { return add_of(old, value); }); }
template <class T>
T atom_min(uint8_t* place, T value) { return change<T>(place, [=](T old) { return std::min(old, value); }); }
template <class T>
T atom_inc(uint8_t* place, T most) { return change<T>(place, [=](T old) { return old >= most ? T(0) : T(old + 1); }); }
template <class T>
T atom_cas(uint8_t* place, T expected, T value) {
  return change<T>(place, [=](T old) { return old == expected ? value : old; });
}
