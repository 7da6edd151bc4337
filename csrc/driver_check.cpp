// Compares driver.h with the header of a CUDA toolkit. Compiled only where one is installed; holds no code.
#include <cuda.h>

#include <string_view>
#include <type_traits>

#include "driver.h"

namespace badam {
namespace {

// Handles and enumerations may differ in name, not in kind.
template <class A, class B>
constexpr bool same = std::is_same_v<A, B> || (std::is_pointer_v<A> && std::is_pointer_v<B>) ||
                      (std::is_enum_v<A> && std::is_integral_v<B> && sizeof(A) == sizeof(B));

template <class Theirs, class Ours>
struct Signature;

template <class R, class... Theirs, class... Ours>
struct Signature<R (*)(Theirs...), int (*)(Ours...)> {
    template <bool sizes = sizeof...(Theirs) == sizeof...(Ours)>
    static constexpr bool equal() {
        if constexpr (sizes)
            return same<R, int> && (same<Theirs, Ours> && ...);
        else
            return false;
    }
};

// Two steps, so that cuda.h's own macros put their suffix on a name before it becomes text.
#define BADAM_TEXT(x) #x
#define BADAM_TEXT_OF(x) BADAM_TEXT(x)
#define BADAM_CHECK(name, symbol, ...)                                                                             \
    static_assert(Signature<decltype(&name), int (*)(__VA_ARGS__)>::equal(), "driver.h: parameters of " #name);     \
    static_assert(std::string_view(BADAM_TEXT_OF(name)) == symbol, "driver.h: symbol of " #name);
BADAM_DRIVER_CALLS(BADAM_CHECK)

static_assert(driver_not_ready == CUDA_ERROR_NOT_READY);
static_assert(stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(event_disable_timing == CU_EVENT_DISABLE_TIMING);
static_assert(host_memory_portable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(host_memory_portable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(static_cast<unsigned>(CaptureMode::relaxed) == CU_STREAM_CAPTURE_MODE_RELAXED);

}  // namespace
}  // namespace badam
