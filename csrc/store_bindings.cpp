// The store's part of badam_kernels._C.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arena.h"
#include "bindings.h"
#include "stager.h"

namespace py = pybind11;

namespace badam {
namespace {

using Addresses = std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>;

std::vector<Piece> pieces(const Addresses& addresses) {
    std::vector<Piece> pieces;
    for (const auto& [room, host, bytes] : addresses)
        pieces.push_back({reinterpret_cast<std::byte*>(room), reinterpret_cast<std::byte*>(host), bytes});
    return pieces;
}

std::unique_ptr<Slab> slab(size_t bytes, std::shared_ptr<const Context> context, bool registered) {
    const Pinning pinning = !context ? Pinning::none : registered ? Pinning::registered : Pinning::allocated;
    return std::make_unique<Slab>(bytes, pinning, std::move(context));
}

std::unique_ptr<Stager> stager(std::shared_ptr<const Context> context, size_t chunk_bytes, bool direct) {
    return std::make_unique<Stager>(context ? driver_copier(std::move(context)) : thread_copier(), chunk_bytes, direct);
}

void flush(Stager& stager, const Addresses& addresses, Stream compute) { stager.flush(pieces(addresses), compute); }

// An event as an object that Python can hold.
struct Arrival {
    Event event;
};

Arrival prefetch(Stager& stager, const Addresses& addresses, Stream compute) {
    return {stager.prefetch(pieces(addresses), compute)};
}
void acquire(Stager& stager, const Arrival& arrival, Stream compute) { stager.acquire(arrival.event, compute); }

}  // namespace

void bind_store(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> unlocked;
    py::register_exception<DriverError>(m, "DriverError", PyExc_RuntimeError);
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const OutOfMemory& refused) {
            PyErr_SetString(PyExc_MemoryError, refused.what());
        }
    });

    py::class_<Context, std::shared_ptr<Context>>(m, "Context", "A CUDA device's primary context, by the driver alone.")
        .def(py::init([](int device, const std::string& library) {
                 return std::make_shared<Context>(std::make_shared<const Driver>(library), device);
             }),
             py::arg("device"), py::arg("library") = "libcuda.so.1", unlocked,
             "device: torch's index. library: the driver. Raises DriverError if there is no driver or no such device.");

    py::class_<Slab>(m, "Slab", py::buffer_protocol(),
                     "Zeroed host memory of exact size, as a buffer. It is given back when nothing refers to this object.")
        .def(py::init(&slab), py::arg("bytes"), py::arg("context") = py::none(), py::arg("registered") = false, unlocked,
             "context: None for pageable memory that costs nothing until written; else pinned, by the driver's own allocation\n"
             "or, with registered=True, by registering pages. Raises MemoryError or DriverError, and then keeps nothing.")
        .def_property_readonly("reserved", &Slab::reserved, "Bytes in whole pages.")
        .def_property_readonly("touched", &Slab::touched, "Bytes in physical memory now.")
        .def_buffer([](Slab& slab) {
            return py::buffer_info(reinterpret_cast<uint8_t*>(slab.data()), static_cast<py::ssize_t>(slab.size()));
        });

    py::class_<Arrival>(m, "Arrival", "Comes to pass when what one `Stager.prefetch` was given, and all before it, is in its room.");

    py::class_<Stager>(m, "Stager", "Moves slots between host memory and rooms of device memory; csrc/stager.h.")
        .def(py::init(&stager), py::arg("context"), py::arg("chunk_bytes"), py::arg("direct"), unlocked,
             "context: of the device, None for threads that copy within the host. direct: the host memory is pinned.")
        .def("flush", &flush, py::arg("pieces"), py::arg("compute"), unlocked,
             "Copy each (room address, host address, bytes) to the host after the work given to stream `compute`.\n"
             "Returns at once. What a failed call left in the room, the next call to any of these sends.")
        .def("prefetch", &prefetch, py::arg("pieces"), py::arg("compute"), unlocked,
             "Copy each (room address, host address, bytes) to the room once it is free. Returns at once, with their Arrival.")
        .def("acquire", &acquire, py::arg("arrival"), py::arg("compute"), unlocked,
             "Work given to stream `compute` from now on runs after `arrival`.")
        .def("settle", &Stager::settle, unlocked, "Block until everything flushed is in host memory.")
        .def("settled", &Stager::settled, unlocked, "Whether everything flushed is in host memory.")
        .def("synchronize", &Stager::synchronize, unlocked, "Block until nothing moves. What could not be sent is given up.")
        .def_property_readonly("ring_bytes", &Stager::ring_bytes, "Pinned bytes that pageable memory is moved through.");
}

}  // namespace badam
