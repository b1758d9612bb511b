# libc and kernel declarations: partial structs with just the fields used.

from libc.stdint cimport uint16_t, uint32_t, uint64_t

cdef extern from "<errno.h>" nogil:
    int errno
    int EACCES, EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT, ECONNREFUSED, EINTR, EPERM, EBADF

cdef extern from "<sys/types.h>" nogil:
    ctypedef unsigned int socklen_t
    ctypedef unsigned short sa_family_t

cdef extern from "<sys/socket.h>" nogil:
    int AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6
    int SOCK_STREAM, SOCK_DGRAM, SOCK_CLOEXEC, SOCK_NONBLOCK
    int SOL_SOCKET, SO_REUSEADDR
    int SCM_RIGHTS
    int MSG_DONTWAIT, MSG_TRUNC, MSG_CTRUNC, MSG_CMSG_CLOEXEC

    struct sockaddr:
        sa_family_t sa_family

    int socket(int, int, int)
    int bind(int, const sockaddr *, socklen_t)
    int connect(int, const sockaddr *, socklen_t)
    int setsockopt(int, int, int, const void *, socklen_t)
    ssize_t sendto(int, const void *, size_t, int, const sockaddr *, socklen_t)
    ssize_t recv(int, void *, size_t, int)

    struct iovec:
        void *iov_base
        size_t iov_len
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
        int msg_flags
    struct cmsghdr:
        size_t cmsg_len
        int cmsg_level
        int cmsg_type

    ssize_t recvmsg(int, msghdr *, int)
    cmsghdr *CMSG_FIRSTHDR(msghdr *)
    cmsghdr *CMSG_NXTHDR(msghdr *, cmsghdr *)
    unsigned char *CMSG_DATA(cmsghdr *)
    size_t CMSG_LEN(size_t)

cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_IPV6, IPV6_V6ONLY

    struct in_addr:
        uint32_t s_addr
    struct in6_addr:
        unsigned char s6_addr[16]
    struct sockaddr_in:
        sa_family_t sin_family
        uint16_t sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        sa_family_t sin6_family
        uint16_t sin6_port
        in6_addr sin6_addr
        uint32_t sin6_scope_id

    uint16_t htons(uint16_t)

cdef extern from "<arpa/inet.h>" nogil:
    int inet_pton(int, const char *, void *)
    const char *inet_ntop(int, const void *, char *, socklen_t)

cdef extern from "<sys/un.h>" nogil:
    struct sockaddr_un:
        sa_family_t sun_family
        char sun_path[108]

cdef extern from "<fcntl.h>" nogil:
    int O_RDONLY, O_CLOEXEC, F_DUPFD_CLOEXEC

    int open(const char *, int)
    int fcntl(int, int, ...)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int, void *, size_t, long)
    int pipe2(int *, int)
    int close(int)
    int getpid()

cdef extern from "<poll.h>" nogil:
    int POLLIN

    struct pollfd:
        int fd
        short events
        short revents

    int poll(pollfd *, unsigned long, int)

cdef extern from "<sys/random.h>" nogil:
    ssize_t getrandom(void *, size_t, unsigned int)

cdef extern from "<sys/resource.h>" nogil:
    int RLIMIT_NOFILE

    struct rlimit:
        unsigned long rlim_cur
        unsigned long rlim_max

    int getrlimit(int, rlimit *)

cdef extern from "<sys/stat.h>" nogil:
    struct c_stat "stat":
        long long st_size

    int stat(const char *, c_stat *)

cdef extern from "<time.h>" nogil:
    int CLOCK_BOOTTIME, CLOCK_MONOTONIC

    struct timespec:
        long tv_sec
        long tv_nsec

    int clock_gettime(int, timespec *)
