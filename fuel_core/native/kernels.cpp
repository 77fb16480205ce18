// Products of one activation row with a stored matrix, and attention of one query: what a decode step waits for.
//
// Each weight is read once, as it is stored, in long runs; x stays float32 (dense formats) or becomes int16 per group
// of 32 (packed formats: an error of 2^-16 of the group's largest element, far below bfloat16's 2^-9), so that a pair
// of multiply-adds serves two 16-bit lanes. Rows are never split between threads: results do not depend on how many
// there are. AVX2 and FMA; wider machines run the same code. Layouts are ATen's, so ATen's own ops remain the fallback.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// The part of torch's stable C interface that is used (torch/csrc/inductor/aoti_torch/c/shim.h): declared here so that
// building needs no torch headers.
extern "C" {
typedef struct AtenTensorOpaque* Handle;
typedef struct TorchLibraryOpaque* Library;
int32_t aoti_torch_get_data_ptr(Handle, void**);
int32_t aoti_torch_get_sizes(Handle, int64_t**);
int32_t aoti_torch_get_strides(Handle, int64_t**);
int32_t aoti_torch_get_dim(Handle, int64_t*);
int32_t aoti_torch_get_dtype(Handle, int32_t*);
int32_t aoti_torch_delete_tensor_object(Handle);
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
int32_t aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, Library*);
int32_t aoti_torch_library_impl(Library, const char*, void (*)(uint64_t*, uint64_t, uint64_t));
}

namespace {

constexpr int kGroup = 32;
enum Dtype : int32_t { kByte = 0, kChar = 1, kHalf = 5, kFloat = 6 };  // c10::ScalarType

inline float widen(uint16_t bf16) {
  uint32_t bits = uint32_t(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float sum(__m256 v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}

inline float largest(__m256 v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}

inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load8(const uint16_t* p, bool half) {
  const __m128i bits = _mm_loadu_si128((const __m128i*)p);
  return half ? _mm256_cvtph_ps(bits) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline void touch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + i, _MM_HINT_T0);
}

// Memory that is read in order is asked for 4 KiB ahead: the hardware does so later, and stops at every page. Brings
// int4 from 15 to 19 GB/s of the 26 that two cores read here, int8 from 12 to 18, bf16 from 15 to 20.
inline void ahead(const void* p, int64_t bytes) {
  touch((const char*)p + 4096, bytes);
}

// Thread id's part of so many blocks.
struct Range {
  int64_t first, last;
  Range(int64_t blocks, int threads, int id) {
    const int64_t each = (blocks + threads - 1) / threads;
    first = std::min(blocks, each * id), last = std::min(blocks, first + each);
  }
};

// body(threads, id) on as many threads as torch uses; on one where the work is less than what waking another costs.
template <class Body>
void share(int64_t bytes, Body body) {
  const int threads = bytes < 24 * 1024 ? 1 : omp_get_max_threads();
  if (threads <= 1) return body(1, 0);
#pragma omp parallel num_threads(threads)
  body(threads, omp_get_thread_num());
}

// x as int16 per group of 32: x = q * scale. A group that holds NaN or infinity gets a NaN scale, and passes it on.
struct Row16 {
  std::vector<int16_t> q;
  std::vector<float> scale, total;
  Row16(const float* x, int64_t k) : q(k + 16), scale(k / kGroup), total(k / kGroup) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    for (int64_t g = 0; g < k / kGroup; g++) {
      __m256 v[4], most = _mm256_setzero_ps(), all = _mm256_setzero_ps();
      for (int i = 0; i < 4; i++) {
        v[i] = load8(x + g * kGroup + i * 8);
        most = _mm256_max_ps(most, _mm256_and_ps(v[i], magnitude));
        all = _mm256_add_ps(all, v[i]);
      }
      const float peak = largest(most);
      total[g] = sum(all);
      scale[g] = peak / 32767.0f + (total[g] - total[g]);
      const __m256 inverse = _mm256_set1_ps(peak > 1e-30f ? 32767.0f / peak : 0.0f);
      for (int i = 0; i < 2; i++) {
        const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(v[2 * i], inverse));
        const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(v[2 * i + 1], inverse));
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm256_storeu_si256((__m256i*)(q.data() + g * kGroup + i * 16), packed);
      }
    }
  }
};

// int4 in groups of 32: w = (q - 8) * scale + zero. Blocks of 2 * half rows; within one, half bytes for each k, whose
// low nibbles are the first half of the rows and whose high nibbles are the second. scales: bf16 [k / 32, n, 2].
void int4_rows(const Row16& row, const uint8_t* w, const uint16_t* scales, float* y, int64_t n, int64_t k, int64_t half,
               int threads, int id) {
    const int64_t strips = half / 16, per_block = 2 * half;
    const Range mine(n / per_block * strips, threads, id);
    const __m256i nibble = _mm256_set1_epi16(15), upper = _mm256_set1_epi32(int32_t(0xffff0000));
    for (int64_t strip = mine.first; strip < mine.last; strip++) {
      const int64_t block = strip / strips, part = strip % strips * 16, at = block * per_block + part;
      const uint8_t* p = w + block * half * k + part;
      __m256 out[4] = {};
      for (int64_t g = 0; g < k / kGroup; g++) {
        __m256i dot[4] = {};
        const int16_t* xs = row.q.data() + g * kGroup;
        // The next strip's scales lie far from this one's, where no hardware prefetcher looks.
        const uint16_t* next = scales + (g * n + at + (strips == 1 ? per_block : 16)) * 2;
        for (int i = 0; i < 2; i++) _mm_prefetch((const char*)(next + i * half * 2), _MM_HINT_T0);
        ahead(p, kGroup * half);
#pragma GCC unroll 4
        for (int i = 0; i < kGroup; i += 2, p += 2 * half) {
          const __m128i a = _mm_loadu_si128((const __m128i*)p), b = _mm_loadu_si128((const __m128i*)(p + half));
          const __m256i lo = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
          const __m256i hi = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
          int32_t pair;
          std::memcpy(&pair, xs + i, 4);
          const __m256i xx = _mm256_set1_epi32(pair);
          dot[0] = _mm256_add_epi32(dot[0], _mm256_madd_epi16(_mm256_and_si256(lo, nibble), xx));
          dot[1] = _mm256_add_epi32(dot[1], _mm256_madd_epi16(_mm256_and_si256(hi, nibble), xx));
          dot[2] = _mm256_add_epi32(dot[2], _mm256_madd_epi16(_mm256_srli_epi16(lo, 4), xx));
          dot[3] = _mm256_add_epi32(dot[3], _mm256_madd_epi16(_mm256_srli_epi16(hi, 4), xx));
        }
        const __m256 step = _mm256_set1_ps(row.scale[g]), total = _mm256_set1_ps(row.total[g]);
        const __m256 shift = _mm256_set1_ps(-8.0f * row.total[g]);
        for (int j = 0; j < 4; j++) {
          const int64_t r = at + (j & 1) * 8 + (j >> 1) * half;
          const __m256i both = _mm256_loadu_si256((const __m256i*)(scales + (g * n + r) * 2));
          const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
          const __m256 zero = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
          out[j] = _mm256_fmadd_ps(scale, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[j]), step, shift), out[j]);
          out[j] = _mm256_fmadd_ps(zero, total, out[j]);
        }
      }
      for (int j = 0; j < 4; j++) _mm256_storeu_ps(y + at + (j & 1) * 8 + (j >> 1) * half, out[j]);
    }
}

// Runs four(r) for whole fours of this thread's rows and one(r) for what is left.
template <class Four, class One>
void by_rows(int64_t n, int threads, int id, Four four, One one) {
  const Range mine((n + 3) / 4, threads, id);
  for (int64_t b = mine.first; b < mine.last; b++) {
    if (b * 4 + 4 <= n) {
      four(b * 4);
    } else {
      for (int64_t r = b * 4; r < n; r++) one(r);
    }
  }
}

// int8 per output row: w = q * scale[row]. scales: bf16 or float32 [n].
void int8_rows(const Row16& row, const int8_t* w, const void* scales, bool wide, float* y, int64_t n, int64_t k,
               int threads, int id) {
  auto rows = [&](auto count, int64_t r) {
    constexpr int kRows = decltype(count)::value;
    __m256 out[kRows] = {};
    for (int64_t g = 0; g < k / kGroup; g++) {
      const __m256i x0 = _mm256_loadu_si256((const __m256i*)(row.q.data() + g * kGroup));
      const __m256i x1 = _mm256_loadu_si256((const __m256i*)(row.q.data() + g * kGroup + 16));
      const __m256 step = _mm256_set1_ps(row.scale[g]);
      // This step's share of what the next rows need.
      ahead(w + r * k + g * kGroup * kRows, kGroup * kRows);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; i++) {
        const int8_t* p = w + (r + i) * k + g * kGroup;
        const __m256i a = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), x0);
        const __m256i b = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16))), x1);
        out[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(a, b)), step, out[i]);
      }
    }
    for (int i = 0; i < kRows; i++) {
      y[r + i] = sum(out[i]) * (wide ? ((const float*)scales)[r + i] : widen(((const uint16_t*)scales)[r + i]));
    }
  };
  by_rows(
      n, threads, id, [&](int64_t r) { rows(std::integral_constant<int, 4>(), r); },
      [&](int64_t r) { rows(std::integral_constant<int, 1>(), r); });
}

// Dense rows, float32, bf16 or f16; k is a multiple of 16.
template <class Load>
void dense_rows(const float* x, const void* w, int64_t width, float* y, int64_t n, int64_t k, int threads, int id,
                Load load) {
  auto rows = [&](auto count, int64_t r) {
    constexpr int kRows = decltype(count)::value;
    __m256 a[kRows] = {}, b[kRows] = {};
    for (int64_t i = 0; i < k; i += 16) {
      const __m256 x0 = load8(x + i), x1 = load8(x + i + 8);
      ahead((const char*)w + (r * k + i * kRows) * width, 16 * kRows * width);
#pragma GCC unroll 4
      for (int j = 0; j < kRows; j++) {
        a[j] = _mm256_fmadd_ps(load((r + j) * k + i), x0, a[j]);
        b[j] = _mm256_fmadd_ps(load((r + j) * k + i + 8), x1, b[j]);
      }
    }
    for (int j = 0; j < kRows; j++) y[r + j] = sum(_mm256_add_ps(a[j], b[j]));
  };
  by_rows(
      n, threads, id, [&](int64_t r) { rows(std::integral_constant<int, 4>(), r); },
      [&](int64_t r) { rows(std::integral_constant<int, 1>(), r); });
}

// exp for x <= 0 (Cody and Waite's reduction, a polynomial of degree 6): relative error below 3e-7; 0 below -87.
inline __m256 exp8(__m256 x) {
  const __m256 floor_at = _mm256_set1_ps(-87.0f), dead = _mm256_cmp_ps(x, floor_at, _CMP_LT_OQ);
  // max returns its second operand where one is NaN: NaN stays NaN.
  const __m256 v = _mm256_max_ps(floor_at, x);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(v, _mm256_set1_ps(1.44269504f)), 8);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), v);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
  __m256 p = _mm256_set1_ps(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(dead, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

// One part of the keys for one kv head and its queries: running maximum, sum of weights, weighted values.
struct Part {
  std::vector<float> most, weight, out;
};

struct Attention {
  const float* q;  // [heads, dim]
  int64_t heads, kv_heads, dim, length;
  float scale, cap;
  float* y;  // [heads, dim]
};

constexpr int64_t kKeys = 64;

// The scores of four keys: sums of four vectors with half the shuffles that each alone would take.
inline __m128 sum4(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

template <class Key, class Value, class Ahead>
void attend(const Attention& a, Key key, Value value, Ahead soon) {
  const int64_t reps = a.heads / a.kv_heads, dim = a.dim;
  const int64_t blocks = (a.length + kKeys - 1) / kKeys;
  const int threads = a.length * a.kv_heads * dim < 32 * 1024 ? 1 : int(std::min<int64_t>(omp_get_max_threads(), blocks));
  std::vector<Part> parts(threads);
  auto part = [&](int id) {
    Part& mine = parts[id];
    mine.most.assign(a.heads, -INFINITY);
    mine.weight.assign(a.heads, 0.0f);
    mine.out.assign(a.heads * dim, 0.0f);
    const int64_t each = (blocks + threads - 1) / threads;
    const int64_t begin = std::min(a.length, id * each * kKeys), end = std::min(a.length, (id + 1) * each * kKeys);
    alignas(32) float s[kKeys];
    for (int64_t g = 0; g < a.kv_heads; g++)
      for (int64_t at = begin; at < end; at += kKeys) {
        const int64_t count = std::min(kKeys, end - at);
        for (int64_t h = g * reps; h < (g + 1) * reps; h++) {
          const float* q = a.q + h * dim;
          // The first head of a group waits for memory: have the next block of both on its way.
          if (h == g * reps)
            for (int64_t j = 0; j < kKeys; j++) soon(g, at + kKeys + j);
          int64_t j = 0;
          for (; j + 8 <= count; j += 8) {
            __m256 dot[8] = {};
            for (int64_t i = 0; i < dim; i += 8) {
              const __m256 x = load8(q + i);
#pragma GCC unroll 8
              for (int n = 0; n < 8; n++) dot[n] = _mm256_fmadd_ps(x, key(g, at + j + n, i), dot[n]);
            }
            for (int n = 0; n < 8; n += 4) {
              const __m128 four = sum4(dot[n], dot[n + 1], dot[n + 2], dot[n + 3]);
              _mm_store_ps(s + j + n, _mm_mul_ps(four, _mm_set1_ps(a.scale)));
            }
          }
          for (; j < count; j++) {
            __m256 dot = _mm256_setzero_ps();
            for (int64_t i = 0; i < dim; i += 8) dot = _mm256_fmadd_ps(load8(q + i), key(g, at + j, i), dot);
            s[j] = sum(dot) * a.scale;
          }
          if (a.cap > 0)
            for (int64_t j = 0; j < count; j++) s[j] = std::tanh(s[j] / a.cap) * a.cap;
          float most = mine.most[h];
          // Not std::max: a score that is NaN has to stay.
          for (int64_t j = 0; j < count; j++) most = s[j] > most || s[j] != s[j] ? s[j] : most;
          for (int64_t j = count; j < kKeys; j++) s[j] = -INFINITY;
          const float keep = mine.most[h] == -INFINITY ? 0.0f : std::exp(mine.most[h] - most);
          __m256 weights = _mm256_setzero_ps();
          for (int64_t j = 0; j < kKeys; j += 8) {
            const __m256 e = exp8(_mm256_sub_ps(_mm256_load_ps(s + j), _mm256_set1_ps(most)));
            _mm256_store_ps(s + j, e);
            weights = _mm256_add_ps(weights, e);
          }
          mine.weight[h] = mine.weight[h] * keep + sum(weights);
          mine.most[h] = most;
          float* out = mine.out.data() + h * dim;
          // Several sums at once: one alone would wait for each of its additions.
          int64_t i = 0;
          for (; i + 64 <= dim; i += 64) {
            __m256 acc[8];
            for (int n = 0; n < 8; n++) acc[n] = _mm256_mul_ps(load8(out + i + n * 8), _mm256_set1_ps(keep));
            for (j = 0; j < count; j++) {
              const __m256 w = _mm256_set1_ps(s[j]);
#pragma GCC unroll 8
              for (int n = 0; n < 8; n++) acc[n] = _mm256_fmadd_ps(w, value(g, at + j, i + n * 8), acc[n]);
            }
            for (int n = 0; n < 8; n++) _mm256_storeu_ps(out + i + n * 8, acc[n]);
          }
          for (; i < dim; i += 8) {
            __m256 acc = _mm256_mul_ps(load8(out + i), _mm256_set1_ps(keep));
            for (j = 0; j < count; j++) acc = _mm256_fmadd_ps(_mm256_set1_ps(s[j]), value(g, at + j, i), acc);
            _mm256_storeu_ps(out + i, acc);
          }
        }
      }
  };
  if (threads == 1) {
    part(0);
  } else {
#pragma omp parallel num_threads(threads)
    part(omp_get_thread_num());
  }
  for (int64_t h = 0; h < a.heads; h++) {
    float most = -INFINITY, weight = 0.0f;
    for (const Part& p : parts) most = p.most[h] > most || p.most[h] != p.most[h] ? p.most[h] : most;
    float* y = a.y + h * dim;
    std::fill(y, y + dim, 0.0f);
    for (const Part& p : parts) {
      const float share = p.weight[h] == 0.0f ? 0.0f : std::exp(p.most[h] - most);
      weight += share * p.weight[h];
      for (int64_t i = 0; i < dim; i++) y[i] += share * p.out[h * dim + i];
    }
    for (int64_t i = 0; i < dim; i++) y[i] /= weight;
  }
}

template <class T>
T* data(Handle tensor) {
  void* pointer = nullptr;
  aoti_torch_get_data_ptr(tensor, &pointer);
  return static_cast<T*>(pointer);
}

int64_t size(Handle tensor, int64_t axis) {
  int64_t *sizes, dims;
  aoti_torch_get_sizes(tensor, &sizes);
  aoti_torch_get_dim(tensor, &dims);
  return sizes[axis < 0 ? axis + dims : axis];
}

int32_t dtype_of(Handle tensor) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(tensor, &dtype);
  return dtype;
}

Handle new_float(int64_t dims, const int64_t* shape) {
  int64_t strides[8];
  for (int64_t i = dims - 1, step = 1; i >= 0; i--) strides[i] = step, step *= shape[i];
  Handle out = nullptr;
  aoti_torch_empty_strided(dims, shape, strides, kFloat, 0, 0, &out);
  return out;
}

// One matrix of a product, in the format that its dtype says.
struct Matrix {
  const void *w, *scales;
  int32_t dtype, scale_dtype;
  int64_t n, k, half;
  Matrix(Handle weight, Handle scale, int64_t k, int64_t half)
      : w(data<void>(weight)), scales(data<void>(scale)), dtype(dtype_of(weight)), scale_dtype(dtype_of(scale)),
        n(dtype == kByte ? size(scale, 1) : size(weight, 0)), k(k), half(half) {}
  bool packed() const { return dtype == kByte || dtype == kChar; }
  int64_t bytes() const { return n * k * (dtype == kFloat ? 4 : packed() ? 1 : 2); }
  void rows(const float* x, const Row16* row, float* y, int threads, int id) const {
    const auto* wide = (const float*)w;
    const auto* narrow = (const uint16_t*)w;
    switch (dtype) {
      case kByte:
        return int4_rows(*row, (const uint8_t*)w, (const uint16_t*)scales, y, n, k, half, threads, id);
      case kChar:
        return int8_rows(*row, (const int8_t*)w, scales, scale_dtype == kFloat, y, n, k, threads, id);
      case kFloat:
        return dense_rows(x, w, 4, y, n, k, threads, id, [=](int64_t i) { return load8(wide + i); });
      case kHalf:
        return dense_rows(x, w, 2, y, n, k, threads, id, [=](int64_t i) { return load8(narrow + i, true); });
      default:
        return dense_rows(x, w, 2, y, n, k, threads, id, [=](int64_t i) { return load8(narrow + i, false); });
    }
  }
};

// x times each matrix, side by side in one row, in one parallel region: what waking threads costs is paid once.
Handle product(Handle x, std::initializer_list<Matrix> matrices) {
  int64_t *sizes, dims, shape[8], n = 0, bytes = 0;
  aoti_torch_get_sizes(x, &sizes);
  aoti_torch_get_dim(x, &dims);
  bool packed = false;
  for (const Matrix& m : matrices) n += m.n, bytes += m.bytes(), packed = packed || m.packed();
  for (int64_t i = 0; i < dims; i++) shape[i] = i == dims - 1 ? n : 1;
  Handle out = new_float(dims, shape);
  const float* xs = data<float>(x);
  float* y = data<float>(out);
  const Row16 row(xs, packed ? sizes[dims - 1] : 0);
  share(bytes, [&](int threads, int id) {
    float* at = y;
    for (const Matrix& m : matrices) m.rows(xs, &row, at, threads, id), at += m.n;
  });
  return out;
}

}  // namespace

// What compiled segments call directly (hence the names), and the dispatcher through the boxed forms below. The callers
// in Python have checked dtypes, shapes and contiguity (fuel_core/native/ops.py).
extern "C" {

int32_t aoti_torch_cpu_product(Handle x, Handle w, Handle s, int64_t half, Handle* out) {
  const int64_t k = size(x, -1);
  *out = product(x, {Matrix(w, s, k, half)});
  return 0;
}

int32_t aoti_torch_cpu_product2(Handle x, Handle w0, Handle s0, Handle w1, Handle s1, int64_t half, Handle* out) {
  const int64_t k = size(x, -1);
  *out = product(x, {Matrix(w0, s0, k, half), Matrix(w1, s1, k, half)});
  return 0;
}

int32_t aoti_torch_cpu_product3(Handle x, Handle w0, Handle s0, Handle w1, Handle s1, Handle w2, Handle s2,
                                int64_t half, Handle* out) {
  const int64_t k = size(x, -1);
  *out = product(x, {Matrix(w0, s0, k, half), Matrix(w1, s1, k, half), Matrix(w2, s2, k, half)});
  return 0;
}

int32_t aoti_torch_cpu_attend_one(Handle q, Handle keys, Handle values, double scale, double cap, Handle* out) {
  int64_t *ks, *vs;
  aoti_torch_get_strides(keys, &ks);
  aoti_torch_get_strides(values, &vs);
  const int64_t kg = ks[1], kt = ks[2], vg = vs[1], vt = vs[2];
  const int64_t shape[4] = {1, size(q, 1), 1, size(q, 3)};
  *out = new_float(4, shape);
  const Attention a{data<float>(q), size(q, 1), size(keys, 1), size(q, 3), size(keys, 2), float(scale), float(cap),
                    data<float>(*out)};
  const int32_t dtype = dtype_of(keys);
  if (dtype == kFloat) {
    const float *k = data<float>(keys), *v = data<float>(values);
    attend(
        a, [=](int64_t g, int64_t t, int64_t i) { return load8(k + g * kg + t * kt + i); },
        [=](int64_t g, int64_t t, int64_t i) { return load8(v + g * vg + t * vt + i); },
        [=](int64_t g, int64_t t) { touch(k + g * kg + t * kt, a.dim * 4), touch(v + g * vg + t * vt, a.dim * 4); });
  } else {
    const uint16_t *k = data<uint16_t>(keys), *v = data<uint16_t>(values);
    const bool half = dtype == kHalf;
    attend(
        a, [=](int64_t g, int64_t t, int64_t i) { return load8(k + g * kg + t * kt + i, half); },
        [=](int64_t g, int64_t t, int64_t i) { return load8(v + g * vg + t * vt + i, half); },
        [=](int64_t g, int64_t t) { touch(k + g * kg + t * kt, a.dim * 2), touch(v + g * vg + t * vt, a.dim * 2); });
  }
  return 0;
}

}  // extern "C"

namespace {

Handle tensor_at(uint64_t* stack, int i) {
  Handle handle;
  std::memcpy(&handle, stack + i, 8);
  return handle;
}

double double_at(uint64_t* stack, int i) {
  double value;
  std::memcpy(&value, stack + i, 8);
  return value;
}

// A boxed kernel owns its tensor arguments and leaves its result in their place.
void finish(uint64_t* stack, int tensors, Handle out) {
  for (int i = 0; i < tensors; i++) aoti_torch_delete_tensor_object(tensor_at(stack, i));
  std::memcpy(stack, &out, 8);
}

void boxed_product(uint64_t* stack, uint64_t, uint64_t) {
  Handle out = nullptr;
  aoti_torch_cpu_product(tensor_at(stack, 0), tensor_at(stack, 1), tensor_at(stack, 2), int64_t(stack[3]), &out);
  finish(stack, 3, out);
}

void boxed_product2(uint64_t* stack, uint64_t, uint64_t) {
  Handle out = nullptr, t[5];
  for (int i = 0; i < 5; i++) t[i] = tensor_at(stack, i);
  aoti_torch_cpu_product2(t[0], t[1], t[2], t[3], t[4], int64_t(stack[5]), &out);
  finish(stack, 5, out);
}

void boxed_product3(uint64_t* stack, uint64_t, uint64_t) {
  Handle out = nullptr, t[7];
  for (int i = 0; i < 7; i++) t[i] = tensor_at(stack, i);
  aoti_torch_cpu_product3(t[0], t[1], t[2], t[3], t[4], t[5], t[6], int64_t(stack[7]), &out);
  finish(stack, 7, out);
}

void boxed_attend_one(uint64_t* stack, uint64_t, uint64_t) {
  Handle out = nullptr;
  aoti_torch_cpu_attend_one(tensor_at(stack, 0), tensor_at(stack, 1), tensor_at(stack, 2), double_at(stack, 3),
                  double_at(stack, 4), &out);
  finish(stack, 3, out);
}

}  // namespace

// Asks for many scattered cache lines at once; an address that is none costs nothing.
extern "C" void fuel_touch(const uint64_t* addresses, int64_t count) {
  for (int64_t i = 0; i < count; i++) _mm_prefetch((const char*)addresses[i], _MM_HINT_T0);
}

extern "C" int32_t fuel_register() {
  static Library library = nullptr;
  if (library) return 0;
  if (aoti_torch_library_init_impl("fuel", "CPU", __FILE__, __LINE__, &library)) return 1;
  return aoti_torch_library_impl(library, "product", boxed_product) ||
         aoti_torch_library_impl(library, "product2", boxed_product2) ||
         aoti_torch_library_impl(library, "product3", boxed_product3) ||
         aoti_torch_library_impl(library, "attend_one", boxed_attend_one);
}
