# cython: freethreading_compatible=True
"""Bind and listen on a child's behalf, beside the hold.

A child started with the filter of `_seccomp.pxd` stops at bind(2) and listen(2) until its launcher
answers. For a port the launcher holds for that child, the launcher takes the child's very socket
(pidfd_getfd), opens the door of the hold, performs the call itself and closes the door again: a few
system calls, instead of the child's whole start-up. Every other call goes on as if nobody had looked.

One thread serves all children. It is a plain pthread that takes neither the GIL nor a Python object,
starts with the first child and ends when the last process that carries the filter is gone. Python
reaches it through one mutex, which is held for microseconds.

What may be believed: the address is read once, and the call is made with the bytes that were read, so
that a thread of the child which changes them afterwards changes nothing. The process behind a
notification may be dead and its number used again; NOTIF_ID_VALID after each look tells that it is
not (seccomp_unotify(2)). A call that is let go on (CONTINUE) may use other bytes than we saw; it then
meets the closed door in the kernel.
"""

cimport cython
from libc.errno cimport (
    EACCES, EADDRINUSE, EBADF, EBUSY, EINVAL, EMFILE, ENFILE, ENOENT, ENOMEM, EPERM, ESRCH, errno,
)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport atoi, calloc, free, realloc, strtoull
from libc.string cimport memcmp, memcpy, memset, strncmp, strstr
from posix.unistd cimport close, getpid, read, write

from fastports._seccomp cimport (
    FILTER_LENGTH, FP_ARCH, FP_ARCH_AARCH64, FP_ARCH_X86_64, FP_NEW_LISTENER, FP_NR_BIND, FP_NR_LISTEN,
    FP_WAIT_KILLABLE_RECV, SOL_SOCKET,
    install_filter, iovec, prctl, receive_descriptor, sock_filter, syscall, write_filter,
)

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <poll.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdio.h>
    #include <time.h>
    #include <arpa/inet.h>
    #include <netinet/in.h>
    #include <sys/eventfd.h>
    #include <sys/ioctl.h>
    #include <sys/prctl.h>
    #include <sys/stat.h>
    #include <sys/uio.h>
    #include <linux/netlink.h>

    #ifndef __NR_pidfd_open
    #define __NR_pidfd_open 434
    #endif
    #ifndef __NR_pidfd_getfd
    #define __NR_pidfd_getfd 438
    #endif
    #define FP_NR_PIDFD_OPEN __NR_pidfd_open
    #define FP_NR_PIDFD_GETFD __NR_pidfd_getfd
    #define FP_PIDFD_THREAD O_EXCL
    #define FP_SO_NETNS_COOKIE 71
    #define FP_SO_BINDTOIFINDEX 62
    #define FP_IPPROTO_MPTCP 262
    #define FP_CONTINUE 1U

    struct fp_notif {
        uint64_t id; uint32_t pid; uint32_t flags;
        int32_t nr; uint32_t arch; uint64_t ip; uint64_t args[6];
    };
    struct fp_answer { uint64_t id; int64_t val; int32_t error; uint32_t flags; };
    #define FP_RECV _IOWR('!', 0, struct fp_notif)
    #define FP_SEND _IOWR('!', 1, struct fp_answer)
    #define FP_ID_VALID _IOW('!', 2, uint64_t)
    #define FP_ID_VALID_OLD _IOR('!', 2, uint64_t)
    #define FP_SET_FLAGS _IOW('!', 4, uint64_t)

    struct fp_diag_id {
        uint16_t sport, dport; uint32_t src[4], dst[4]; uint32_t interface; uint32_t cookie[2];
    };
    struct fp_diag_request {
        uint32_t length; uint16_t type, flags; uint32_t sequence, sender;
        uint8_t family, protocol, extensions, pad; uint32_t states; struct fp_diag_id id;
        uint16_t attribute_length, attribute_type;
        uint8_t code1, yes1; uint16_t no1; uint8_t code2, yes2; uint16_t no2;
    };
    struct fp_diag_message {
        uint8_t family, state, timer, retransmits; struct fp_diag_id id;
        uint32_t expires, receive_queue, send_queue, uid, inode;
    };
    """
    const long FP_NR_PIDFD_OPEN, FP_NR_PIDFD_GETFD
    const int FP_PIDFD_THREAD, FP_SO_NETNS_COOKIE, FP_SO_BINDTOIFINDEX, FP_IPPROTO_MPTCP
    const uint32_t FP_CONTINUE
    const unsigned long FP_RECV, FP_SEND, FP_ID_VALID, FP_ID_VALID_OLD, FP_SET_FLAGS
    struct fp_notif:
        uint64_t id
        uint32_t pid
        int32_t nr
        uint64_t args[6]
    struct fp_answer:
        uint64_t id
        int64_t val
        int32_t error
        uint32_t flags
    struct fp_diag_id:
        uint16_t sport
        uint32_t cookie[2]
    struct fp_diag_request:
        uint32_t length
        uint16_t type
        uint16_t flags
        uint32_t sequence
        uint8_t family
        uint8_t protocol
        uint32_t states
        fp_diag_id id
        uint16_t attribute_length
        uint16_t attribute_type
        uint8_t code1
        uint8_t yes1
        uint16_t no1
        uint16_t no2
    struct fp_diag_message:
        uint32_t inode

cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    int sigfillset(sigset_t *)

cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int, timespec *)
    int nanosleep(const timespec *, timespec *)
    const int CLOCK_MONOTONIC

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *, unsigned long, int)
    int ppoll(pollfd *, unsigned long, const timespec *, const sigset_t *)
    const short POLLIN, POLLHUP, POLLERR, POLLNVAL

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef unsigned long pthread_t
    ctypedef struct pthread_attr_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_create(pthread_t *, pthread_attr_t *, void *(*)(void *) noexcept nogil, void *)
    int pthread_join(pthread_t, void **)
    int pthread_attr_init(pthread_attr_t *)
    int pthread_attr_destroy(pthread_attr_t *)
    int pthread_attr_setdetachstate(pthread_attr_t *, int)
    int pthread_attr_setstacksize(pthread_attr_t *, size_t)
    int pthread_sigmask(int, const sigset_t *, sigset_t *)
    const int PTHREAD_CREATE_DETACHED, SIG_SETMASK

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    const int EFD_CLOEXEC, EFD_NONBLOCK

cdef extern from "<sys/prctl.h>" nogil:
    const int PR_SET_NAME

cdef extern from "<sys/ioctl.h>" nogil:
    int ioctl(int, unsigned long, ...)

cdef extern from "<sys/uio.h>" nogil:
    ssize_t process_vm_readv(
        int, const iovec *, unsigned long, const iovec *, unsigned long, unsigned long)

cdef extern from "<stdio.h>" nogil:
    int snprintf(char *, size_t, const char *, ...)

cdef extern from "<fcntl.h>" nogil:
    int open(const char *, int, ...)
    const int O_RDONLY, O_CLOEXEC

cdef extern from "<unistd.h>" nogil:
    ssize_t readlink(const char *, char *, size_t)

cdef extern from "<sys/stat.h>" nogil:
    struct stat_t "stat":
        uint64_t st_ino
    int fstat(int, stat_t *)
    int c_stat "stat"(const char *, stat_t *)

cdef extern from "<netinet/in.h>" nogil:
    struct in_addr:
        uint32_t s_addr
    struct in6_addr:
        uint8_t s6_addr[16]
    struct sockaddr_in:
        uint16_t sin_family
        uint16_t sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        uint16_t sin6_family
        uint16_t sin6_port
        in6_addr sin6_addr
    uint16_t ntohs(uint16_t)
    uint32_t htonl(uint32_t)
    const int IPPROTO_TCP, IPPROTO_UDP, IPPROTO_IPV6, IPV6_V6ONLY

cdef extern from "<sys/socket.h>" nogil:
    ctypedef unsigned int socklen_t
    struct sockaddr:
        uint16_t sa_family
    struct sockaddr_storage:
        uint16_t ss_family
    int socket(int, int, int)
    int socketpair(int, int, int, int *)
    int bind(int, const sockaddr *, socklen_t)
    int listen(int, int)
    int getsockname(int, sockaddr *, socklen_t *)
    int getsockopt(int, int, int, void *, socklen_t *)
    int setsockopt(int, int, int, const void *, socklen_t)
    ssize_t send(int, const void *, size_t, int)
    ssize_t recv(int, void *, size_t, int)
    const int AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_CLOEXEC
    const int SO_REUSEADDR, SO_REUSEPORT, SO_DOMAIN, SO_TYPE, SO_PROTOCOL

cdef extern from "Python.h" nogil:
    int Py_IsInitialized()

cdef enum:
    BUCKETS = 1024
    WINDOWS = 4096
    NOTES = 32
    SOCKETS = 64
    DOORS = 128
    COVERING = 4

cdef enum:
    LOOPBACK = 1            # the first interface of every network namespace
    NOWHERE = 0x7ffffff5    # an interface number that is not in use

cdef enum:
    TCP = 1
    UDP = 2

cdef enum:  # why a call was not performed although it may have been for us
    CAUSE_READ = 0
    CAUSE_FETCH = 1
    CAUSE_LIMIT = 2
    CAUSE_GONE = 3
    CAUSE_TABLE = 4
    CAUSE_SLOW = 5

cdef struct Address:
    int family          # AF_INET also for a v4-mapped one
    bint any
    bint v6only
    uint8_t bytes[16]
    uint16_t port

cdef struct Held:
    int fd
    int next            # in its bucket, -1 at the end
    int opens           # bind-door calls under way
    int proto
    int64_t block
    uint64_t inode
    uint64_t netns
    Address where

cdef struct Known:      # a socket of a child that was bound while bind-door looked on
    uint64_t inode
    Address where

cdef struct Child:
    int64_t id
    int listener
    bint stopped        # its listener is to be closed by the serving thread
    int64_t block
    bint fetch          # broker; else bind-door
    bint exclusive
    unsigned told
    unsigned known_at
    Known known[SOCKETS]

cdef struct Door:       # one call that was let go on with the door open
    uint32_t tid
    int nr
    uint16_t port
    int protocols
    uint64_t inode
    uint64_t opened
    uint64_t asked      # when the kernel was last asked for its sockets
    int n_holds
    uint64_t holds[COVERING]

cdef struct Note:
    int cause
    int error
    uint32_t pid
    uint16_t port

cdef struct State:
    pthread_mutex_t lock
    int references
    bint running
    bint reporting
    int wake
    unsigned version
    int64_t next_id
    Child **children
    int n_children
    int room_children
    bint cut            # service was ended for children that may live
    Held *held
    int n_held
    int room_held
    int heads[BUCKETS]
    Door doors[DOORS]
    int n_doors
    Note notes[NOTES]
    int n_notes
    uint32_t windows[WINDOWS]
    uint64_t n_windows
    uint64_t performed
    uint64_t passed
    uint64_t denied
    uint64_t refused
    int spare           # a socket on a device, to ask whether we may take it off; -1 before, -2 never
    uint64_t spare_netns
    int netlink         # of the serving thread
    int shows_bound     # whether sock_diag lists bound sockets (6.8+); -1 while that is not known

from fastports._core import Descriptor

from builtins import open as open_file  # `open` is the system call here

# ---------------------------------------------------------------- small things


cdef uint64_t now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <uint64_t>t.tv_sec * 1000000000 + <uint64_t>t.tv_nsec


cdef void close_socket(int fd) noexcept nogil:
    if fd >= 0:
        close(fd)


cdef int option(int fd, int level, int name) noexcept nogil:
    cdef int value = -1
    cdef socklen_t size = sizeof(value)
    if getsockopt(fd, level, name, &value, &size) != 0:
        return -1
    return value


cdef int set_option(int fd, int name, int value) noexcept nogil:
    return setsockopt(fd, SOL_SOCKET, name, &value, sizeof(value))


cdef uint64_t netns_of(int fd) noexcept nogil:
    """The network namespace of a socket as a cookie, 0 where the kernel has none (before 5.14)."""
    cdef uint64_t cookie = 0
    cdef socklen_t size = sizeof(cookie)
    if getsockopt(fd, SOL_SOCKET, FP_SO_NETNS_COOKIE, &cookie, &size) != 0:
        return 0
    return cookie


cdef int proto_of(int fd) noexcept nogil:
    """TCP or UDP, 0 for what has a port space of its own or none."""
    cdef int domain = option(fd, SOL_SOCKET, SO_DOMAIN)
    cdef int protocol
    if domain != AF_INET and domain != AF_INET6:
        return 0
    protocol = option(fd, SOL_SOCKET, SO_PROTOCOL)
    if protocol == IPPROTO_TCP or protocol == FP_IPPROTO_MPTCP:  # the default of Go since 1.24
        return TCP
    return UDP if protocol == IPPROTO_UDP else 0


cdef bint is_zero(const uint8_t *bytes, int n) noexcept nogil:
    cdef int i
    for i in range(n):
        if bytes[i] != 0:
            return False
    return True


cdef bint parse_address(const sockaddr_storage *raw, int size, Address *out) noexcept nogil:
    """Whether ``raw`` is an IP address that bind(2) would look at."""
    cdef const sockaddr_in *v4 = <const sockaddr_in *>raw
    cdef const sockaddr_in6 *v6 = <const sockaddr_in6 *>raw
    cdef int skip = 0
    memset(out, 0, sizeof(Address))
    # AF_UNSPEC with the wildcard is an old way to say AF_INET that ip(7) sockets still take
    if (raw.ss_family == AF_INET or raw.ss_family == AF_UNSPEC) and size >= 16:
        out.family = AF_INET
        out.port = ntohs(v4.sin_port)
        memcpy(out.bytes, &v4.sin_addr, 4)
        out.any = is_zero(out.bytes, 4)
        return True
    if raw.ss_family == AF_INET6 and size >= 24:
        out.family = AF_INET6
        out.port = ntohs(v6.sin6_port)
        memcpy(out.bytes, &v6.sin6_addr, 16)
        if is_zero(out.bytes, 10) and out.bytes[10] == 0xff and out.bytes[11] == 0xff:
            out.family = AF_INET
            for skip in range(4):
                out.bytes[skip] = out.bytes[12 + skip]
            memset(&out.bytes[4], 0, 12)
            out.any = is_zero(out.bytes, 4)
        else:
            out.any = is_zero(out.bytes, 16)
        return True
    return False


cdef bint overlap(const Address *a, const Address *b) noexcept nogil:
    """Whether the kernel sees one socket on ``a`` and one on ``b`` as rivals for one port."""
    cdef const Address *v6
    if a.family == b.family:
        return a.any or b.any or memcmp(a.bytes, b.bytes, 4 if a.family == AF_INET else 16) == 0
    v6 = a if a.family == AF_INET6 else b
    return v6.any and not v6.v6only


cdef uint32_t bucket(uint16_t port) noexcept nogil:
    return port & (BUCKETS - 1)


cdef void rebuild(State *st) noexcept nogil:
    cdef int i
    cdef uint32_t b
    for i in range(BUCKETS):
        st.heads[i] = -1
    for i in range(st.n_held):
        b = bucket(st.held[i].where.port)
        st.held[i].next = st.heads[b]
        st.heads[b] = i


cdef bint has_port(State *st, uint16_t port) noexcept nogil:
    cdef int i = st.heads[bucket(port)]
    while i >= 0:
        if st.held[i].where.port == port:
            return True
        i = st.held[i].next
    return False


cdef bint still_held(const Held *h) noexcept nogil:
    """Whether the descriptor is the socket it was: its owner may have closed it, and the number be used again."""
    cdef stat_t about
    return fstat(h.fd, &about) == 0 and about.st_ino == h.inode


cdef void note(State *st, Child *child, int cause, int error, uint32_t pid, uint16_t port) noexcept nogil:
    """Remember what to tell, each cause once a child."""
    if child != NULL:
        if child.told & (1u << cause):
            return
        child.told |= 1u << cause
    if st.n_notes < NOTES:
        st.notes[st.n_notes].cause = cause
        st.notes[st.n_notes].error = error
        st.notes[st.n_notes].pid = pid
        st.notes[st.n_notes].port = port
        st.n_notes += 1


cdef void window(State *st, uint64_t since) noexcept nogil:
    cdef uint64_t took = now() - since
    st.windows[st.n_windows % WINDOWS] = <uint32_t>min(took, <uint64_t>0xffffffff)
    st.n_windows += 1

# ---------------------------------------------------------------- looking at a child


cdef bint valid(int listener, uint64_t id) noexcept nogil:
    cdef uint64_t copy = id
    if ioctl(listener, FP_ID_VALID, &copy) == 0:
        return True
    # the number was published with the wrong direction at first; some 5.x kernels know only that
    return errno == EINVAL and ioctl(listener, FP_ID_VALID_OLD, &copy) == 0


cdef int peek(uint32_t tid, uint64_t address, void *into, size_t size) noexcept nogil:
    """Read the child's memory; 0, or minus errno."""
    cdef iovec here
    cdef iovec there
    cdef ssize_t got
    here.iov_base = into
    here.iov_len = size
    there.iov_base = <void *>address
    there.iov_len = size
    got = process_vm_readv(<int>tid, &here, 1, &there, 1, 0)
    if got < 0:
        return -errno
    return 0 if <size_t>got == size else -EINVAL


cdef int group_of(uint32_t tid) noexcept nogil:
    """The thread group of a thread by its status file; 0 if it is gone."""
    cdef char path[64]
    cdef char text[512]
    cdef char *at
    cdef int fd
    cdef ssize_t got
    snprintf(path, sizeof(path), "/proc/%u/status", tid)
    fd = open(path, O_RDONLY | O_CLOEXEC)
    if fd < 0:
        return 0
    got = read(fd, text, sizeof(text) - 1)
    close(fd)
    if got <= 0:
        return 0
    text[got] = 0
    at = strstr(text, "Tgid:")
    return 0 if at == NULL else atoi(at + 5)


cdef uint64_t inode_of(uint32_t tid, int fd) noexcept nogil:
    """The inode behind a thread's descriptor if it is a socket, else 0 (errno tells why)."""
    cdef char path[64]
    cdef char text[64]
    cdef ssize_t got
    snprintf(path, sizeof(path), "/proc/%u/fd/%d", tid, fd)
    got = readlink(path, text, sizeof(text) - 1)
    if got <= 0:
        return 0
    text[got] = 0
    if strncmp(text, "socket:[", 8) != 0:
        errno = 0
        return 0
    return strtoull(text + 8, NULL, 10)


cdef int fetch(uint32_t tid, int fd) noexcept nogil:
    """The child's descriptor as one of ours, or minus errno; -EBADF if it has none of that number."""
    cdef int by_thread = 1
    cdef int group
    cdef int got
    cdef int error
    cdef stat_t about
    # 6.9+: a descriptor for this very thread, which may have a table of descriptors of its own
    cdef int pidfd = <int>syscall(FP_NR_PIDFD_OPEN, <long>tid, <long>FP_PIDFD_THREAD)
    if pidfd < 0 and errno == EINVAL:
        group = group_of(tid)
        if group == 0:
            return -ESRCH
        by_thread = group == <int>tid
        pidfd = <int>syscall(FP_NR_PIDFD_OPEN, <long>group, <long>0)
    if pidfd < 0:
        return -errno
    got = <int>syscall(FP_NR_PIDFD_GETFD, <long>pidfd, <long>fd, <long>0)
    error = errno
    close(pidfd)
    if got < 0:
        return -error
    if not by_thread and (fstat(got, &about) != 0 or about.st_ino != inode_of(tid, fd)):
        close(got)
        return -EINVAL
    return got

# ---------------------------------------------------------------- broker: we perform the call


cdef int covering_holds(
    State *st, Child *child, Address *where, int protocols, uint64_t netns, uint32_t pid, Held **out,
) noexcept nogil:
    """The child's holds that its call would run into; -1 if one of another block is among them."""
    cdef Held *h
    cdef int n = 0
    cdef int i = st.heads[bucket(where.port)]
    cdef bint others = False
    while i >= 0:
        h = &st.held[i]
        i = h.next
        if (h.where.port != where.port or not h.proto & protocols or not overlap(&h.where, where)
                or (netns and h.netns != netns)):
            continue
        if not still_held(h):
            if h.block == child.block:
                note(st, child, CAUSE_GONE, 0, pid, where.port)
        elif h.block != child.block:
            others = True
        elif n < COVERING:
            out[n] = h
            n += 1
    return -1 if others else n


cdef bint may_move(State *st, uint64_t netns) noexcept nogil:
    """Whether this thread may take a socket off a device again (CAP_NET_RAW), asked of a spare socket."""
    if st.spare == -1:
        st.spare = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)
        if st.spare < 0 or set_option(st.spare, FP_SO_BINDTOIFINDEX, LOOPBACK) != 0:
            close_socket(st.spare)
            st.spare = -2
            return False
        st.spare_netns = netns_of(st.spare)
    # The first time anybody may; from then on the answer tells. Rights can be given up meanwhile.
    return (st.spare >= 0 and netns == st.spare_netns
            and set_option(st.spare, FP_SO_BINDTOIFINDEX, LOOPBACK) == 0)


cdef int make_call(fp_notif *call, int sock, const sockaddr_storage *raw, int size) noexcept nogil:
    cdef int result
    if call.nr == FP_NR_BIND:
        result = bind(sock, <const sockaddr *>raw, <socklen_t>size)
    else:
        result = listen(sock, <int>call.args[1])
    return 0 if result == 0 else -errno


cdef int beside(
    State *st, fp_notif *call, int sock, const sockaddr_storage *raw, int size, Held **covering, int n
) noexcept nogil:
    """The call with hold and socket on two devices for its duration: sockets on different devices are no rivals.

    A stranger, on no device, is a rival of the hold all the while, whatever else it sets. The hold's
    device does not exist, the socket's is the loopback, which bind(2) to any address accepts.
    """
    cdef int device = option(sock, SOL_SOCKET, FP_SO_BINDTOIFINDEX)
    cdef int result
    cdef int i
    cdef uint64_t since
    if device == 0:
        set_option(sock, FP_SO_BINDTOIFINDEX, LOOPBACK)
    since = now()
    for i in range(n):
        set_option(covering[i].fd, FP_SO_BINDTOIFINDEX, NOWHERE)
    result = make_call(call, sock, raw, size)
    for i in range(n):
        set_option(covering[i].fd, FP_SO_BINDTOIFINDEX, 0)
    window(st, since)
    # bind(2) to a link-local address has put the socket on that address's device: then it stays there
    if device == 0 and option(sock, SOL_SOCKET, FP_SO_BINDTOIFINDEX) == LOOPBACK:
        set_option(sock, FP_SO_BINDTOIFINDEX, 0)
    return result


cdef int through(
    State *st, fp_notif *call, int sock, const sockaddr_storage *raw, int size, Held **covering, int n
) noexcept nogil:
    """The call with the doors open for its duration.

    SO_REUSEADDR, not SO_REUSEPORT: the port's bucket in the kernel remembers the latter, and lets
    others of the same user in later. It must be on both sockets, at listen(2) too, which looks for
    rivals again. A stranger that sets both in the moment of a bind leaves such a mark; the child's
    listen, which does not set SO_REUSEPORT, takes it away.
    """
    cdef int result = 0
    cdef int tries
    cdef int i
    cdef uint64_t since
    cdef timespec pause
    pause.tv_sec = 0
    pause.tv_nsec = 50000
    for tries in range(5):
        since = now()
        for i in range(n):
            set_option(covering[i].fd, SO_REUSEADDR, 1)
        result = make_call(call, sock, raw, size)
        for i in range(n):
            if covering[i].opens == 0:
                set_option(covering[i].fd, SO_REUSEADDR, 0)
        window(st, since)
        if result != -EADDRINUSE or call.nr == FP_NR_BIND:
            break
        # Another socket of the child listens there, or a stranger that came in beside its bind does,
        # maybe for a moment only; it is not to cost the child its port.
        nanosleep(&pause, NULL)
    return result


cdef int perform(
    State *st, Child *child, fp_notif *call, int sock, const sockaddr_storage *raw, int size,
    Held **covering, int n, uint64_t netns,
) noexcept nogil:
    """Bind or listen on the fetched socket; 0 or minus errno. The lock is held.

    Taking SO_REUSEADDR from the child's socket afterwards keeps others out of one that is bound and
    does not listen yet. One that listens keeps it: nobody gets in beside a listener or beside the
    hold, and the connections inherit it, so that those left in TIME_WAIT (tw_reuse) do not keep the
    program from its port when it starts again.
    """
    cdef int had = option(sock, SOL_SOCKET, SO_REUSEADDR)
    cdef int result
    cdef int i
    if child.exclusive:
        set_option(sock, SO_REUSEPORT, 0)
    if had == 0:
        set_option(sock, SO_REUSEADDR, 1)
    if may_move(st, netns):
        for i in range(n):
            if covering[i].opens == 0:  # whoever opened the door, it is shut while we are at work
                set_option(covering[i].fd, SO_REUSEADDR, 0)
        result = beside(st, call, sock, raw, size, covering, n)
    else:
        result = through(st, call, sock, raw, size, covering, n)
    if had == 0 and (call.nr == FP_NR_BIND or result != 0):
        set_option(sock, SO_REUSEADDR, 0)
    st.performed += 1
    return result


cdef bint on_socket(
    State *st, Child *child, fp_notif *call, int sock, sockaddr_storage *raw, int size,
    Address *where, int32_t *error,
) noexcept nogil:
    """Answer a call whose socket is in our hands; True when ``error`` is the answer."""
    cdef Held *covering[COVERING]
    cdef socklen_t length = sizeof(sockaddr_storage)
    cdef int n
    cdef int proto = proto_of(sock)
    cdef uint64_t netns
    cdef bint ours = False
    if proto == 0:
        return False
    if call.nr == FP_NR_LISTEN:
        if getsockname(sock, <sockaddr *>raw, &length) != 0:
            return False
        size = <int>length
        if not parse_address(raw, size, where) or where.port == 0:
            return False
    where.v6only = option(sock, IPPROTO_IPV6, IPV6_V6ONLY) == 1
    netns = netns_of(sock)
    pthread_mutex_lock(&st.lock)
    n = covering_holds(st, child, where, proto, netns, call.pid, covering)
    if n < 0:
        st.denied += 1
        error[0] = -EADDRINUSE
        ours = True
    elif n > 0 and valid(child.listener, call.id):
        error[0] = perform(st, child, call, sock, raw, size, covering, n, netns)
        ours = True
    pthread_mutex_unlock(&st.lock)
    return ours


cdef void refuse(State *st, Child *child, int cause, int error, uint32_t pid, uint16_t port) noexcept nogil:
    pthread_mutex_lock(&st.lock)
    st.refused += 1
    note(st, child, cause, error, pid, port)
    pthread_mutex_unlock(&st.lock)


cdef bint read_address(
    State *st, Child *child, fp_notif *call, sockaddr_storage *raw, int *size, Address *where
) noexcept nogil:
    """The address of a bind(2), once; False when it is none of ours. The notification is still good."""
    cdef int got
    cdef bint known
    size[0] = <int>call.args[2]
    if size[0] < 16 or size[0] > <int>sizeof(sockaddr_storage):
        return False  # shorter or longer than any address of ours; the kernel finds its own words
    # A page of the child may take long to come (userfaultfd): the lock is not held here.
    got = peek(call.pid, call.args[1], raw, size[0])
    if got != 0:
        if got == -EPERM or got == -EACCES:
            refuse(st, child, CAUSE_READ, -got, call.pid, 0)
        return False
    if not parse_address(raw, size[0], where):
        return False
    pthread_mutex_lock(&st.lock)
    known = has_port(st, where.port)
    pthread_mutex_unlock(&st.lock)
    return known and valid(child.listener, call.id)


cdef bint brokered(State *st, Child *child, fp_notif *call, int32_t *error) noexcept nogil:
    """Answer one call of a brokered child; True when ``error`` is the answer, else it may go on."""
    cdef sockaddr_storage raw
    cdef Address where
    cdef int size = 0
    cdef int sock
    cdef int cause = CAUSE_FETCH
    cdef bint ours
    memset(&raw, 0, sizeof(raw))
    memset(&where, 0, sizeof(where))
    if call.nr == FP_NR_BIND and not read_address(st, child, call, &raw, &size, &where):
        return False
    sock = fetch(call.pid, <int>call.args[0])
    if sock < 0:
        if sock != -EBADF and sock != -ESRCH:
            if sock == -EMFILE or sock == -ENFILE or sock == -ENOMEM:
                cause = CAUSE_LIMIT
            elif sock == -EINVAL:
                cause = CAUSE_TABLE
            refuse(st, child, cause, -sock, call.pid, where.port)
        return False
    ours = on_socket(st, child, call, sock, &raw, size, &where, error)
    close(sock)
    return ours

# ---------------------------------------------------------------- bind-door: the door follows the call


cdef int find_socket(
    State *st, int family, int protocol, uint16_t port, uint32_t states, uint64_t inode
) noexcept nogil:
    """1 if the kernel lists a socket with this local port and inode in one of ``states``, else 0; sock_diag(7)."""
    cdef fp_diag_request ask
    cdef char answer[16384]
    cdef uint32_t *head
    cdef ssize_t got
    cdef ssize_t at
    cdef int found = 0
    if st.netlink < 0:
        st.netlink = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 4)
        if st.netlink < 0:
            return 0
    memset(&ask, 0, sizeof(ask))
    ask.length = sizeof(ask)
    ask.type = 20  # SOCK_DIAG_BY_FAMILY
    ask.flags = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
    ask.family = <uint8_t>family
    ask.protocol = <uint8_t>protocol
    ask.states = states
    ask.attribute_length = 12
    ask.attribute_type = 1  # INET_DIAG_REQ_BYTECODE: local port equal to
    ask.code1 = 11
    ask.yes1 = 8
    ask.no1 = 12
    ask.no2 = port
    if send(st.netlink, &ask, sizeof(ask), 0) < 0:
        return 0
    while True:
        got = recv(st.netlink, answer, sizeof(answer), 0)
        if got < 16:
            return found
        at = 0
        while at + 16 <= got:
            head = <uint32_t *>&answer[at]
            if (head[1] & 0xffff) == 3 or (head[1] & 0xffff) == 2:  # NLMSG_DONE, NLMSG_ERROR
                return found
            if (<fp_diag_message *>&answer[at + 16]).inode == <uint32_t>inode:
                found = 1
            if head[0] < 16:
                return found
            at += (head[0] + 3) & ~3


cdef bint kernel_shows(State *st, int nr, int protocols, uint16_t port, uint64_t inode) noexcept nogil:
    """Whether the socket is bound (or listens, after that call) as the kernel lists it."""
    cdef uint32_t states = 1u << 10 if nr == FP_NR_LISTEN else 1u << 13
    if protocols & TCP and (find_socket(st, AF_INET, IPPROTO_TCP, port, states, inode)
                            or find_socket(st, AF_INET6, IPPROTO_TCP, port, states, inode)):
        return True
    return bool(protocols & UDP and nr == FP_NR_BIND and (
        find_socket(st, AF_INET, IPPROTO_UDP, port, 0xffffffff, inode)
        or find_socket(st, AF_INET6, IPPROTO_UDP, port, 0xffffffff, inode)))


cdef void learn_shows_bound(State *st) noexcept nogil:
    cdef sockaddr_in at
    cdef stat_t about
    cdef socklen_t size = sizeof(at)
    cdef int sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)
    st.shows_bound = 0
    if sock < 0:
        return
    memset(&at, 0, sizeof(at))
    at.sin_family = <uint16_t>AF_INET
    if (bind(sock, <sockaddr *>&at, sizeof(at)) == 0 and fstat(sock, &about) == 0
            and getsockname(sock, <sockaddr *>&at, &size) == 0):
        st.shows_bound = find_socket(
            st, AF_INET, IPPROTO_TCP, ntohs(at.sin_port), 1u << 13, about.st_ino)
    close(sock)


cdef int where_is(uint32_t tid, int nr) noexcept nogil:
    """1 if the thread is certainly not in that system call any more, 0 if it is, -1 if nobody can say."""
    cdef char path[64]
    cdef char text[64]
    cdef ssize_t got
    cdef int fd
    snprintf(path, sizeof(path), "/proc/%u/syscall", tid)
    fd = open(path, O_RDONLY | O_CLOEXEC)
    if fd < 0:
        return 1 if errno == ENOENT or errno == ESRCH else -1
    got = read(fd, text, sizeof(text) - 1)
    close(fd)
    if got <= 0:
        return 1 if got < 0 and errno == ESRCH else -1
    text[got] = 0
    if text[0] == c"r":  # "running"
        return -1
    return 0 if atoi(text) == nr else 1


cdef void shut(State *st, int index) noexcept nogil:
    """End one call under way: close its doors unless another call still needs them. The lock is held."""
    cdef Door *door = &st.doors[index]
    cdef Held *h
    cdef int i
    cdef int j
    for i in range(door.n_holds):
        for j in range(st.n_held):
            h = &st.held[j]
            if h.inode == door.holds[i] and h.opens > 0:
                h.opens -= 1
                if h.opens == 0 and still_held(h):
                    set_option(h.fd, SO_REUSEADDR, 0)
    window(st, door.opened)
    st.n_doors -= 1
    st.doors[index] = st.doors[st.n_doors]


cdef void shut_of(State *st, uint32_t tid) noexcept nogil:
    """A thread that makes its next call has done the one before. The lock is held."""
    cdef int i = 0
    while i < st.n_doors:
        if st.doors[i].tid == tid:
            shut(st, i)
        else:
            i += 1


cdef void settle(State *st) noexcept nogil:
    """Look after every call under way; only the serving thread adds doors or takes them away."""
    cdef int i = 0
    cdef int left
    cdef Door *door
    cdef uint64_t at
    cdef bint done
    while i < st.n_doors:
        door = &st.doors[i]
        left = where_is(door.tid, door.nr)
        at = now()
        done = left == 1
        # A listing of bound sockets takes the kernel milliseconds, so it is not asked for each time.
        if left == -1 and at - door.asked > 300000:
            done = kernel_shows(st, door.nr, door.protocols, door.port, door.inode)
            if not done and door.nr == FP_NR_BIND and not st.shows_bound:
                done = kernel_shows(st, <int>FP_NR_LISTEN, TCP, door.port, door.inode)
            door.asked = now()
        pthread_mutex_lock(&st.lock)
        if not done and at - door.opened > (<uint64_t>1000000000 if st.shows_bound else <uint64_t>30000000000):
            note(st, NULL, CAUSE_SLOW, 0, door.tid, door.port)
            done = True
        if done:
            shut(st, i)
        else:
            i += 1
        pthread_mutex_unlock(&st.lock)


cdef void bind_door(State *st, Child *child, fp_notif *call) noexcept nogil:
    """Open the door for one call of a child whose sockets cannot be fetched; the call is to go on then."""
    cdef sockaddr_storage raw
    cdef Address where
    cdef Held *covering[COVERING]
    cdef Door *door
    cdef int size = 0
    cdef int n
    cdef int i
    cdef int protocols = TCP | UDP if call.nr == FP_NR_BIND else TCP
    cdef uint64_t inode
    memset(&where, 0, sizeof(where))
    if call.nr == FP_NR_BIND and not read_address(st, child, call, &raw, &size, &where):
        return
    inode = inode_of(call.pid, <int>call.args[0])
    if inode == 0:
        if errno == EACCES or errno == EPERM:
            refuse(st, child, CAUSE_FETCH, errno, call.pid, where.port)
        return
    if not valid(child.listener, call.id):
        return
    if st.shows_bound < 0:
        learn_shows_bound(st)
    pthread_mutex_lock(&st.lock)
    if call.nr == FP_NR_BIND:
        n = covering_holds(st, child, &where, protocols, 0, call.pid, covering)
        if n > 0:
            child.known[child.known_at % SOCKETS].inode = inode
            child.known[child.known_at % SOCKETS].where = where
            child.known_at += 1
    else:
        n = 0
        for i in range(SOCKETS):
            if child.known[i].inode == inode:
                where = child.known[i].where
                n = covering_holds(st, child, &where, protocols, 0, call.pid, covering)
                break
    if n > 0 and st.n_doors < DOORS:
        door = &st.doors[st.n_doors]
        st.n_doors += 1
        door.tid = call.pid
        door.nr = call.nr
        door.port = where.port
        door.protocols = 0
        door.inode = inode
        door.n_holds = n
        door.opened = now()
        door.asked = door.opened
        for i in range(n):
            door.protocols |= covering[i].proto
            door.holds[i] = covering[i].inode
            covering[i].opens += 1
            set_option(covering[i].fd, SO_REUSEADDR, 1)
        st.performed += 1
    pthread_mutex_unlock(&st.lock)

# ---------------------------------------------------------------- the serving thread


cdef void serve_one(State *st, Child *child) noexcept nogil:
    """Take one notification of a child and answer it."""
    cdef uint64_t room[32]  # more than struct seccomp_notif, which may grow
    cdef fp_notif *call = <fp_notif *>room
    cdef fp_answer answer
    memset(room, 0, sizeof(room))
    if ioctl(child.listener, FP_RECV, room) != 0:
        return  # the caller was killed meanwhile
    memset(&answer, 0, sizeof(answer))
    if st.n_doors:
        pthread_mutex_lock(&st.lock)
        shut_of(st, call.pid)
        pthread_mutex_unlock(&st.lock)
    if not child.fetch:
        bind_door(st, child, call)
        answer.flags = FP_CONTINUE
    elif not brokered(st, child, call, &answer.error):
        answer.flags = FP_CONTINUE
    if answer.flags:
        st.passed += 1
    answer.id = call.id
    ioctl(child.listener, FP_SEND, &answer)


cdef void drop(State *st, int index) noexcept nogil:
    """End the service of a child. The lock is held."""
    close(st.children[index].listener)
    free(st.children[index])
    st.n_children -= 1
    st.children[index] = st.children[st.n_children]
    st.version += 1


cdef void unref(State *st) noexcept nogil:
    """Give up one reference. The lock is held, and let go."""
    cdef int i
    st.references -= 1
    if st.references:
        pthread_mutex_unlock(&st.lock)
        return
    for i in range(st.n_children):
        close(st.children[i].listener)
        free(st.children[i])
    pthread_mutex_unlock(&st.lock)
    pthread_mutex_destroy(&st.lock)
    free(st.children)
    free(st.held)
    free(st)


cdef int start_thread(void *(*body)(void *) noexcept nogil, void *argument, pthread_t *joinable) noexcept nogil:
    """A thread that no signal handler runs in; detached unless ``joinable``."""
    cdef pthread_attr_t attributes
    cdef pthread_t thread
    cdef sigset_t everything
    cdef sigset_t before
    cdef int result
    if pthread_attr_init(&attributes) != 0:
        return ENOMEM
    if joinable == NULL:
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED)
    sigfillset(&everything)
    pthread_sigmask(SIG_SETMASK, &everything, &before)
    result = pthread_create(&thread if joinable == NULL else joinable, &attributes, body, argument)
    pthread_sigmask(SIG_SETMASK, &before, NULL)
    pthread_attr_destroy(&attributes)
    return result


cdef void *serve(void *argument) noexcept nogil:
    cdef State *st = <State *>argument
    cdef pollfd *polled = NULL
    cdef Child **served = NULL  # the array in the state may move when a child is added
    cdef void *more
    cdef int n = 0
    cdef int room = 0
    cdef int i
    cdef unsigned version = 0
    cdef bint fresh = True
    cdef uint64_t count
    cdef timespec brief
    brief.tv_sec = 0
    brief.tv_nsec = 50000
    prctl(PR_SET_NAME, <const char *>b"fastports-serve")
    while True:
        pthread_mutex_lock(&st.lock)
        if fresh or st.version != version:
            i = 0
            while i < st.n_children:
                if st.children[i].stopped:
                    drop(st, i)
                else:
                    i += 1
            if st.n_children == 0 and st.n_notes == 0:
                while st.n_doors:
                    shut(st, 0)
                st.running = False
                close(st.wake)
                st.wake = -1
                close_socket(st.netlink)
                close_socket(st.spare)
                st.netlink = st.spare = -1
                free(polled)
                free(served)
                unref(st)
                return NULL
            if room < st.n_children + 1:
                more = realloc(polled, (2 * st.n_children + 8) * sizeof(pollfd))
                if more != NULL:
                    polled = <pollfd *>more
                    more = realloc(served, (2 * st.n_children + 8) * sizeof(Child *))
                    if more != NULL:
                        served = <Child **>more
                        room = 2 * st.n_children + 8
            if room:
                n = min(st.n_children + 1, room)
                polled[0].fd = st.wake
                polled[0].events = POLLIN
                for i in range(1, n):
                    served[i] = st.children[i - 1]
                    polled[i].fd = served[i].listener
                    polled[i].events = POLLIN
                version = st.version
                fresh = False
        if st.n_notes and not st.reporting:
            st.reporting = True
            st.references += 1
            if start_thread(report, st, NULL) != 0:
                st.reporting = False
                st.references -= 1
                st.n_notes = 0
        pthread_mutex_unlock(&st.lock)
        if ppoll(polled, n, &brief if st.n_doors else NULL, NULL) < 0:
            continue
        if polled[0].revents:
            read(st.wake, &count, sizeof(count))
        for i in range(1, n):
            if polled[i].revents & POLLIN:
                serve_one(st, served[i])
            elif polled[i].revents:  # POLLHUP: the last process with this filter is gone
                served[i].stopped = True
                fresh = True
        if st.n_doors:
            settle(st)


cdef void *report(void *argument) noexcept nogil:
    """Tell what the serving thread noted; a thread of its own, for it waits for the GIL."""
    cdef State *st = <State *>argument
    cdef Note notes[NOTES]
    cdef int n
    while True:
        pthread_mutex_lock(&st.lock)
        n = st.n_notes
        memcpy(notes, st.notes, n * sizeof(Note))
        st.n_notes = 0
        if n == 0:
            st.reporting = False
            unref(st)
            return NULL
        pthread_mutex_unlock(&st.lock)
        if Py_IsInitialized():
            tell(notes, n)


cdef State *new_state() noexcept nogil:
    cdef State *st = <State *>calloc(1, sizeof(State))
    if st != NULL:
        pthread_mutex_init(&st.lock, NULL)
        st.references = 1
        st.wake = -1
        st.netlink = -1
        st.spare = -1
        st.shows_bound = -1
        rebuild(st)
    return st


cdef int hold_socket(State *st, int64_t block, int fd) noexcept nogil:
    """Enter one held socket; 0, or minus errno (-EINVAL: not a bound TCP or UDP socket). The lock is held."""
    cdef sockaddr_storage raw
    cdef socklen_t length = sizeof(raw)
    cdef stat_t about
    cdef Held *h
    cdef void *more
    if fstat(fd, &about) != 0 or getsockname(fd, <sockaddr *>&raw, &length) != 0:
        return -errno
    if st.n_held == st.room_held:
        more = realloc(st.held, (2 * st.room_held + 16) * sizeof(Held))
        if more == NULL:
            return -ENOMEM
        st.held = <Held *>more
        st.room_held = 2 * st.room_held + 16
    h = &st.held[st.n_held]
    memset(h, 0, sizeof(Held))
    h.fd = fd
    h.block = block
    h.proto = proto_of(fd)
    h.inode = about.st_ino
    h.netns = netns_of(fd)
    if h.proto == 0 or not parse_address(&raw, <int>length, &h.where) or h.where.port == 0:
        return -EINVAL
    h.where.v6only = option(fd, IPPROTO_IPV6, IPV6_V6ONLY) == 1
    h.next = st.heads[bucket(h.where.port)]
    st.heads[bucket(h.where.port)] = st.n_held
    st.n_held += 1
    return 0


cdef void unhold(State *st, int64_t block) noexcept nogil:
    """Forget the held sockets of a block, and leave their doors closed. The lock is held."""
    cdef int i
    cdef int kept = 0
    for i in range(st.n_held):
        if st.held[i].block != block:
            st.held[kept] = st.held[i]
            kept += 1
        elif st.held[i].opens and still_held(&st.held[i]):
            set_option(st.held[i].fd, SO_REUSEADDR, 0)
    st.n_held = kept
    rebuild(st)


cdef void tell(Note *notes, int n) noexcept with gil:
    try:
        told = [(notes[i].cause, notes[i].error, notes[i].pid, notes[i].port) for i in range(n)]
        # A thread that threading did not start would leave a dummy entry there when it logs.
        from threading import Thread

        Thread(target=_log, args=(told,), name="fastports-notes", daemon=True).start()
    except Exception as exc:  # there is no caller to raise it to
        import sys

        sys.excepthook(type(exc), exc, exc.__traceback__)


def _why_no_access(pid):
    """Facts about a process that ptrace permission was refused for."""
    facts = []
    try:
        with open_file(f"/proc/{pid}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except (OSError, ValueError):
        return "it has ended"
    facts.append(f"parent {status.get('PPid', '?')}, uid {status.get('Uid', '?').split(chr(9))[0]}")
    try:
        with open_file("/proc/sys/kernel/yama/ptrace_scope") as file:
            facts.append(f"kernel.yama.ptrace_scope {file.read().strip()}")
    except OSError:
        pass
    return ", ".join(facts)


def _describe(cause, error, pid, port):
    from os import strerror

    what = f"bind of port {port}" if port else "bind or listen call"
    if cause == CAUSE_READ or cause == CAUSE_FETCH:
        return (
            f"a {what} by process {pid} was left to the kernel, which refuses a held port: "
            f"{'reading its address' if cause == CAUSE_READ else 'fetching its socket'} failed with "
            f"{strerror(error)} ({_why_no_access(pid)}). A process that is non-dumpable, of another "
            "user, or under Yama no descendant of the launcher cannot be served; "
            "hand its ports over with handoff=\"door\" or \"fd\"."
        )
    if cause == CAUSE_LIMIT:
        return (
            f"a {what} by process {pid} was left to the kernel, which refuses a held port: the launcher "
            f"could not take its socket ({strerror(error)}). Raise the limit of open files."
        )
    if cause == CAUSE_GONE:
        return (
            f"process {pid} asks for port {port}, but the block was released: the call was left to the "
            "kernel. Keep the block until the child has ended."
        )
    if cause == CAUSE_TABLE:
        return (
            f"a {what} by thread {pid} was left to the kernel, which refuses a held port: the thread has "
            "descriptors of its own, which can be fetched from Linux 6.9 on. Bind in another thread."
        )
    return (
        f"port {port}: the door was closed although the call of thread {pid} was not seen done; "
        "another program of this user may have entered meanwhile. Look at who listens there."
    )


def _log(told):
    from logging import getLogger  # 15 ms, and only where something went wrong

    logger = getLogger("fastports")
    for cause, error, pid, port in told:
        logger.warning("%s", _describe(cause, error, pid, port))

# ---------------------------------------------------------------- what Python sees


def install():
    """Filter the calling thread and what it starts from here on; returns the listener's descriptor.

    Sets no_new_privs, which cannot be undone. Meant for a process that is about to execute another
    program; until somebody serves the listener, bind(2) and listen(2) wait.

    Raises
    ------
    OSError
        EINVAL before Linux 5.19 (no WAIT_KILLABLE_RECV), EBUSY where a filter with a listener is in
        place already, ENOSYS on another architecture than x86-64 and aarch64; seccomp(2).
    """
    cdef int fd
    with nogil:
        fd = install_filter()
    if fd < 0:
        raise _os_error(-fd)
    return fd


def receive(int sock):
    """The descriptor a filtered child sent over ``sock``; close-on-exec. EPIPE at the end of the stream."""
    cdef int fd
    with nogil:
        fd = receive_descriptor(sock)
    if fd < 0:
        raise _os_error(-fd)
    return Descriptor(fd)


FLAGS = FP_NEW_LISTENER | FP_WAIT_KILLABLE_RECV  # for seccomp(2), with what `program` returns


def pair():
    """Two connected UNIX stream sockets, both close-on-exec, for a listener to travel over."""
    cdef int ends[2]
    if socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0:
        raise _os_error(errno)
    return Descriptor(ends[0]), Descriptor(ends[1])


def program(machine=None):
    """The filter as an array of struct sock_filter, for this machine, ``"x86_64"`` or ``"aarch64"``."""
    cdef sock_filter ops[FILTER_LENGTH]
    if machine is None:
        write_filter(ops, FP_ARCH, <uint32_t>FP_NR_BIND, <uint32_t>FP_NR_LISTEN)
    elif machine == "x86_64":
        write_filter(ops, FP_ARCH_X86_64, 49, 50)
    elif machine == "aarch64":
        write_filter(ops, FP_ARCH_AARCH64, 200, 201)
    else:
        raise ValueError(f"no filter for {machine!r}; it is made for 'x86_64' and 'aarch64'")
    return (<char *>ops)[:sizeof(ops)]


cdef object _os_error(int error):
    from os import strerror

    return OSError(error, strerror(error))


@cython.final
cdef class Broker:
    """Serves the children of this process; see the module.

    Methods may be called from any thread. Descriptors of held sockets stay their owner's, who calls
    `discard` before closing them. In a forked child a broker serves nobody: the listeners are
    closed there, so that a child of the parent gets ENOSYS instead of waiting for somebody who
    never answers.
    """

    cdef State *st
    cdef int pid
    cdef object __weakref__

    def __cinit__(self):
        self.st = new_state()
        if self.st == NULL:
            raise MemoryError
        self.pid = getpid()
        from os import register_at_fork
        from weakref import WeakMethod

        before, parent, child = (
            WeakMethod(getattr(self, name)) for name in ("_lock", "_unlock", "_forked")
        )

        def run(method):
            return lambda: (bound := method()) is not None and bound()

        register_at_fork(before=run(before), after_in_parent=run(parent), after_in_child=run(child))

    def __dealloc__(self):
        cdef State *st = self.st
        cdef int i
        if st == NULL:
            return
        self.st = NULL
        pthread_mutex_lock(&st.lock)
        for i in range(st.n_children):
            st.children[i].stopped = True
        self._wake_up(st)
        unref(st)

    cdef void _wake_up(self, State *st) noexcept:
        cdef uint64_t one = 1
        st.version += 1
        if st.wake >= 0:
            write(st.wake, &one, sizeof(one))

    def _lock(self):
        pthread_mutex_lock(&self.st.lock)

    def _unlock(self):
        pthread_mutex_unlock(&self.st.lock)

    def _forked(self):
        cdef State *st = self.st
        cdef int i
        for i in range(st.n_children):
            close(st.children[i].listener)
            free(st.children[i])
        st.n_children = 0
        st.cut = True
        if st.wake >= 0:
            close(st.wake)
        close_socket(st.netlink)
        close_socket(st.spare)
        st.wake = st.netlink = st.spare = -1
        st.n_held = st.n_doors = st.n_notes = 0
        rebuild(st)
        st.running = False
        st.reporting = False
        st.references = 1
        self.pid = getpid()
        pthread_mutex_unlock(&st.lock)

    def add(self, fds):
        """Enter the held sockets of one block; returns the block's number here."""
        cdef State *st = self.st
        cdef int error = 0
        cdef int fd
        cdef int64_t block
        numbers = [int(fd) for fd in fds]
        pthread_mutex_lock(&st.lock)
        st.next_id += 1
        block = st.next_id
        for fd in numbers:
            error = hold_socket(st, block, fd)
            if error:
                unhold(st, block)
                break
        pthread_mutex_unlock(&st.lock)
        if error:
            raise _os_error(-error)
        return block

    def is_open(self, block):
        """Whether a call of a bind-door child is under way, with a door of this block open for it."""
        cdef State *st = self.st
        cdef int64_t number = block
        cdef int i
        cdef bint is_open = False
        pthread_mutex_lock(&st.lock)
        for i in range(st.n_held):
            if st.held[i].block == number and st.held[i].opens:
                is_open = True
        pthread_mutex_unlock(&st.lock)
        return is_open

    def discard(self, block):
        """Forget the held sockets of a block; its children's calls go to the kernel. Idempotent."""
        cdef int64_t number = block
        if getpid() != self.pid:
            return  # between fork and `_forked`, which forgets everything
        pthread_mutex_lock(&self.st.lock)
        unhold(self.st, number)
        pthread_mutex_unlock(&self.st.lock)

    def serve(self, block, listener, *, fetch=True, exclusive=False):
        """Serve the processes behind ``listener`` for a block; returns the child's number here.

        Parameters
        ----------
        block
            What `add` returned.
        listener
            Descriptor of the child's filter, as `receive` returned it. The broker takes it over.
        fetch
            True performs the calls on the child's socket; False (bind-door) opens the door while the
            child makes them.
        exclusive
            Take SO_REUSEPORT from the child's sockets, so that nobody of the same user joins them.
        """
        cdef State *st = self.st
        cdef Child *child = <Child *>calloc(1, sizeof(Child))
        cdef void *more
        cdef int error = 0
        if child == NULL:
            raise MemoryError
        child.listener = listener.detach()
        # Linux 6.6+: wake the other side on this processor, which halves a round trip
        ioctl(child.listener, FP_SET_FLAGS, <unsigned long>1)
        child.block = block
        child.fetch = bool(fetch)
        child.exclusive = bool(exclusive)
        pthread_mutex_lock(&st.lock)
        st.next_id += 1
        child.id = st.next_id
        number = child.id
        if st.n_children == st.room_children:
            more = realloc(st.children, (2 * st.room_children + 8) * sizeof(Child *))
            if more == NULL:
                error = ENOMEM
            else:
                st.children = <Child **>more
                st.room_children = 2 * st.room_children + 8
        if not error and not st.running:
            st.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            if st.wake < 0:
                error = errno
            else:
                st.references += 1
                error = start_thread(serve, st, NULL)
                if error:
                    st.references -= 1
                    close(st.wake)
                    st.wake = -1
                else:
                    st.running = True
        if error:
            close(child.listener)
            free(child)
        else:
            st.children[st.n_children] = child
            st.n_children += 1
            self._wake_up(st)
        pthread_mutex_unlock(&st.lock)
        if error:
            raise _os_error(error)
        return number

    def left(self, child):
        """Whether every process behind this child's filter has ended and was reaped.

        Filters are inherited and cannot be taken off, so that nobody hides from this. False where
        it is not known, as after `stop`.
        """
        cdef State *st = self.st
        cdef int64_t number = child
        cdef int i
        cdef pollfd asked
        pthread_mutex_lock(&st.lock)
        cdef bint left = not st.cut  # if the serving thread has dropped it already
        for i in range(st.n_children):
            if st.children[i].id == number:
                asked.fd = st.children[i].listener
                asked.events = POLLIN
                asked.revents = 0
                left = poll(&asked, 1, 0) == 1 and asked.revents & POLLHUP
        pthread_mutex_unlock(&st.lock)
        return left

    def stop(self, child):
        """End the service of a child: what still runs of it gets ENOSYS from bind and listen. Idempotent."""
        cdef State *st = self.st
        cdef int64_t number = child
        cdef int i
        pthread_mutex_lock(&st.lock)
        for i in range(st.n_children):
            if st.children[i].id == number:
                st.children[i].stopped = True
                self._wake_up(st)
                st.cut = True
        pthread_mutex_unlock(&st.lock)

    def close(self):
        """End the service of all children. Idempotent."""
        cdef State *st = self.st
        cdef int i
        pthread_mutex_lock(&st.lock)
        st.cut = True
        for i in range(st.n_children):
            st.children[i].stopped = True
        self._wake_up(st)
        pthread_mutex_unlock(&st.lock)

    @property
    def running(self):
        """Whether the serving thread runs."""
        return bool(self.st.running)

    @property
    def children(self):
        """How many children are served."""
        return self.st.n_children

    def counts(self):
        """What was done so far.

        ``performed`` calls were made by us (or with the door open for them), ``passed`` were left to
        the kernel, ``denied`` were for another block of this launcher, ``refused`` are those of the
        passed that could not be looked at.
        """
        cdef State *st = self.st
        return {
            "performed": st.performed, "passed": st.passed, "denied": st.denied,
            "refused": st.refused,
        }

    def windows(self):
        """How long the door was open each of the last 4096 times, in nanoseconds, oldest first."""
        cdef State *st = self.st
        cdef uint64_t i
        cdef uint64_t first
        cdef uint64_t end
        # No Python object is made under the lock: making one may run a finalizer that wants it.
        cdef uint32_t *copy = <uint32_t *>calloc(WINDOWS, sizeof(uint32_t))
        if copy == NULL:
            raise MemoryError
        pthread_mutex_lock(&st.lock)
        end = st.n_windows
        memcpy(copy, st.windows, sizeof(st.windows))
        pthread_mutex_unlock(&st.lock)
        first = end - WINDOWS if end > WINDOWS else 0
        try:
            return [copy[i % WINDOWS] for i in range(first, end)]
        finally:
            free(copy)

# ---------------------------------------------------------------- what works here


cdef struct Trial:
    int sock
    int installed
    int result
    sockaddr_in where
    int ready           # eventfd


cdef void *attempt(void *argument) noexcept nogil:
    """Bind a port through the filter; filters and no_new_privs are a thread's own, and end with it."""
    cdef Trial *trial = <Trial *>argument
    cdef uint64_t one = 1
    trial.installed = install_filter()
    write(trial.ready, &one, sizeof(one))
    if trial.installed >= 0:
        trial.result = 0
        if bind(trial.sock, <sockaddr *>&trial.where, sizeof(trial.where)) != 0:
            trial.result = errno
    return NULL


cdef enum:
    STAGE_OK = 0
    STAGE_SETUP = 1
    STAGE_FILTER = 2
    STAGE_READ = 3
    STAGE_FETCH = 4
    STAGE_FACTS = 5


cdef int rehearse(int *error) noexcept nogil:
    """Broker one bind between two threads of ours; the stage that failed, with its errno."""
    cdef State *st = new_state()
    cdef Child child
    cdef Trial trial
    cdef pthread_t thread
    cdef pollfd ready
    cdef uint64_t count
    cdef socklen_t size = sizeof(sockaddr_in)
    cdef int stage = STAGE_SETUP
    cdef int hold = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)
    cdef int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)
    memset(&child, 0, sizeof(child))
    memset(&trial, 0, sizeof(trial))
    trial.sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)
    trial.ready = eventfd(0, EFD_CLOEXEC)
    trial.where.sin_family = <uint16_t>AF_INET
    trial.where.sin_addr.s_addr = htonl(0x7f000001)
    child.block = 1
    child.fetch = True
    error[0] = errno
    if (st != NULL and hold >= 0 and stranger >= 0 and trial.sock >= 0 and trial.ready >= 0
            and bind(hold, <sockaddr *>&trial.where, sizeof(trial.where)) == 0
            and getsockname(hold, <sockaddr *>&trial.where, &size) == 0
            and hold_socket(st, 1, hold) == 0):
        error[0] = start_thread(attempt, &trial, &thread)
        if error[0] == 0:
            read(trial.ready, &count, sizeof(count))
            if trial.installed < 0:
                stage = STAGE_FILTER
                error[0] = -trial.installed
            else:
                child.listener = trial.installed
                ready.fd = child.listener
                ready.events = POLLIN
                poll(&ready, 1, 5000)
                if ready.revents & POLLIN:
                    serve_one(st, &child)
                close(child.listener)  # whatever happened: the thread waits no longer
            pthread_join(thread, NULL)
            if trial.installed >= 0:
                set_option(stranger, SO_REUSEADDR, 1)
                stage = STAGE_FACTS
                error[0] = trial.result
                if st.n_notes and st.notes[0].cause == CAUSE_READ:
                    stage = STAGE_READ
                    error[0] = st.notes[0].error
                elif st.n_notes:
                    stage = STAGE_FETCH
                    error[0] = st.notes[0].error
                elif trial.result == 0:
                    # beside the hold, and the door is closed again to a stranger with SO_REUSEADDR
                    if (bind(stranger, <sockaddr *>&trial.where, sizeof(trial.where)) != 0
                            and errno == EADDRINUSE):
                        stage = STAGE_OK
    else:
        error[0] = errno
    close_socket(hold)
    close_socket(stranger)
    close_socket(trial.sock)
    close_socket(trial.ready)
    if st != NULL:
        close_socket(st.spare)
        pthread_mutex_lock(&st.lock)
        unref(st)
    return stage


def probe():
    """Whether the broker works in this process, found by doing it once between two threads.

    Returns
    -------
    dict[str, str | None]
        ``"broker"`` and ``"bind-door"``, each with None where it works, else with the cause. Takes
        about a tenth of a millisecond; leaves nothing behind.
    """
    cdef int stage
    cdef int error = 0
    with nogil:
        stage = rehearse(&error)
    if stage == STAGE_OK:
        cause = _scope()
        return {"broker": cause, "bind-door": cause}
    from os import strerror

    why = strerror(error)
    if stage == STAGE_FILTER:
        if error == EINVAL:
            cause = "the kernel has no SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (Linux 5.19 or newer is needed)"
        elif error == EBUSY:
            cause = (
                "another seccomp filter with a notification listener is in place already (a container "
                "manager's, or this process is itself a brokered child)"
            )
        elif FP_ARCH == 0:
            cause = "the filter is made for x86-64 and aarch64 only"
        else:
            cause = f"seccomp(2) refuses a filter with a listener: {why}"
        return {"broker": cause, "bind-door": cause}
    if stage == STAGE_READ:
        cause = f"process_vm_readv(2) is refused: {why}"
        return {"broker": cause, "bind-door": cause}
    if stage == STAGE_FETCH:
        cause = (
            f"pidfd_getfd(2) is refused: {why} (the default seccomp profile of a container does this; "
            "CAP_SYS_PTRACE or another profile allows it)"
        )
        return {"broker": cause, "bind-door": _scope()}
    if stage == STAGE_FACTS:
        cause = "this kernel does not let a bind pass beside a held port as the broker needs it"
    else:
        cause = f"the rehearsal could not be set up: {why}"
    return {"broker": cause, "bind-door": cause}


def stays_shut():
    """Whether a brokered bind leaves the door shut in this thread's network namespace.

    With CAP_NET_RAW (root, also in containers with the usual rights) the broker moves hold and child
    to different devices for the call, and no socket without a device gets in. Without it the door is
    open for some microseconds, and a program of this user that hammers the port with SO_REUSEADDR
    and SO_REUSEPORT together may get in.
    """
    cdef State *st = new_state()
    cdef int sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)
    cdef bint may = False
    if st != NULL:
        if sock >= 0:
            may = may_move(st, netns_of(sock))
        close_socket(st.spare)
        pthread_mutex_lock(&st.lock)
        unref(st)
    close_socket(sock)
    return may


def _scope():
    """What the rehearsal cannot see, because a thread may always look at its own process: Yama."""
    try:
        with open_file("/proc/sys/kernel/yama/ptrace_scope") as file:
            scope = int(file.read())
    except (OSError, ValueError):
        return None
    if scope < 2:
        return None
    with open_file("/proc/self/status") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    if scope == 2 and effective >> 19 & 1:  # CAP_SYS_PTRACE
        return None
    return f"kernel.yama.ptrace_scope is {scope}, which forbids looking at a child (1 or less is needed)"
