// The version of the C interface; the loader refuses a library built from another checkout.
extern "C" __attribute__((visibility("default"))) int af_abi_version() { return 2; }
