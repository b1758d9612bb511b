# cython: freethreading_compatible=True
"""Starting programs: clone, prepare, exec, in C, without the GIL.

PR_SET_PDEATHSIG, which makes a child end with its launcher, fires when the *thread* that made the
child ends (prctl(2)), so children are made by a thread that lives as long as they do: by the main
thread, where it is the one that asks and has nothing to do before exec, else by one thread of our
own, the *spawner*. It starts with its first child and ends with the last one reaped. In between it
sleeps in the kernel and never takes the GIL.

The child is made as posix_spawn(3) makes it (CLONE_VM | CLONE_VFORK on a stack of its own): nothing is
copied however large the launcher is, no fork handler of any library runs, and until exec the child
shares our memory while the thread that made it stands still. Errors and the gate therefore need no pipe: they
are words in the order that both see.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strerror

from fastports cimport _linux as c

cdef extern from *:
    """
    static pthread_mutex_t fp_registry_lock = PTHREAD_MUTEX_INITIALIZER;
    #define fp_load(word) __atomic_load_n((word), __ATOMIC_ACQUIRE)
    #define fp_store(word, value) __atomic_store_n((word), (value), __ATOMIC_RELEASE)
    static int fp_swap(int *word, int expected, int value) {
        return __atomic_compare_exchange_n(
            word, &expected, value, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
    """
    c.pthread_mutex_t registry_lock "fp_registry_lock"
    int load "fp_load"(int* word) nogil
    void store "fp_store"(int* word, int value) nogil
    bint swap "fp_swap"(int* word, int expected, int value) nogil

#: What becomes of the child's process group.
SHARED, OWN_GROUP, OWN_SESSION = range(3)

#: Where a start can fail, in this order; ``OSError.stage`` is an index into it.
STAGES = ("fork", "group", "descriptors", "directory", "filter", "gate", "exec")

cdef enum:
    FORK
    GROUP
    DESCRIPTORS
    DIRECTORY
    FILTER
    GATE
    EXEC

cdef enum:  # the word of an order
    STARTING
    AT_GATE
    GO
    ABORT
    DONE

cdef enum:
    STACK = 256 * 1024  # of the spawner; static TLS of large libraries is taken from it, too
    CHILD_STACK = 64 * 1024  # of the child before exec; 16 KiB are in use at most
    LEASH_FROM = 200  # the leash sits above the descriptors that people give numbers to


cdef struct Order:
    # What to do. Everything is owned by the Process that waits for it.
    char** programs
    char** argv
    char** envp
    char pid_variable[32]  # "LISTEN_PID=...", written by the child
    bint tells_pid
    const char* cwd
    int* source
    int* target
    int mapped
    int above
    int group
    int death_signal
    int leash
    c.sock_fprog filter
    unsigned int filter_flags
    int filter_to
    bint gated
    c.pid_t launcher
    # What came of it.
    int word
    int stage
    int error
    c.pid_t pid
    int pidfd
    Order* next


cdef struct Spawner:
    c.pthread_t thread
    c.pthread_mutex_t mutex
    c.pthread_cond_t work
    Order* first
    Order* last
    bint stop
    long users  # orders and children not reaped; guarded by registry_lock
    char* stack


# One spawner a process, because one thread has to outlive every child; guarded by registry_lock.
cdef Spawner* current = NULL
cdef bint fork_handled = False


cdef void futex_wake(int* word) noexcept nogil:
    c.syscall(c.SYS_futex, word, c.FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, NULL, NULL, 0)


cdef void futex_wait(int* word, int value, long milliseconds) noexcept nogil:
    cdef c.timespec span
    span.tv_sec = milliseconds // 1000
    span.tv_nsec = (milliseconds % 1000) * 1000000
    c.syscall(c.SYS_futex, word, c.FUTEX_WAIT_PRIVATE, value, &span, NULL, 0)


# -- in the child, between clone and exec: async-signal-safe calls only ---------------------------

cdef void give_up(Order* order, int error) noexcept nogil:
    order.error = error
    c._exit(127)


cdef void close_listed(unsigned int first, unsigned int last) noexcept nogil:
    """close_range(2) where there is none, or a sandbox refuses it: what /proc lists."""
    cdef char buffer[2048]
    cdef int listing = c.open(b"/proc/self/fd", c.O_RDONLY | c.O_DIRECTORY | c.O_CLOEXEC)
    cdef long got, at
    cdef unsigned int fd
    cdef bint closed = True
    cdef char* name
    if listing < 0:
        return  # everything of ours is close-on-exec
    while closed:  # closing while listing may skip entries: until a pass finds nothing to close
        closed = False
        c.lseek(listing, 0, 0)
        while True:
            got = c.syscall(c.SYS_getdents64, listing, buffer, sizeof(buffer))
            if got <= 0:
                break
            at = 0
            while at < got:  # struct linux_dirent64: length at 16, name at 19
                name = buffer + at + 19
                at += (<unsigned short*>(buffer + at + 16))[0]
                if not c'0' <= name[0] <= c'9':
                    continue
                fd = 0
                while name[0] != 0:
                    fd = fd * 10 + name[0] - c'0'
                    name += 1
                if first <= fd <= last and fd != <unsigned int>listing:
                    closed |= c.close(fd) == 0
    c.close(listing)


cdef void close_between(unsigned int first, unsigned int last) noexcept nogil:
    if first <= last and c.syscall(c.SYS_close_range, first, last, 0) < 0:
        close_listed(first, last)


cdef int place(Order* order) noexcept nogil:
    """Put the descriptors where they belong and close all others; the leash's number or -1."""
    cdef int index, low, high
    cdef int leash = -1
    cdef unsigned int first = 3
    # Sources go out of the targets' way first: any mapping works, also a swap, also with 0-2 closed.
    for index in range(order.mapped):
        order.source[index] = c.fcntl(order.source[index], c.F_DUPFD_CLOEXEC, order.above)
        if order.source[index] < 0:
            give_up(order, errno)
    if order.filter_to >= 0:
        order.filter_to = c.fcntl(order.filter_to, c.F_DUPFD_CLOEXEC, order.above)
        if order.filter_to < 0:
            give_up(order, errno)
    if order.leash >= 0:
        leash = c.fcntl(order.leash, c.F_DUPFD, max(order.above, <int>LEASH_FROM))
        if leash < 0:  # a low RLIMIT_NOFILE
            leash = c.fcntl(order.leash, c.F_DUPFD, order.above)
    for index in range(order.mapped):
        if c.dup2(order.source[index], order.target[index]) < 0:
            give_up(order, errno)
    for index in range(order.mapped):  # targets ascend
        if order.target[index] >= <int>first:
            close_between(first, order.target[index] - 1)
            first = order.target[index] + 1
    low = min(leash, order.filter_to)
    high = max(leash, order.filter_to)
    if low >= 0:
        close_between(first, low - 1)
        first = low + 1
    if high >= 0:
        close_between(first, high - 1)
        first = high + 1
    close_between(first, 0xFFFFFFFF)
    return leash


cdef void hand_over_filter(Order* order) noexcept nogil:
    """Install the seccomp filter; its listener, if it has one, goes to the launcher alone."""
    cdef char control[64]
    cdef char byte = 0
    cdef c.iovec vector
    cdef c.msghdr message
    cdef c.cmsghdr* header
    cdef int listener
    if c.prctl(c.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
        give_up(order, errno)
    listener = c.syscall(
        c.SYS_seccomp, c.SECCOMP_SET_MODE_FILTER, order.filter_flags, &order.filter
    )
    if listener < 0:
        give_up(order, errno)
    if order.filter_to < 0:
        return
    memset(&message, 0, sizeof(message))
    memset(control, 0, sizeof(control))
    vector.iov_base = &byte
    vector.iov_len = 1
    message.msg_iov = &vector
    message.msg_iovlen = 1
    message.msg_control = control
    message.msg_controllen = c.CMSG_SPACE(sizeof(int))
    header = c.CMSG_FIRSTHDR(&message)
    header.cmsg_level = c.SOL_SOCKET
    header.cmsg_type = c.SCM_RIGHTS
    header.cmsg_len = c.CMSG_LEN(sizeof(int))
    (<int*>c.CMSG_DATA(header))[0] = listener
    if c.sendmsg(order.filter_to, &message, c.MSG_NOSIGNAL) < 0:
        give_up(order, errno)
    c.close(listener)
    c.close(order.filter_to)


cdef void write_pid(Order* order) noexcept nogil:
    """``LISTEN_PID=`` and the child's own pid, which only it knows (sd_listen_fds(3))."""
    cdef char digits[12]
    cdef int count = 0
    cdef int at
    cdef c.pid_t pid = c.getpid()
    while pid > 0:
        digits[count] = c'0' + pid % 10
        pid //= 10
        count += 1
    memcpy(order.pid_variable, <const char*>b"LISTEN_PID=", 11)
    for at in range(count):
        order.pid_variable[11 + at] = digits[count - 1 - at]
    order.pid_variable[11 + count] = 0


cdef bint orphaned(Order* order) noexcept nogil:
    cdef c.pid_t parent = c.getppid()
    return parent != order.launcher and parent != 0  # 0: a pid namespace of its own


cdef int child(void* argument) noexcept nogil:
    cdef Order* order = <Order*>argument
    cdef uint64_t[4] default  # the kernel's struct sigaction, all zero: SIG_DFL
    cdef c.sigset_t none
    cdef int number, leash
    cdef int saved = 0
    cdef char** program = order.programs

    # Every signal is blocked still, so that no handler of the launcher can run in its memory here.
    # By the bare call: sigaction(3) refuses the two that the C library keeps for itself; ignored, as
    # its posix_spawn leaves them to children of a program with handlers for them, they would stay
    # so after exec.
    memset(&default, 0, sizeof(default))
    for number in range(1, 65):
        c.syscall(c.SYS_rt_sigaction, number, &default, NULL, 8)

    order.stage = GROUP
    if order.death_signal:
        c.prctl(c.PR_SET_PDEATHSIG, order.death_signal, 0, 0, 0)
        if orphaned(order):  # the launcher ended before the kernel knew whom to tell
            c._exit(127)
    if order.group == 1 and c.setpgid(0, 0) < 0:
        give_up(order, errno)
    if order.group == 2 and c.setsid() < 0:
        give_up(order, errno)

    order.stage = DESCRIPTORS
    leash = place(order)
    if leash >= 0:
        # When the launcher ends, the kernel closes the other end of this pipe and tells the owner
        # of its readiness signal, which is the whole group, and whose signal is SIGKILL: fcntl(2).
        c.fcntl(leash, c.F_SETOWN, -c.getpid())
        c.fcntl(leash, c.F_SETSIG, c.SIGKILL)
        c.fcntl(leash, c.F_SETFL, c.O_ASYNC | c.O_NONBLOCK)

    order.stage = DIRECTORY
    if order.cwd != NULL and c.chdir(order.cwd) < 0:
        give_up(order, errno)

    if order.tells_pid:
        write_pid(order)

    order.stage = FILTER
    if order.filter.len:
        hand_over_filter(order)

    order.stage = GATE
    if order.gated:
        swap(&order.word, STARTING, AT_GATE)
        futex_wake(&order.word)
        while load(&order.word) == AT_GATE:
            futex_wait(&order.word, AT_GATE, 100)
            if orphaned(order):
                c._exit(127)
    if load(&order.word) == ABORT:
        c._exit(127)

    order.stage = EXEC
    c.sigemptyset(&none)
    c.sigprocmask(c.SIG_SETMASK, &none, NULL)
    while program[0] != NULL:
        c.execve(program[0], order.argv, order.envp)
        if errno != c.ENOENT and errno != c.ENOTDIR and not saved:
            saved = errno  # as execvp(3): the first candidate that exists explains the failure
        program += 1
    give_up(order, saved if saved else errno)
    return 127


# -- in the spawner -------------------------------------------------------------------------------

cdef void launch(Order* order, char* stack, c.pthread_mutex_t* mutex) noexcept nogil:
    """Make the child; until it executes its program, this thread stands still.

    Whoever may signal the child meanwhile does so under the mutex.
    """
    cdef int status
    cdef int flags = c.CLONE_VM | c.CLONE_VFORK | c.CLONE_PARENT_SETTID | c.SIGCHLD
    cdef c.pid_t pid = c.clone(child, stack + CHILD_STACK, flags, order, &order.pid)
    if pid < 0:
        order.error = errno
        order.stage = FORK
        store(&order.pid, 0)
    elif order.error:
        if mutex != NULL:  # whoever aborts must not signal a pid used again
            c.pthread_mutex_lock(mutex)
        while c.waitpid(pid, &status, 0) < 0 and errno == c.EINTR:
            pass
        store(&order.pid, 0)
        if mutex != NULL:
            c.pthread_mutex_unlock(mutex)
    else:
        order.pidfd = c.syscall(c.SYS_pidfd_open, pid, 0)  # ours to reap: the pid is still its own
    store(&order.word, DONE)
    futex_wake(&order.word)


cdef void* serve(void* argument) noexcept nogil:
    cdef Spawner* spawner = <Spawner*>argument
    cdef Order* order
    c.pthread_mutex_lock(&spawner.mutex)
    while True:
        order = spawner.first
        if order != NULL:
            spawner.first = order.next
            c.pthread_mutex_unlock(&spawner.mutex)
            launch(order, spawner.stack, &spawner.mutex)
            c.pthread_mutex_lock(&spawner.mutex)
        elif spawner.stop:
            break
        else:
            c.pthread_cond_wait(&spawner.work, &spawner.mutex)
    c.pthread_mutex_unlock(&spawner.mutex)
    return NULL


# -- in the launcher's threads --------------------------------------------------------------------

cdef bint launch_here(Order* order) noexcept nogil:
    """Make the child in this thread; False for want of memory."""
    cdef char* stack = <char*>malloc(CHILD_STACK)
    cdef c.sigset_t every, before
    if stack == NULL:
        return False
    c.sigfillset(&every)
    c.pthread_sigmask(c.SIG_SETMASK, &every, &before)  # no handler may run in the child
    launch(order, stack, NULL)
    c.pthread_sigmask(c.SIG_SETMASK, &before, NULL)
    free(stack)
    return True


cdef void before_fork() noexcept nogil:
    c.pthread_mutex_lock(&registry_lock)


cdef void after_fork_in_parent() noexcept nogil:
    c.pthread_mutex_unlock(&registry_lock)


cdef void after_fork_in_child() noexcept nogil:
    global current
    # No thread but the forking one exists here. The children are the parent's, and so is its
    # spawner: what is left of it in memory may be in any state and is never looked at again.
    c.pthread_mutex_init(&registry_lock, NULL)
    current = NULL


cdef Spawner* begin(int* failure) noexcept nogil:
    """A spawner with its thread running, or NULL and why."""
    cdef Spawner* spawner = <Spawner*>calloc(1, sizeof(Spawner))
    cdef c.pthread_attr_t attributes
    cdef c.sigset_t every, before
    cdef int error
    failure[0] = c.ENOMEM
    if spawner == NULL:
        return NULL
    spawner.stack = <char*>malloc(CHILD_STACK)
    if spawner.stack == NULL:
        free(spawner)
        return NULL
    c.pthread_mutex_init(&spawner.mutex, NULL)
    c.pthread_cond_init(&spawner.work, NULL)
    c.pthread_attr_init(&attributes)
    c.pthread_attr_setstacksize(&attributes, STACK)
    c.sigfillset(&every)
    c.pthread_sigmask(c.SIG_SETMASK, &every, &before)  # the new thread takes it over
    error = c.pthread_create(&spawner.thread, &attributes, serve, spawner)
    c.pthread_sigmask(c.SIG_SETMASK, &before, NULL)
    c.pthread_attr_destroy(&attributes)
    if error:
        c.pthread_cond_destroy(&spawner.work)
        c.pthread_mutex_destroy(&spawner.mutex)
        free(spawner.stack)
        free(spawner)
        failure[0] = error
        return NULL
    c.pthread_setname_np(spawner.thread, b"fastports-spawn")
    return spawner


cdef Spawner* submit(Order* order, int* failure) noexcept nogil:
    """The spawner that has the order in its queue and one more user, or NULL and why."""
    global current, fork_handled
    cdef Spawner* spawner
    c.pthread_mutex_lock(&registry_lock)
    if not fork_handled:
        c.pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child)
        fork_handled = True
    if current == NULL:
        current = begin(failure)
    spawner = current
    if spawner != NULL:
        spawner.users += 1
        c.pthread_mutex_lock(&spawner.mutex)
        if spawner.first == NULL:
            spawner.first = order
        else:
            spawner.last.next = order
        spawner.last = order
        c.pthread_cond_signal(&spawner.work)
        c.pthread_mutex_unlock(&spawner.mutex)
    c.pthread_mutex_unlock(&registry_lock)
    return spawner


cdef void leave(Spawner* spawner) noexcept nogil:
    """One user less; the last one ends the thread and waits for its end."""
    global current
    cdef bint last
    c.pthread_mutex_lock(&registry_lock)
    spawner.users -= 1
    last = spawner.users == 0
    if last:
        current = NULL
    c.pthread_mutex_unlock(&registry_lock)
    if not last:
        return
    c.pthread_mutex_lock(&spawner.mutex)
    spawner.stop = True
    c.pthread_cond_signal(&spawner.work)
    c.pthread_mutex_unlock(&spawner.mutex)
    c.pthread_join(spawner.thread, NULL)
    c.pthread_cond_destroy(&spawner.work)
    c.pthread_mutex_destroy(&spawner.mutex)
    free(spawner.stack)
    free(spawner)


cdef char** strings(list items) except NULL:
    """A NULL-terminated array that points into the bytes objects of ``items``."""
    cdef char** array
    cdef bytes item
    cdef Py_ssize_t index
    for item in items:
        if b"\0" in item:
            raise ValueError("embedded null byte")
    array = <char**>calloc(len(items) + 1, sizeof(char*))
    if array == NULL:
        raise MemoryError
    for index, item in enumerate(items):
        array[index] = item
    return array


cdef void kill_and_reap(c.pid_t pid) noexcept nogil:
    cdef int status
    c.kill(pid, c.SIGKILL)
    while c.waitpid(pid, &status, 0) < 0 and errno == c.EINTR:
        pass


@cython.final
cdef class Process:
    """A child of this process, made by :func:`start`. It is reaped by :meth:`poll` and nowhere else.

    Until :meth:`keep` the child ends with this object: a signal handler may raise before anybody
    has it in hand.

    Attributes
    ----------
    pid
        Its process id; it also names its process group unless that is shared.
    pidfd
        A descriptor that becomes readable when the child ends, -1 where the kernel has none. Closed
        when this object goes.
    returncode
        As ``subprocess.Popen`` has it: None until reaped, minus the signal for a killed child, 255
        if somebody else took its status.
    """

    cdef readonly int pid
    cdef readonly int pidfd
    cdef readonly object returncode
    cdef Spawner* spawner
    cdef Order* order
    cdef list kept_alive
    cdef c.pid_t launcher
    cdef bint unreaped
    cdef bint kept

    def __cinit__(self):
        self.pidfd = -1

    def __init__(self):
        raise TypeError("a Process is made by start()")

    def __dealloc__(self):
        cdef bint mine = self.launcher == c.getpid()
        if mine and self.order != NULL and self.spawner != NULL:
            self.cancel()
        elif mine and self.unreaped and not self.kept:
            self.end()
        self.drop_order()
        if self.pidfd >= 0:
            c.close(self.pidfd)

    cdef void end(self) noexcept:
        """SIGKILL, and reap."""
        with nogil:
            kill_and_reap(self.pid)
            if self.spawner != NULL:
                leave(self.spawner)
                self.spawner = NULL

    cdef void drop_order(self) noexcept:
        cdef Order* order = self.order
        self.order = NULL
        if order != NULL:
            free(order.programs)
            free(order.argv)
            free(order.envp)
            free(order.source)
            free(order.target)
            free(order)

    cdef void cancel(self) noexcept:
        """Stop a start that is under way, wait until it has stopped, reap."""
        cdef Order* order = self.order
        cdef Spawner* spawner = self.spawner
        cdef c.pid_t pid
        cdef int word
        with nogil:
            while True:
                word = load(&order.word)
                if word == DONE:
                    break
                if word != ABORT and swap(&order.word, word, ABORT):
                    futex_wake(&order.word)
                c.pthread_mutex_lock(&spawner.mutex)
                pid = load(&order.pid)
                if pid > 0:
                    c.kill(pid, c.SIGKILL)
                c.pthread_mutex_unlock(&spawner.mutex)
                futex_wait(&order.word, ABORT, 10)
            if order.pid > 0:
                kill_and_reap(order.pid)
                if order.pidfd >= 0:
                    c.close(order.pidfd)
            self.spawner = NULL
            leave(spawner)
        self.returncode = -<int>c.SIGKILL
        self.drop_order()

    cdef attend(self, int word):
        """Until the order's word is another one; signals are let in."""
        try:
            while load(&self.order.word) == word:
                with nogil:
                    futex_wait(&self.order.word, word, 50)
                PyErr_CheckSignals()
        except BaseException:
            self.cancel()
            raise

    cdef settle(self):
        """Take over what became of a start that is done."""
        cdef Order* order = self.order
        cdef Spawner* spawner = self.spawner
        cdef int error = order.error
        cdef int stage = order.stage
        if not error:
            self.pid = order.pid
            self.pidfd = order.pidfd
            self.unreaped = True
            self.drop_order()
            self.kept_alive = None
            return
        if spawner != NULL:
            self.spawner = NULL
            with nogil:
                leave(spawner)
        self.drop_order()
        failure = OSError(error, strerror(error).decode())
        failure.stage = STAGES[stage]
        raise failure

    @property
    def at_gate(self):
        """Whether the child waits for :meth:`go` just before exec."""
        return self.order != NULL and load(&self.order.word) == AT_GATE

    def go(self):
        """Open the gate: the child executes its program.

        Raises
        ------
        OSError
            As :func:`start` does.
        """
        if self.order == NULL or not swap(&self.order.word, AT_GATE, GO):
            raise RuntimeError("this child does not wait at its gate")
        futex_wake(&self.order.word)
        self.attend(GO)
        self.settle()

    def keep(self):
        """From now on the child may outlive this object: somebody else sees to its end."""
        self.kept = True

    def abort(self):
        """End a child that waits at its gate: its program never runs. Idempotent."""
        if self.order != NULL and self.spawner != NULL and self.launcher == c.getpid():
            self.cancel()

    @cython.critical_section
    def poll(self):
        """Reap the child if it has ended; its return code, or None while it runs."""
        cdef int status
        cdef c.pid_t got
        cdef Spawner* spawner = self.spawner
        if not self.unreaped:
            return self.returncode
        if self.launcher != c.getpid():
            raise ChildProcessError(c.ECHILD, "the child belongs to the process that started it")
        while True:
            got = c.waitpid(self.pid, &status, c.WNOHANG)
            if got == 0:
                return None
            if got > 0 or errno != c.EINTR:
                break
        if got < 0:
            self.returncode = 255
        elif c.WIFSIGNALED(status):
            self.returncode = -c.WTERMSIG(status)
        else:
            self.returncode = c.WEXITSTATUS(status)
        self.unreaped = False
        if spawner != NULL:
            self.spawner = NULL
            with nogil:
                leave(spawner)
        return self.returncode

    @cython.critical_section
    def send_signal(self, int number):
        """Signal the child; False when it has been reaped. Its pid cannot be anybody else's."""
        if self.returncode is not None or self.pid <= 0:
            return False
        if self.pidfd >= 0:
            if c.syscall(c.SYS_pidfd_send_signal, self.pidfd, number, NULL, 0) == 0:
                return True
            if errno == c.ESRCH:
                return False
            if errno != c.ENOSYS and errno != c.EPERM:
                raise OSError(errno, strerror(errno).decode())
        if c.kill(self.pid, number) < 0:
            if errno == c.ESRCH:
                return False
            raise OSError(errno, strerror(errno).decode())
        return True

    def ended(self, double timeout=-1):
        """Wait until the child has ended, without reaping it; signals are let in.

        Parameters
        ----------
        timeout
            Seconds; 0 asks, a negative number waits for ever.

        Returns
        -------
        bool
            Whether it has ended.
        """
        cdef double deadline = now() + timeout
        cdef double left = timeout
        cdef double pause = 0.0005
        cdef c.timespec span
        cdef c.timespec* limit
        cdef c.pollfd asked
        cdef c.siginfo_t info
        cdef int got
        if self.returncode is not None:
            return True
        while True:
            if self.pidfd >= 0:
                limit = NULL
                asked.fd = self.pidfd
                asked.events = c.POLLIN
                if timeout >= 0:
                    span = seconds(left)
                    limit = &span
                with nogil:
                    got = c.ppoll(&asked, 1, limit, NULL)
                if got > 0:
                    return True
            else:
                memset(&info, 0, sizeof(info))
                got = c.waitid(c.P_PID, self.pid, &info, c.WEXITED | c.WNOWAIT | c.WNOHANG)
                if got < 0 or info.si_pid:
                    return True
                if left != 0:
                    span = seconds(pause if timeout < 0 or left > pause else left)
                    pause = min(pause * 1.5, 0.02)
                    with nogil:
                        c.nanosleep(&span, NULL)
            if timeout >= 0 and left <= 0:
                return False
            PyErr_CheckSignals()
            if timeout >= 0:
                left = max(deadline - now(), 0)  # 0: one last look


cdef double now() noexcept nogil:
    cdef c.timespec span
    c.clock_gettime(c.CLOCK_MONOTONIC, &span)
    return span.tv_sec + span.tv_nsec * 1e-9


cdef c.timespec seconds(double span) noexcept nogil:
    cdef c.timespec result
    span = min(max(span, 0), 1e9)
    result.tv_sec = <c.time_t>span
    result.tv_nsec = <long>((span - result.tv_sec) * 1e9)
    return result


def adopt_orphans():
    """Have descendants whose own parent ends become children of this process, as of pid 1: prctl(2)."""
    c.prctl(c.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def adopts_orphans():
    """Whether descendants whose own parent ends become children of this process."""
    cdef int adopts = c.getpid() == 1
    if not adopts:
        c.prctl(c.PR_GET_CHILD_SUBREAPER, &adopts, 0, 0, 0)
    return adopts != 0


def has_reader(int pipe):
    """Whether anybody has a read end of the pipe whose write end this is: poll(2)."""
    cdef c.pollfd asked
    cdef c.timespec zero
    zero.tv_sec = zero.tv_nsec = 0
    asked.fd = pipe
    asked.events = 0
    return c.ppoll(&asked, 1, &zero, NULL) == 0  # else POLLERR: nobody


def childless():
    """Whether this process has no child at all, not even one to be reaped."""
    cdef c.siginfo_t info
    cdef int got = c.waitid(c.P_ALL, 0, &info, c.WEXITED | c.WNOWAIT | c.WNOHANG)
    return got < 0 and errno == c.ECHILD


def start(
    list programs not None,
    list argv not None,
    list env not None,
    *,
    bytes cwd=None,
    dict descriptors=None,
    int group=1,
    int death_signal=9,
    int leash=-1,
    bint gate=False,
    bytes filter=None,
    unsigned int filter_flags=0,
    int filter_to=-1,
    bint listen_pid=False,
):
    """Start a program.

    The child gets default signal dispositions, an empty signal mask, and no descriptor but 0, 1, 2 and
    those given. Of the launcher's 0, 1 and 2, what is closed or close-on-exec stays closed.

    Parameters
    ----------
    programs
        Paths to try in turn, as bytes; the first that can be executed is.
    argv, env
        Arguments, and ``NAME=value`` strings, as bytes.
    cwd
        Directory to change to; relative ``programs`` start there.
    descriptors
        ``{number in the child: descriptor here}``. Any mapping works.
    group
        :data:`SHARED` leaves the child in the launcher's process group, :data:`OWN_GROUP` makes it
        the leader of its own, :data:`OWN_SESSION` of a session.
    death_signal
        What the child gets when the launcher ends, however it ends; 0 for nothing.
    leash
        Read end of a pipe whose write end only the launcher has, or -1. It is inherited by the child,
        at a high number, so that its whole group is killed when the write end closes.
    gate
        Return when the child is ready, just before exec, and has only its own descriptors open;
        :meth:`Process.go` lets it go on.
    filter, filter_flags, filter_to
        A seccomp filter (``struct sock_filter`` after ``struct sock_filter``) that the child installs
        last, after PR_SET_NO_NEW_PRIVS, with these flags of seccomp(2). With
        SECCOMP_FILTER_FLAG_NEW_LISTENER its listener is sent as SCM_RIGHTS, with one zero byte, to
        ``filter_to``, a socket whose other end the launcher has; the child keeps no copy. A gated
        child has sent it when :func:`start` returns.
    listen_pid
        Add ``LISTEN_PID``, the child's pid, to its environment.

    Raises
    ------
    OSError
        With ``stage``, one of :data:`STAGES`: what failed. Nothing is left of the child.
    """
    cdef Process process = Process.__new__(Process)
    cdef Order* order = <Order*>calloc(1, sizeof(Order))
    cdef int index, number, fd, error
    cdef bint done
    if order == NULL:
        raise MemoryError
    process.order = order
    process.launcher = c.getpid()
    process.kept_alive = [programs, argv, env, cwd, filter]
    order.launcher = process.launcher
    order.programs = strings(programs)
    order.argv = strings(argv)
    order.envp = strings([*env, b""] if listen_pid else env)
    if listen_pid:
        order.tells_pid = True
        order.envp[len(env)] = order.pid_variable
    if cwd is not None:
        if b"\0" in cwd:
            raise ValueError("embedded null byte")
        order.cwd = cwd
    order.above = 3
    if descriptors:
        order.mapped = len(descriptors)
        order.source = <int*>calloc(order.mapped, sizeof(int))
        order.target = <int*>calloc(order.mapped, sizeof(int))
        if order.source == NULL or order.target == NULL:
            raise MemoryError
        for index, (number, fd) in enumerate(sorted(descriptors.items())):
            if number < 0 or fd < 0:
                raise ValueError("a descriptor is negative")
            order.target[index] = number
            order.source[index] = fd
            order.above = max(order.above, number + 1)
    order.group = group
    order.death_signal = death_signal
    order.leash = leash
    order.gated = gate
    order.pidfd = -1
    order.filter_to = filter_to
    if filter is not None:
        order.filter.len = len(filter) // sizeof(c.sock_filter)
        order.filter.filter = <c.sock_filter*><char*>filter
        order.filter_flags = filter_flags
    if not gate and filter is None and c.syscall(c.SYS_gettid) == process.launcher:
        with nogil:
            done = launch_here(order)
        if not done:
            raise MemoryError
        process.settle()
        return process
    with nogil:
        process.spawner = submit(order, &error)
    if process.spawner == NULL:
        failure = OSError(error, strerror(error).decode())
        failure.stage = STAGES[FORK]
        raise failure
    process.attend(STARTING)
    if process.at_gate:
        process.pid = order.pid
    else:
        process.settle()
    return process
