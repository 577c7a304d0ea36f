// Starts the prepared kernels of a call, and the copies beside them: one call from Python for all that they need once
// everything is decided.
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
using WaitEvent = int (*)(void* stream, void* event, unsigned flags);
using OnWord = int (*)(void* stream, uint64_t address, uint32_t value, unsigned flags);
using Copy = int (*)(uint64_t to, uint64_t from, size_t bytes, void* stream);

constexpr uint32_t MOST_BYTES = 4096, MOST_PARAMS = 128;
constexpr unsigned AT_LEAST = 0;             // CU_STREAM_WAIT_VALUE_GEQ
constexpr uint32_t NO_OPERAND = UINT32_MAX;

enum Do : uint32_t { RECORD, AWAIT, TAKE, COPY };  // as in commands.py

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
    WaitEvent wait_event;
    OnWord wait_value, write_value;
    Copy copy;
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

struct Command {
    uint32_t what;     // of Do
    uint32_t operand;  // COPY: the one from whose address `source` counts; NO_OPERAND: `source` is an address
    void* stream;      // null: that of the call
    uint64_t at, source, bytes;
};

struct Step {
    const Kernel* kernel;  // on the stream of the call; null: commands
    const Command* commands;
    uint64_t command_count;
};

struct Prepared {
    const Driver* driver;
    const Guard* guard;
    const Step* steps;  // in the order in which the driver gets them
    uint32_t step_count, operand_count;
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

static int carry_out(const Driver& driver, const Command& command, void* of_call, const uint64_t* operands) {
    void* stream = command.stream ? command.stream : of_call;
    void* event = reinterpret_cast<void*>(command.at);
    switch (command.what) {
        case RECORD: return driver.record_event(event, stream);
        case AWAIT: return driver.wait_event(stream, event, 0);
        case TAKE:
            if (const int error = driver.wait_value(stream, command.at, 1, AT_LEAST)) return error;
            return driver.write_value(stream, command.at, 0, 0);
        default: {
            const uint64_t begin = command.operand == NO_OPERAND ? 0 : operands[command.operand];
            return driver.copy(command.at, begin + command.source, command.bytes, stream);
        }
    }
}

// `begun` is set once the driver has taken a part of the step.
static int take(const Driver& driver, const Step& step, void* stream, const uint64_t* operands, bool& begun) {
    if (step.kernel) {
        const int outcome = start(driver, *step.kernel, stream, operands);
        begun |= outcome == STARTED;
        return outcome;
    }
    for (uint64_t i = 0; i < step.command_count; ++i) {
        if (carry_out(driver, step.commands[i], stream, operands)) return REFUSED;
        begun = true;
    }
    return STARTED;
}

extern "C" {

// Returns STARTED if the driver has taken all steps of the call. Returns BROKEN if it has taken a part and refused another:
// the call cannot be repeated. Returns another outcome if it has taken nothing; the caller then goes the long way.
__attribute__((visibility("default"))) int af_launch(
    const Prepared* p, uint64_t stream, const uint64_t* operands) {
    if (const int why = refused(*p, stream, operands)) return why;
    void* on = reinterpret_cast<void*>(stream);
    bool begun = false;
    int outcome = STARTED;
    for (uint32_t i = 0; i < p->step_count && outcome == STARTED; ++i)
        outcome = take(*p->driver, p->steps[i], on, operands, begun);
    if (!begun) return outcome;
    p->driver->record_event(*p->guard->event, on);
    return outcome == STARTED ? STARTED : BROKEN;
}

__attribute__((visibility("default"))) int af_launch_abi_version() { return 5; }
}
