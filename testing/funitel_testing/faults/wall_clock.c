// A wall clock that a test moves: loaded before libc, it adds the seconds in the file FAULT_CLOCK to the real time.
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_seconds;

__attribute__((constructor)) static void attach(void) {
  const char *path = getenv("FAULT_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (page != MAP_FAILED) offset_seconds = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = (int)syscall(SYS_clock_gettime, clock, now);
  int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (code == 0 && is_wall && offset_seconds) now->tv_sec += *offset_seconds;
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec instant;
  int code = clock_gettime(CLOCK_REALTIME, &instant);
  now->tv_sec = instant.tv_sec;
  now->tv_usec = instant.tv_nsec / 1000;
  return code;
}

time_t time(time_t *seconds) {
  struct timespec instant;
  clock_gettime(CLOCK_REALTIME, &instant);
  if (seconds) *seconds = instant.tv_sec;
  return instant.tv_sec;
}
