// Which part of the memory a call uses, by the call's number; plain C++, so that tests can run it. Numbers have 64 bits: none
// wraps, and so no third follows itself.
#pragma once

#ifndef __CUDACC_RTC__
#define __device__
#endif

__device__ inline int half_of(long long epoch) { return static_cast<int>(epoch & 1); }

__device__ inline int third_of(long long call) { return static_cast<int>(call % 3); }
