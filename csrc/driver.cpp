#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

namespace badam {

Driver::Driver(const std::string& path) : process_(getpid()) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw DriverError("no CUDA driver: " + std::string(dlerror()));
    const auto find = [&](const char* symbol) {
        void* const function = dlsym(library, symbol);
        if (!function) throw DriverError("the CUDA driver " + path + " has no " + symbol + ": update the driver");
        return function;
    };
#define BADAM_FIND(name, symbol, ...) \
    name.owner_ = this;               \
    name.symbol_ = symbol;            \
    name.function_ = reinterpret_cast<int (*)(__VA_ARGS__)>(find(symbol));
    BADAM_DRIVER_CALLS(BADAM_FIND)
#undef BADAM_FIND
    cuInit(0);
}

bool Driver::usable() const { return getpid() == process_; }

void Driver::fail(const char* symbol, int code) const {
    const char* name = nullptr;
    const char* text = nullptr;
    cuGetErrorName.code(code, &name);
    cuGetErrorString.code(code, &text);
    throw DriverError(std::string(symbol) + " failed: " + (name ? name : "unknown error") + " (" + std::to_string(code) + "): " +
                      (text ? text : "no description"));
}

Context::Context(std::shared_ptr<const Driver> driver, int device) : driver(std::move(driver)) {
    this->driver->cuDeviceGet(&device_, device);
    this->driver->cuDevicePrimaryCtxRetain(&handle_, device_);
}

Context::~Context() {
    if (driver->usable()) driver->cuDevicePrimaryCtxRelease.code(device_);
}

std::string Context::pci_bus_id() const {
    char id[32] = "";
    return driver->cuDeviceGetPCIBusId.code(id, sizeof id, device_) ? "" : id;
}

Context::Scope::Scope(const Context& context) : driver_(*context.driver), pushed_(true) {
    driver_.cuCtxPushCurrent(context.handle_);
    exchange_capture_mode();
}

Context::Scope::Scope(const Context& context, std::nothrow_t)
    : driver_(*context.driver), pushed_(!driver_.cuCtxPushCurrent.code(context.handle_)) {
    if (pushed_) exchange_capture_mode();
}

Context::Scope::~Scope() {
    if (!pushed_) return;
    exchange_capture_mode();
    void* popped;
    driver_.cuCtxPopCurrent.code(&popped);
}

}  // namespace badam
