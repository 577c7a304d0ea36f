// Starts a prepared kernel: one call from Python for all that a launch needs once everything is decided.
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

constexpr int32_t CLUSTER_DIMENSION = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION

using LaunchKernel = int (*)(const LaunchConfig*, void* function, void** params, void** extra);
using RecordEvent = int (*)(void* event, void* stream);
using IsCapturing = int (*)(void* stream, int* status);
using ReplaceAddress = int (*)(void* tensor_map, void* address);

constexpr uint32_t MOST_BYTES = 4096, MOST_PARAMS = 128, MOST_OPERANDS = 16;

enum Outcome { STARTED, FAILED, OTHER_STREAM, CAPTURING, OTHER_MEMORY, MISPLACED, REFUSED };

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

struct Prepared {
    const Driver* driver;
    const Guard* guard;
    void* function;
    const unsigned char* params;
    const uint32_t* offsets;
    const Place* places;
    uint32_t grid, threads, shared_bytes, cluster;  // cluster 0: none
    uint32_t bytes, param_count, place_count, operand_count;
    uint32_t aligned;  // bit i: operand i begins at a multiple of 16 bytes
    int32_t generation;
    int32_t follows;  // 1: on another launch of the same call, which was let in
};

}

// 0, or why nothing was started: whoever prepared it then goes the long way, which finds out.
static int start(const Prepared* p, uint64_t stream, const uint64_t* operands) {
    const Guard& guard = *p->guard;
    void* on = reinterpret_cast<void*>(stream);
    if (!p->follows) {
        if (*guard.raised || *guard.failed || *guard.bad_input) return FAILED;
        if (*guard.generation != p->generation) return OTHER_MEMORY;
        if (static_cast<uint64_t>(*guard.last) != stream || !*guard.event) return OTHER_STREAM;
        for (uint32_t i = 0; i < p->operand_count; ++i)
            if ((operands[i] % 16 == 0) != (p->aligned >> i & 1)) return MISPLACED;
        int status = 0;
        if (p->driver->is_capturing(on, &status) || status) return CAPTURING;
    }
    // A copy: another thread may start the same kernel with other operands.
    alignas(128) unsigned char params[MOST_BYTES];
    std::memcpy(params, p->params, p->bytes);
    for (uint32_t i = 0; i < p->place_count; ++i) {
        const Place& place = p->places[i];
        const uint64_t address = operands[place.operand] + place.delta;
        if (!place.is_map)
            std::memcpy(params + place.offset, &address, sizeof address);
        else if (p->driver->replace_address(params + place.offset, reinterpret_cast<void*>(address)))
            return MISPLACED;
    }
    void* pointers[MOST_PARAMS];
    for (uint32_t i = 0; i < p->param_count; ++i) pointers[i] = params + p->offsets[i];
    Attribute cluster{};
    cluster.id = CLUSTER_DIMENSION;
    cluster.value[0] = p->cluster;
    cluster.value[1] = cluster.value[2] = 1;
    const LaunchConfig config{
        {p->grid, 1, 1}, {p->threads, 1, 1}, p->shared_bytes, on, &cluster, p->cluster ? 1u : 0u};
    if (p->driver->launch_kernel(&config, p->function, pointers, nullptr)) return REFUSED;
    p->driver->record_event(*guard.event, on);
    return STARTED;
}

extern "C" {

__attribute__((visibility("default"))) int af_launch_few(
    const Prepared* p, uint64_t stream, uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3) {
    const uint64_t operands[] = {a0, a1, a2, a3};
    return start(p, stream, operands);
}

__attribute__((visibility("default"))) int af_launch(
    const Prepared* p, uint64_t stream, uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4,
    uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8, uint64_t a9, uint64_t a10, uint64_t a11, uint64_t a12,
    uint64_t a13, uint64_t a14, uint64_t a15) {
    const uint64_t operands[MOST_OPERANDS] = {a0, a1, a2,  a3,  a4,  a5,  a6,  a7,
                                              a8, a9, a10, a11, a12, a13, a14, a15};
    return start(p, stream, operands);
}

__attribute__((visibility("default"))) int af_launch_abi_version() { return 2; }
}
