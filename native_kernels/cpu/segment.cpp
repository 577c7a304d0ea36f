// POSIX shared memory by name. Both functions return a file descriptor to map, or -errno.
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

namespace {

int reserve(int fd, int64_t nbytes) {
  if (ftruncate(fd, nbytes) != 0) return errno;
#ifdef __linux__
  // Takes the pages now: with ftruncate alone a full /dev/shm is a SIGBUS at some later store.
  int error;
  do {
    error = posix_fallocate(fd, 0, nbytes);
  } while (error == EINTR);
  return error;
#else
  return 0;
#endif
}

}  // namespace

AF_EXPORT int af_segment_create(const char* name, int64_t nbytes) {
  const int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (fd < 0) return -errno;
  const int error = reserve(fd, nbytes);
  if (error == 0) return fd;
  close(fd);
  shm_unlink(name);
  return -error;
}

AF_EXPORT int af_segment_open(const char* name) {
  const int fd = shm_open(name, O_RDWR, 0);
  return fd < 0 ? -errno : fd;
}

// Removes the name; the memory goes when the last process has unmapped it. A missing name is no error.
AF_EXPORT int af_segment_unlink(const char* name) {
  return shm_unlink(name) == 0 || errno == ENOENT ? 0 : -errno;
}
