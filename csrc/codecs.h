// Codecs: how one fp32 quantity lives in memory. The C++ twin of badam_kernels/formats.py, which explains each of them.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define BADAM_HD __host__ __device__ __forceinline__
#else
#define BADAM_HD inline __attribute__((always_inline))
#endif

// Everything with code in it lives in a namespace of its own per instruction set. Otherwise the linker would keep one
// copy of a function that several sources compile with different flags, and a plain CPU could meet an AVX instruction.
#ifndef BADAM_ISA
#define BADAM_ISA portable
#endif

namespace badam {
inline namespace BADAM_ISA {

BADAM_HD uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

BADAM_HD float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

BADAM_HD int32_t magnitude_of(uint32_t bits) { return static_cast<int32_t>(bits & 0x7FFFFFFF); }

// The bits of x, with every NaN replaced by the quiet one of its sign, whose low half is zero: rounding in integers would
// carry other NaNs into infinities and zeros.
BADAM_HD uint32_t quiet_bits_of(float x) {
    const uint32_t bits = bits_of(x);
    return x != x ? (bits | 0x7FC00000) & 0xFFC00000 : bits;
}

// --- dtypes of parameters and gradients ----------------------------------------------------------------------------------
// load is exact; round goes to nearest, ties to even. Integers stay 32 bits wide up to the store: compilers vectorise
// arithmetic that mixes widths badly.

struct Float32 {
    using Storage = float;
    static constexpr const char* name = "float32";

    BADAM_HD static float load(float x) { return x; }
};

struct BFloat16 {
    using Storage = uint16_t;
    static constexpr const char* name = "bfloat16";

    BADAM_HD static float load(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

    BADAM_HD static uint32_t round(float x) {
        const uint32_t bits = quiet_bits_of(x);
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    }
};

struct Float16 {
    using Storage = uint16_t;
    static constexpr const char* name = "float16";

    BADAM_HD static float load(uint16_t x) {
        const int32_t magnitude = x & 0x7FFF;
        const int32_t rebias = 112 << 23;  // the exponent bias is 15 in fp16, 127 in fp32
        const int32_t normal = (magnitude << 13) + rebias;
        const int32_t subnormal = static_cast<int32_t>(bits_of(static_cast<float>(magnitude) * 0x1p-24f));
        const int32_t finite = magnitude < 0x0400 ? subnormal : normal;
        const int32_t value = magnitude >= 0x7C00 ? normal + rebias : finite;
        return float_of((static_cast<uint32_t>(x & 0x8000) << 16) | static_cast<uint32_t>(value));
    }

    BADAM_HD static uint32_t round(float x) {
        const uint32_t bits = bits_of(x);
        const int32_t magnitude = magnitude_of(bits);
        const int32_t normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
        // One unit in the last place of 0.5 is 2^-24, the unit of fp16's subnormals: the sum's last bits count them, rounded
        // to nearest even. A shift by a variable distance says the same, but SSE2 has none.
        const int32_t subnormal = static_cast<int32_t>(bits_of(float_of(bits & 0x7FFFFFFF) + 0.5f)) - 0x3F000000;
        int32_t nearest = magnitude < 0x38800000 ? subnormal : normal;
        nearest = nearest > 0x7C00 ? 0x7C00 : nearest;
        nearest = x != x ? 0x7E00 : nearest;
        return ((bits >> 16) & 0x8000) | static_cast<uint32_t>(nearest);
    }
};

// --- weight codecs -------------------------------------------------------------------------------------------------------

// An fp32 weight is its own master: nothing to decode.
struct Plain {
    using Primary = Float32;
    static constexpr const char* name = "fp32";
    static constexpr const char* auxiliary_name = "";
};

// fp32 bits = (hi << 16) + lo: the parameter is hi, rounded half up, and lo always fits.
struct Split {
    using Primary = BFloat16;
    using Auxiliary = int16_t;
    static constexpr const char* name = "split";
    static constexpr const char* auxiliary_name = "int16";

    // A negative residual under a zero is never written; it is stale, and reads as none. Only such a pair has a sum of this
    // magnitude: below zero, or below minus zero, lie the NaNs with the largest bits.
    BADAM_HD static float decode(uint16_t primary, int16_t auxiliary) {
        const uint32_t hi = static_cast<uint32_t>(primary) << 16;
        const uint32_t sum = hi + static_cast<uint32_t>(static_cast<int32_t>(auxiliary));
        return float_of(magnitude_of(sum) >= 0x7FFF8000 ? hi : sum);
    }

    BADAM_HD static void encode(float x, uint16_t& primary, int16_t& auxiliary) {
        const uint32_t bits = quiet_bits_of(x);
        primary = static_cast<uint16_t>((bits + 0x8000) >> 16);
        auxiliary = static_cast<int16_t>(bits);  // bits - (hi << 16): the low half, read as signed
    }
};

// The whole fp32 master beside a 16-bit parameter. Where the parameter is no longer its rounding it was edited, and wins.
template <class Dtype>
struct Master {
    using Primary = Dtype;
    using Auxiliary = float;
    static constexpr const char* name = "master";
    static constexpr const char* auxiliary_name = "float32";

    BADAM_HD static float decode(uint16_t primary, float auxiliary) {
        return Dtype::round(auxiliary) == primary ? auxiliary : Dtype::load(primary);
    }

    BADAM_HD static void encode(float x, uint16_t& primary, float& auxiliary) {
        primary = static_cast<uint16_t>(Dtype::round(x));
        auxiliary = x;
    }
};

// --- the tables, in the order of formats.PARAM_DTYPES and formats.WEIGHT_CODECS -------------------------------------------

template <class... Types>
struct List {
    static constexpr int size = sizeof...(Types);
};

using GradDtypes = List<Float32, BFloat16, Float16>;
using WeightCodecs = List<Plain, Split, Master<BFloat16>, Master<Float16>>;

}  // namespace BADAM_ISA
}  // namespace badam
