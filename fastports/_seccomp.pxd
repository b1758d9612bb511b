"""The filter that sends a child's bind(2) and listen(2) to its launcher, and the way its listener goes there.

Everything here runs between fork and exec in a process that was many-threaded a moment ago: system
calls only, no allocation, no lock, no Python. What the kernel headers of an old build machine do not
know yet is spelled out below.
"""

from libc.errno cimport EINTR, ENOSYS, EPIPE, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy, memset

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <unistd.h>
    #include <sys/prctl.h>
    #include <sys/socket.h>
    #include <sys/syscall.h>
    #include <linux/filter.h>

    #define FP_NR_SECCOMP __NR_seccomp
    #define FP_NR_BIND __NR_bind
    #define FP_NR_LISTEN __NR_listen
    #define FP_SET_MODE_FILTER 1
    #define FP_NEW_LISTENER (1UL << 3)
    #define FP_WAIT_KILLABLE_RECV (1UL << 5)
    #define FP_RET_USER_NOTIF 0x7fc00000U
    #define FP_RET_ALLOW 0x7fff0000U
    #define FP_ARCH_X86_64 0xc000003eU
    #define FP_ARCH_AARCH64 0xc00000b7U
    #if defined(__x86_64__) && !defined(__ILP32__)
    #define FP_ARCH FP_ARCH_X86_64
    #elif defined(__aarch64__) && !defined(__ILP32__)
    #define FP_ARCH FP_ARCH_AARCH64
    #else
    #define FP_ARCH 0
    #endif
    """
    const long FP_NR_SECCOMP, FP_NR_BIND, FP_NR_LISTEN
    const int FP_SET_MODE_FILTER
    const unsigned long FP_NEW_LISTENER, FP_WAIT_KILLABLE_RECV
    const uint32_t FP_RET_USER_NOTIF, FP_RET_ALLOW, FP_ARCH_X86_64, FP_ARCH_AARCH64, FP_ARCH

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int option, ...)
    const int PR_SET_NO_NEW_PRIVS

cdef extern from "<linux/filter.h>" nogil:
    struct sock_filter:
        uint16_t code
        uint8_t jt
        uint8_t jf
        uint32_t k
    struct sock_fprog:
        unsigned short len
        sock_filter *filter
    const int BPF_LD, BPF_W, BPF_ABS, BPF_JMP, BPF_JEQ, BPF_K, BPF_RET

cdef extern from "<sys/socket.h>" nogil:
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
    cmsghdr *CMSG_FIRSTHDR(msghdr *)
    unsigned char *CMSG_DATA(cmsghdr *)
    size_t CMSG_LEN(size_t)
    size_t CMSG_SPACE(size_t)
    ssize_t sendmsg(int, const msghdr *, int)
    ssize_t recvmsg(int, msghdr *, int)
    const int SOL_SOCKET, SCM_RIGHTS, MSG_NOSIGNAL, MSG_CMSG_CLOEXEC

cdef enum:
    FILTER_LENGTH = 7


cdef inline void _op(sock_filter *op, int code, int jt, int jf, uint32_t k) noexcept nogil:
    op.code = <uint16_t>code
    op.jt = <uint8_t>jt
    op.jf = <uint8_t>jf
    op.k = k


cdef inline void write_filter(
    sock_filter *ops, uint32_t arch, uint32_t nr_bind, uint32_t nr_listen
) noexcept nogil:
    """Write FILTER_LENGTH instructions: bind and listen of this architecture notify, the rest is allowed.

    System call numbers mean nothing without the architecture, so that is looked at first. A call of
    another one (i386 on x86-64, arm on aarch64) is allowed and meets the hold in the kernel, which
    refuses it as it refuses anybody. x32 reports the x86-64 architecture but sets bit 30 of its
    numbers, so that none of them equals one of ours. struct seccomp_data: nr at 0, arch at 4.
    """
    _op(&ops[0], BPF_LD | BPF_W | BPF_ABS, 0, 0, 4)
    _op(&ops[1], BPF_JMP | BPF_JEQ | BPF_K, 0, 4, arch)
    _op(&ops[2], BPF_LD | BPF_W | BPF_ABS, 0, 0, 0)
    _op(&ops[3], BPF_JMP | BPF_JEQ | BPF_K, 1, 0, nr_bind)
    _op(&ops[4], BPF_JMP | BPF_JEQ | BPF_K, 0, 1, nr_listen)
    _op(&ops[5], BPF_RET | BPF_K, 0, 0, FP_RET_USER_NOTIF)
    _op(&ops[6], BPF_RET | BPF_K, 0, 0, FP_RET_ALLOW)


cdef inline int install_filter() noexcept nogil:
    """Filter the calling thread (and what it forks and executes); the listener, or minus errno.

    The descriptor is close-on-exec. EINVAL: a kernel before 5.19, which lacks WAIT_KILLABLE_RECV;
    without it signals restart the call for ever, or interrupt a bind that was done. EBUSY: the
    thread has a filter with a listener already.
    """
    cdef sock_filter ops[FILTER_LENGTH]
    cdef sock_fprog program
    cdef long got
    if FP_ARCH == 0:
        return -ENOSYS
    if prctl(PR_SET_NO_NEW_PRIVS, <long>1, <long>0, <long>0, <long>0) != 0:
        return -errno
    write_filter(ops, FP_ARCH, <uint32_t>FP_NR_BIND, <uint32_t>FP_NR_LISTEN)
    program.len = FILTER_LENGTH
    program.filter = ops
    got = syscall(FP_NR_SECCOMP, <long>FP_SET_MODE_FILTER,
                  FP_NEW_LISTENER | FP_WAIT_KILLABLE_RECV, &program)
    return <int>got if got >= 0 else -errno


cdef inline int send_descriptor(int sock, int fd) noexcept nogil:
    """Send ``fd`` with one byte over a UNIX socket; 0, or minus errno."""
    cdef char control[64]
    cdef char byte = 1
    cdef msghdr message
    cdef iovec part
    cdef cmsghdr *head
    memset(&message, 0, sizeof(message))
    memset(control, 0, sizeof(control))
    part.iov_base = &byte
    part.iov_len = 1
    message.msg_iov = &part
    message.msg_iovlen = 1
    message.msg_control = control
    message.msg_controllen = CMSG_SPACE(sizeof(int))
    head = CMSG_FIRSTHDR(&message)
    head.cmsg_level = SOL_SOCKET
    head.cmsg_type = SCM_RIGHTS
    head.cmsg_len = CMSG_LEN(sizeof(int))
    memcpy(CMSG_DATA(head), &fd, sizeof(int))
    while sendmsg(sock, &message, MSG_NOSIGNAL) < 0:
        if errno != EINTR:
            return -errno
    return 0


cdef inline int receive_descriptor(int sock) noexcept nogil:
    """The descriptor sent by `send_descriptor`, close-on-exec; or minus errno, -EPIPE at the end of the stream."""
    cdef char control[64]
    cdef char byte
    cdef msghdr message
    cdef iovec part
    cdef cmsghdr *head
    cdef int fd = -1
    cdef ssize_t got
    memset(&message, 0, sizeof(message))
    part.iov_base = &byte
    part.iov_len = 1
    message.msg_iov = &part
    message.msg_iovlen = 1
    message.msg_control = control
    message.msg_controllen = CMSG_SPACE(sizeof(int))
    while True:
        got = recvmsg(sock, &message, MSG_CMSG_CLOEXEC)
        if got >= 0:
            break
        if errno != EINTR:
            return -errno
    head = CMSG_FIRSTHDR(&message)
    if got == 0 or head == NULL or head.cmsg_type != SCM_RIGHTS:
        return -EPIPE
    memcpy(&fd, CMSG_DATA(head), sizeof(int))
    return fd
