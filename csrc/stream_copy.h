// A copy within the host that leaves the caches to whoever computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace badam {

// memcpy that writes past the caches: a chunk is too small for memcpy itself to do so, and would then be read before it is
// overwritten.
inline void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__x86_64__)
    constexpr size_t line = 64;
    const size_t head = -reinterpret_cast<uintptr_t>(to) % line;
    if (bytes > head + line) {
        std::memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= line; to += line, from += line, bytes -= line) {
            const auto* const source = reinterpret_cast<const __m128i*>(from);
            auto* const target = reinterpret_cast<__m128i*>(to);
            const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            _mm_stream_si128(target, a);
            _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c);
            _mm_stream_si128(target + 3, d);
        }
        _mm_sfence();
    }
#endif
    std::memcpy(to, from, bytes);
}

}  // namespace badam
