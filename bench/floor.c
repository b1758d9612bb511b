/* The floor: the system calls of allocate(size) and release, and nothing else.
 *
 * test_floor.py compares them with what strace shows of fastports; only its getpid calls, by which
 * it knows a forked child, have no counterpart here. Built and loaded by rivals.py.
 * Every function returns nanoseconds for all its calls, or a negative errno.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static uint16_t order[65536];
static int order_first, order_count;
static int fds[65536];
static uint64_t state = 0x9e3779b97f4a7c15u;

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static uint32_t below(uint32_t bound) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(((state >> 32) * bound) >> 32);
}

static void prepare(int first, int last) { /* a shuffled array stays one: filled once */
  if (order_first == first && order_count == last - first + 1) return;
  order_first = first;
  order_count = last - first + 1;
  for (int i = 0; i < order_count; i++) order[i] = (uint16_t)(first + i);
}

static int draw(int i) {
  int j = i + (int)below((uint32_t)(order_count - i));
  uint16_t port = order[j];
  order[j] = order[i];
  order[i] = port;
  return port;
}

static int read_sysctl(const char *path) {
  static char text[1024];
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  ssize_t size = pread(fd, text, sizeof text, 0);
  close(fd);
  return size < 0 ? -EIO : 0;
}

static int begin(int size) { /* what a call asks before its first socket */
  struct rlimit limit;
  struct stat info;
  int error = read_sysctl("/proc/sys/net/ipv4/ip_local_reserved_ports");
  if (!error) error = read_sysctl("/proc/sys/net/ipv4/ip_local_port_range");
  if (error) return error;
  if (size > 1) {
    getrlimit(RLIMIT_NOFILE, &limit);
    stat("/proc/self/fd", &info);
  }
  uint64_t seed[4];
  if (getrandom(seed, sizeof seed, 0) != sizeof seed) return -EIO;
  state = seed[0] | 1;
  return 0;
}

static int new_socket(void) {
  int off = 0, fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  return fd;
}

static int bind_port(int fd, int port) {
  struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
  return bind(fd, (struct sockaddr *)&address, sizeof address) == 0 ? 0 : errno;
}

static socklen_t name(struct sockaddr_un *address, const char *format, int first, int last) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, format, first, last);
  return (socklen_t)(sizeof(sa_family_t) + 1 + (size_t)length);
}

/* One search for `size` ports and their release; with `entry`: as fastports does it, without: the
 * bare sockets. Adds to `probes` the binds that were tried. */
static int one(int first, int size, int entry, int64_t *probes) {
  struct sockaddr_un address;
  socklen_t length;
  int error = 0, unix_fd = -1, held = 0, fd = -1, start = 0, drawn = 0;
  if (entry && (error = begin(size))) return error;
  while (held < size) {
    if (held == 0) {
      if (drawn == order_count) return -EADDRINUSE;
      start = size == 1 ? draw(drawn) : first + size * (int)below((uint32_t)(order_count / size));
      drawn++;
    }
    if (fd < 0 && (fd = new_socket()) < 0) return -errno;
    ++*probes;
    error = bind_port(fd, start + held);
    if (error == EADDRINUSE) { /* the socket stays unbound and is used again */
      while (held > 0) close(fds[--held]);
      continue;
    }
    if (error) return -error;
    fds[held] = fd;
    fd = -1;
    if (entry) {
      if (unix_fd < 0 && (unix_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) < 0)
        return -errno;
      length = name(&address, "fastports/m/t/%d", start + held, 0);
      connect(unix_fd, (struct sockaddr *)&address, length);
    }
    held++;
  }
  if (entry) {
    length = name(&address, "fastports/t/%d-%d/10000/100000/1000.0000/", start, start + size - 1);
    bind(unix_fd, (struct sockaddr *)&address, length);
  }
  if (fd >= 0) close(fd);
  for (int i = 0; i < size; i++) close(fds[i]);
  if (unix_fd >= 0) close(unix_fd);
  return 0;
}

int64_t floor_allocate(int calls, int first, int last, int size, int entry, int64_t *probes) {
  prepare(first, last);
  int64_t start = now();
  for (int i = 0; i < calls; i++) {
    int error = one(first, size, entry, probes);
    if (error) return error;
  }
  return now() - start;
}

/* Refusals: `probes` binds of ports that are all taken, on one socket. */
int64_t floor_refuse(int calls, int first, int last, int probes) {
  prepare(first, last);
  int64_t start = now();
  for (int i = 0; i < calls; i++) {
    int error = begin(1), fd = new_socket();
    if (error) return error;
    if (fd < 0) return -errno;
    for (int k = 0; k < probes; k++)
      if (bind_port(fd, draw(k % order_count)) != EADDRINUSE) return -EINVAL;
    close(fd);
  }
  return now() - start;
}

/* As many calls as fit into `nanoseconds`; how many. */
int64_t floor_until(int64_t nanoseconds, int first, int last, int size) {
  prepare(first, last);
  int64_t calls = 0, probes = 0, end = now() + nanoseconds;
  while (now() < end) {
    int error = one(first, size, 1, &probes);
    if (error) return error;
    calls++;
  }
  return calls;
}
