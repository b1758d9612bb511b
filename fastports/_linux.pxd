"""Linux and libc declarations of the hand-off: sock_diag, processes, descriptors, futexes.

Partial structs with the fields used; the C headers know the rest.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "<errno.h>" nogil:
    int EACCES, EADDRINUSE, EAFNOSUPPORT, EAGAIN, ECHILD, EINTR, EINVAL, ENOENT, ENOMEM, ENOSYS
    int ENOTDIR, EPERM, EPROTO, EPROTONOSUPPORT, ESRCH, ETIMEDOUT


cdef extern from "<sys/types.h>" nogil:
    ctypedef int pid_t
    ctypedef unsigned int socklen_t


cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    int chdir(const char* path)
    int dup2(int source, int target)
    int execve(const char* path, char** argv, char** envp)
    void _exit(int status)
    pid_t getpid()
    pid_t getppid()
    int pipe2(int* fds, int flags)
    int setpgid(pid_t pid, pid_t group)
    pid_t setsid()
    long syscall(long number, ...)


cdef extern from "<fcntl.h>" nogil:
    int F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_SETFL, F_SETOWN, F_SETSIG, FD_CLOEXEC
    int O_ASYNC, O_CLOEXEC, O_DIRECTORY, O_NONBLOCK, O_RDONLY
    int fcntl(int fd, int command, ...)
    int open(const char* path, int flags)


cdef extern from "<arpa/inet.h>" nogil:
    uint16_t htons(uint16_t value)
    uint16_t ntohs(uint16_t value)
    uint32_t htonl(uint32_t value)


cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len


cdef extern from "<sys/socket.h>" nogil:
    int AF_INET, AF_INET6, AF_NETLINK, AF_UNIX
    int SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_CLOEXEC
    int SOL_SOCKET, SO_REUSEADDR, SO_REUSEPORT, SCM_RIGHTS, MSG_DONTWAIT, MSG_NOSIGNAL
    struct sockaddr:
        pass
    struct msghdr:
        void* msg_name
        socklen_t msg_namelen
        iovec* msg_iov
        size_t msg_iovlen
        void* msg_control
        size_t msg_controllen
        int msg_flags
    struct cmsghdr:
        size_t cmsg_len
        int cmsg_level
        int cmsg_type
    cmsghdr* CMSG_FIRSTHDR(msghdr* message)
    unsigned char* CMSG_DATA(cmsghdr* header)
    size_t CMSG_LEN(size_t length)
    size_t CMSG_SPACE(size_t length)
    int socket(int family, int kind, int protocol)
    int bind(int fd, sockaddr* address, socklen_t length)
    int listen(int fd, int backlog)
    int getsockname(int fd, sockaddr* address, socklen_t* length)
    int setsockopt(int fd, int level, int option, const void* value, socklen_t length)
    ssize_t send(int fd, const void* data, size_t length, int flags)
    ssize_t recv(int fd, void* data, size_t length, int flags)
    ssize_t sendmsg(int fd, msghdr* message, int flags)


cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_TCP, IPPROTO_UDP, IPPROTO_IPV6, IPV6_V6ONLY
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


cdef extern from "<linux/netlink.h>" nogil:
    int NETLINK_SOCK_DIAG, NLM_F_REQUEST, NLM_F_DUMP, NLM_F_DUMP_INTR, NLMSG_ERROR, NLMSG_DONE
    struct nlmsghdr:
        uint32_t nlmsg_len
        uint16_t nlmsg_type
        uint16_t nlmsg_flags
        uint32_t nlmsg_seq
        uint32_t nlmsg_pid
    struct nlmsgerr:
        int error
    struct nlattr:
        uint16_t nla_len
        uint16_t nla_type
    int NLMSG_HDRLEN


cdef extern from "<linux/sock_diag.h>" nogil:
    int SOCK_DIAG_BY_FAMILY


cdef extern from "<linux/inet_diag.h>" nogil:
    int INET_DIAG_REQ_BYTECODE, INET_DIAG_BC_S_GE, INET_DIAG_BC_S_LE
    struct inet_diag_sockid:
        uint16_t idiag_sport
        uint16_t idiag_dport
        uint32_t idiag_src[4]
        uint32_t idiag_dst[4]
        uint32_t idiag_if
        uint32_t idiag_cookie[2]
    struct inet_diag_req_v2:
        uint8_t sdiag_family
        uint8_t sdiag_protocol
        uint8_t idiag_ext
        uint32_t idiag_states
        inet_diag_sockid id
    struct inet_diag_bc_op:
        uint8_t code
        uint8_t yes
        uint16_t no
    struct inet_diag_msg:
        uint8_t idiag_family
        uint8_t idiag_state
        inet_diag_sockid id
        uint32_t idiag_uid
        uint32_t idiag_inode
