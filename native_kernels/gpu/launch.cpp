// Starts the prepared kernels of a call: one call from Python for all that they need once everything is decided.
// It knows no headers of CUDA: the functions of the driver come as addresses.

#include <cstdint>
#include <cstring>

namespace {

struct Attribute {  // CUlaunchAttribute
    int32_t id;
    int32_t padding;
    uint32_t value[16];
};

struct LaunchConfig {  // CUlaunchConfig
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    void* stream;
    Attribute* attributes;
    uint32_t count;
};

constexpr int32_t CLUSTER_DIMENSION = 4;     // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int32_t STREAM_SERIALIZATION = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

using LaunchKernel = int (*)(const LaunchConfig*, void* function, void** params, void** extra);
using RecordEvent = int (*)(void* event, void* stream);
using IsCapturing = int (*)(void* stream, int* status);
using ReplaceAddress = int (*)(void* tensor_map, void* address);

constexpr uint32_t MOST_BYTES = 4096, MOST_PARAMS = 128;

enum Outcome { STARTED, FAILED, OTHER_STREAM, CAPTURING, OTHER_MEMORY, MISPLACED, REFUSED, BROKEN };

}  // namespace

extern "C" {

// All words may change between calls; the host reads them without a lock.
struct Guard {
    const volatile int32_t* raised;      // a kernel has given up
    const volatile int64_t* bad_input;   // a kernel has met invalid input
    const volatile int32_t* failed;      // a peer has said so
    const volatile int32_t* generation;  // of the memory
    const volatile int64_t* last;        // the stream of the last fused kernel of the device
    void* const volatile* event;         // which is recorded behind it
};

struct Place {  // where the parameters have the address of an operand
    uint32_t operand, offset, is_map, delta;
};

struct Driver {
    LaunchKernel launch_kernel;
    RecordEvent record_event;
    IsCapturing is_capturing;
    ReplaceAddress replace_address;
};

struct Kernel {
    void* function;
    const unsigned char* params;
    const uint32_t* offsets;
    const Place* places;
    uint32_t grid, threads, shared_bytes, cluster;  // cluster 0: none
    uint32_t bytes, param_count, place_count;
    uint32_t dependent;  // 1: it may be placed before the kernels in front of it have ended (dependent.py)
};

struct Prepared {
    const Driver* driver;
    const Guard* guard;
    const Kernel* kernels;  // on one stream, one behind the other
    uint32_t kernel_count, operand_count;
    uint32_t aligned;  // bit i: operand i begins at a multiple of 16 bytes
    int32_t generation;
};

}

// Returns STARTED if the call may start, else why it must go the long way.
static int refused(const Prepared& p, uint64_t stream, const uint64_t* operands) {
    const Guard& guard = *p.guard;
    if (*guard.raised || *guard.failed || *guard.bad_input) return FAILED;
    if (*guard.generation != p.generation) return OTHER_MEMORY;
    if (static_cast<uint64_t>(*guard.last) != stream || !*guard.event) return OTHER_STREAM;
    for (uint32_t i = 0; i < p.operand_count; ++i)
        if ((operands[i] % 16 == 0) != (p.aligned >> i & 1)) return MISPLACED;
    int status = 0;
    if (p.driver->is_capturing(reinterpret_cast<void*>(stream), &status) || status) return CAPTURING;
    return STARTED;
}

static int start(const Driver& driver, const Kernel& kernel, void* stream, const uint64_t* operands) {
    // A copy: another thread may start the same kernel with other operands.
    alignas(128) unsigned char params[MOST_BYTES];
    std::memcpy(params, kernel.params, kernel.bytes);
    for (uint32_t i = 0; i < kernel.place_count; ++i) {
        const Place& place = kernel.places[i];
        const uint64_t address = operands[place.operand] + place.delta;
        if (!place.is_map)
            std::memcpy(params + place.offset, &address, sizeof address);
        else if (driver.replace_address(params + place.offset, reinterpret_cast<void*>(address)))
            return MISPLACED;
    }
    void* pointers[MOST_PARAMS];
    for (uint32_t i = 0; i < kernel.param_count; ++i) pointers[i] = params + kernel.offsets[i];
    Attribute attributes[2]{};
    uint32_t count = 0;
    if (kernel.cluster) {
        Attribute& cluster = attributes[count++];
        cluster.id = CLUSTER_DIMENSION;
        cluster.value[0] = kernel.cluster;
        cluster.value[1] = cluster.value[2] = 1;
    }
    if (kernel.dependent) {
        Attribute& early = attributes[count++];
        early.id = STREAM_SERIALIZATION;
        early.value[0] = 1;
    }
    const LaunchConfig config{{kernel.grid, 1, 1}, {kernel.threads, 1, 1}, kernel.shared_bytes,
                              stream, attributes, count};
    return driver.launch_kernel(&config, kernel.function, pointers, nullptr) ? REFUSED : STARTED;
}

extern "C" {

// Returns STARTED if all kernels of the call run. Returns BROKEN if the first kernel runs and a later one was refused: the
// call cannot be repeated. Returns another outcome if no kernel runs; the caller then goes the long way.
__attribute__((visibility("default"))) int af_launch(
    const Prepared* p, uint64_t stream, const uint64_t* operands) {
    if (const int why = refused(*p, stream, operands)) return why;
    void* on = reinterpret_cast<void*>(stream);
    if (const int why = start(*p->driver, p->kernels[0], on, operands)) return why;
    int outcome = STARTED;
    for (uint32_t i = 1; i < p->kernel_count && outcome == STARTED; ++i)
        if (start(*p->driver, p->kernels[i], on, operands)) outcome = BROKEN;
    p->driver->record_event(*p->guard->event, on);
    return outcome;
}

__attribute__((visibility("default"))) int af_launch_abi_version() { return 4; }
}
