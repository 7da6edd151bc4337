// All 2^32 fp32 bit patterns through the codecs. Prints one line per property: its name and how many patterns break it.

#include <cstdio>

#include "codecs.h"

using namespace badam;

static constexpr uint64_t ALL = uint64_t{1} << 32;
static constexpr uint32_t INFINITE = 0x7F800000;

static uint64_t lost_by_split() {
    uint64_t count = 0;
    for (uint64_t start = 0; start < ALL; start += 1 << 16) {
        uint32_t broken = 0;
        for (uint32_t low = 0; low < 1 << 16; ++low) {
            const uint32_t bits = static_cast<uint32_t>(start) + low;
            uint16_t primary;
            int16_t auxiliary;
            Split::encode(float_of(bits), primary, auxiliary);
            const uint32_t decoded = bits_of(Split::decode(primary, auxiliary));
            const bool nan = (bits & 0x7FFFFFFF) > INFINITE;
            broken += nan ? (decoded & 0x7FFFFFFF) <= INFINITE : decoded != bits;
        }
        count += broken;
    }
    return count;
}

// Rounding never decreases as the magnitude grows to infinity, and keeps the sign.
template <class Dtype>
static uint64_t out_of_order() {
    uint64_t count = 0;
    for (uint32_t start = 0; start < INFINITE; start += 1 << 16) {
        uint32_t broken = 0;
        for (uint32_t bits = start; bits < start + (1 << 16); ++bits) {
            const uint32_t here = Dtype::round(float_of(bits)), next = Dtype::round(float_of(bits + 1));
            broken += (next < here) + (Dtype::round(float_of(bits | 0x80000000)) != (here | 0x8000));
        }
        count += broken;
    }
    return count;
}

int main() {
    printf("split loses %llu\n", static_cast<unsigned long long>(lost_by_split()));
    printf("bf16 rounding is out of order at %llu\n", static_cast<unsigned long long>(out_of_order<BFloat16>()));
    printf("fp16 rounding is out of order at %llu\n", static_cast<unsigned long long>(out_of_order<Float16>()));
}
