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
    long lseek(int fd, long offset, int whence)
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
    int F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_SETFL, F_SETOWN, F_SETSIG, FD_CLOEXEC
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


cdef extern from "<signal.h>" nogil:
    int SIGCHLD, SIGKILL, SIG_SETMASK
    ctypedef struct sigset_t:
        pass
    int sigemptyset(sigset_t* signals)
    int sigfillset(sigset_t* signals)
    int sigprocmask(int how, const sigset_t* new, sigset_t* old)
    int pthread_sigmask(int how, const sigset_t* new, sigset_t* old)
    int kill(pid_t pid, int number)


cdef extern from "<sched.h>" nogil:
    int CLONE_VM, CLONE_VFORK, CLONE_PARENT_SETTID
    int clone(int (*entry)(void*) noexcept nogil, void* stack, int flags, void* argument, ...)


cdef extern from "<sys/wait.h>" nogil:
    int WNOHANG, WNOWAIT, WEXITED, P_ALL, P_PID
    ctypedef struct siginfo_t:
        pid_t si_pid
    pid_t waitpid(pid_t pid, int* status, int options)
    int waitid(int kind, pid_t id, siginfo_t* info, int options)
    bint WIFSIGNALED(int status)
    int WTERMSIG(int status)
    int WEXITSTATUS(int status)


cdef extern from "<sys/prctl.h>" nogil:
    int PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER
    int prctl(int option, ...)


cdef extern from "<linux/filter.h>" nogil:
    struct sock_filter:
        uint16_t code
    struct sock_fprog:
        unsigned short len
        sock_filter* filter


cdef extern from "<linux/seccomp.h>" nogil:
    int SECCOMP_SET_MODE_FILTER


cdef extern from "<linux/futex.h>" nogil:
    int FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE


cdef extern from "<sys/syscall.h>" nogil:
    long SYS_close_range "__NR_close_range"
    long SYS_futex, SYS_getdents64, SYS_gettid, SYS_seccomp
    long SYS_pidfd_open, SYS_pidfd_send_signal, SYS_rt_sigaction


cdef extern from "<time.h>" nogil:
    ctypedef long time_t
    int CLOCK_MONOTONIC
    struct timespec:
        time_t tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec* now)
    int nanosleep(const timespec* span, timespec* rest)


cdef extern from "<poll.h>" nogil:
    short POLLIN
    struct pollfd:
        int fd
        short events
        short revents
    int ppoll(pollfd* fds, unsigned long count, const timespec* timeout, const sigset_t* mask)


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_attr_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_attr_init(pthread_attr_t* attributes)
    int pthread_attr_setstacksize(pthread_attr_t* attributes, size_t size)
    int pthread_attr_destroy(pthread_attr_t* attributes)
    int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                       void* (*entry)(void*) noexcept nogil, void* argument)
    int pthread_join(pthread_t thread, void** result)
    int pthread_setname_np(pthread_t thread, const char* name)
    int pthread_mutex_init(pthread_mutex_t* mutex, const void* attributes)
    int pthread_mutex_destroy(pthread_mutex_t* mutex)
    int pthread_mutex_lock(pthread_mutex_t* mutex)
    int pthread_mutex_unlock(pthread_mutex_t* mutex)
    int pthread_cond_init(pthread_cond_t* condition, const void* attributes)
    int pthread_cond_destroy(pthread_cond_t* condition)
    int pthread_cond_signal(pthread_cond_t* condition)
    int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex)
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)
