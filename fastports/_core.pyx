# cython: language_level=3, freethreading_compatible=True, cdivision=True, binding=False
"""Sockets, descriptors, buffers and counts: draw a candidate, bind it, hold it.

This module knows no range policy, no block and no retry, and keeps no state of its own. The hot
loop is :meth:`Search.step`: it runs without the GIL and comes up every ``BATCH`` binds so that the
interpreter can deliver signals.

A hold is a socket that is bound with no option set and never listens (bind(2), socket(7)): while it
lives nobody else can bind the port, not even with SO_REUSEADDR or SO_REUSEPORT.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_ND, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetObject
from cpython.long cimport PyLong_AsLongAndOverflow
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset
from fastports._sys cimport *

from io import FileIO

cdef extern from "Python.h":
    int Py_AddPendingCall(int (*)(void *) noexcept, void *)

cdef extern from *:
    """
    #define FP_POPCOUNT(x) __builtin_popcountll(x)
    #define FP_CTZ(x) __builtin_ctzll(x)
    static inline void fp_store(int *at, int value) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); }
    static inline int fp_load(int *at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
    #define FP_ADD(at, n) __atomic_fetch_add(at, n, __ATOMIC_RELAXED)
    #define FP_TAKE(at, n) __atomic_exchange_n(at, n, __ATOMIC_RELAXED)
    #define FP_READ(at) __atomic_load_n(at, __ATOMIC_RELAXED)
    """
    void fp_store(int *, int) noexcept nogil
    int fp_load(int *) noexcept nogil
    int64_t FP_ADD(int64_t *, int64_t) noexcept nogil
    int64_t FP_TAKE(int64_t *, int64_t) noexcept nogil
    int64_t FP_READ(int64_t *) noexcept nogil
    int FP_POPCOUNT(uint64_t) nogil
    int FP_CTZ(uint64_t) nogil


cdef enum Status:
    IS_FOUND = 0
    IS_EXHAUSTED = -1
    MORE = -2

cdef enum:
    BATCH = 1024  # binds between two looks at pending signals: under 10 ms even when all succeed
    NAME_MAX_BYTES = 107  # sizeof(sun_path) less the leading NUL (unix(7))
    BEACONS = 16
    EARLY = 16  # busy ports seen before a beacon is worth its 3 us
    BEACON_QUEUE = 10  # net.unix.max_dgram_qlen where nobody raised it (unix(7))
    LAST_LOOKS = 3
    MANY = 262144  # bytes
    LAST_LOOK_WAIT_MS = 10
    TALLY_SLOTS = 64
    CROSSING = 253  # SCM_MAX_FD: descriptors in one message (unix(7))
    MESSAGE = 32768  # bytes of a message between two processes
    ANCILLARY = 256  # words, 2048 bytes: CMSG_SPACE for CROSSING descriptors, and credentials that nobody asked for
    SCM_PIDFD = 4  # Linux 6.5

TCP = 1
UDP = 2

FOUND = <int>IS_FOUND
EXHAUSTED = <int>IS_EXHAUSTED

FREE = 0
BUSY = 1
DENIED = 2
PRIVILEGED = 3


# --- abstract UNIX sockets -------------------------------------------------------------------

cdef int set_abstract(sockaddr_un *address, const char *name, size_t length) noexcept nogil:
    """Fill ``address`` with the abstract name; the length to give to bind and connect."""
    memset(address, 0, sizeof(sockaddr_un))
    address.sun_family = AF_UNIX
    memcpy(&address.sun_path[1], name, length)
    return <int>(sizeof(sa_family_t) + 1 + length)


cdef bint name_is_bound(int fd, sockaddr_un *address, int length) noexcept nogil:
    """Whether somebody in this network namespace has bound the abstract name.

    ``fd`` is an unbound datagram socket. Only ECONNREFUSED says that nobody has: an LSM that
    forbids the connection (Landlock's abstract socket scope) does so after the name was found.
    """
    cdef sockaddr reset
    if connect(fd, <sockaddr *>address, length) == 0:
        memset(&reset, 0, sizeof(reset))  # AF_UNSPEC: let go of the peer
        connect(fd, &reset, sizeof(reset))
        return True
    return errno != ECONNREFUSED


cdef char *write_number(char *at, long number, int base) noexcept nogil:
    """Write a number in lower-case digits; where the next character goes."""
    cdef char digits[20]
    cdef int count = 0
    while True:
        digits[count] = b"0123456789abcdef"[number % base]
        number //= base
        count += 1
        if number <= 0:
            break
    while count > 0:
        count -= 1
        at[0] = digits[count]
        at += 1
    return at


cdef int marker_name(char *name, bint udp, int port) noexcept nogil:
    """``fastports/m/t/20417`` (``u`` for UDP); returns its length."""
    memcpy(name, b"fastports/m/u/" if udp else b"fastports/m/t/", 14)
    return <int>(write_number(name + 14, port, 10) - name)


cdef bint is_marked(int fd, bint udp, int port) noexcept nogil:
    cdef char name[32]
    cdef sockaddr_un address
    cdef int length = set_abstract(&address, name, marker_name(name, udp, port))
    return name_is_bound(fd, &address, length)


def marker(int protocol, int port):
    """The abstract name (bytes, without its leading NUL) that marks one port as taken."""
    cdef char name[32]
    cdef int length = marker_name(name, protocol == UDP, port)
    return <bytes>name[:length]


def bind_abstract(bytes name not None):
    """Bind an abstract UNIX datagram socket; the descriptor, close-on-exec.

    Raises OSError: EADDRINUSE when the name is taken in this network namespace.
    """
    cdef sockaddr_un address
    cdef int fd, error
    if len(name) > NAME_MAX_BYTES:
        raise ValueError(f"an abstract name has at most {NAME_MAX_BYTES} bytes, got {len(name)}")
    cdef int length = set_abstract(&address, name, len(name))
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)
    if fd < 0:
        raise_errno(errno)
    if bind(fd, <sockaddr *>&address, length) != 0:
        error = errno
        close(fd)
        raise_errno(error)
    return fd


def is_bound(bytes name not None):
    """Whether anybody in this network namespace has bound the abstract name."""
    cdef sockaddr_un address
    if len(name) > NAME_MAX_BYTES:
        return False
    cdef int length = set_abstract(&address, name, len(name))
    cdef int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)
    if fd < 0:
        raise_errno(errno)
    cdef bint bound = name_is_bound(fd, &address, length)
    close(fd)
    return bound


cdef int raise_errno(int error) except -1:
    import os
    raise OSError(error, os.strerror(error))


# --- small files, addresses and limits --------------------------------------------------------------------

cpdef bytes read_file(bytes path):
    """What a file of /proc has that gives it in one read; None where it cannot be read.

    No signal handler can run between the opening and the closing of the descriptor.
    """
    cdef char few[1024]
    cdef char *many
    cdef char *more
    cdef size_t size = MANY
    cdef ssize_t count, got
    cdef bytes text = None
    cdef int fd = open(<const char *>path, O_RDONLY | O_CLOEXEC)
    if fd < 0:
        return None
    count = pread(fd, few, sizeof(few), 0)
    if 0 <= count < <ssize_t>sizeof(few):
        text = <bytes>few[:count]
    elif count > 0:
        # A long list of reserved ports: the kernel has an answer for offset 0 only
        # (proc_do_large_bitmap), so it is read at once; at most 32,768 times "65535,". Or an
        # environment, which may be larger.
        many = <char *>malloc(size)
        count = pread(fd, many, size, 0) if many != NULL else -1
        while count == <ssize_t>size:
            more = <char *>realloc(many, 2 * size)
            if more == NULL:
                count = -1
                break
            many = more
            got = pread(fd, many + size, size, <long>size)
            count = count + got if got >= 0 else -1
            size *= 2
        if count >= 0:
            text = many[:count]
        free(many)
    close(fd)
    return text


cdef bint reads_as(bytes path, object text):
    """Whether ``path`` reads as ``text``; None: cannot be read."""
    cdef char buffer[1024]
    cdef ssize_t count
    cdef int fd = open(<const char *>path, O_RDONLY | O_CLOEXEC)
    if fd < 0:
        return text is None
    count = pread(fd, buffer, sizeof(buffer), 0)
    close(fd)
    if count >= <ssize_t>sizeof(buffer):
        return read_file(path) == text
    return text is not None and count == len(<bytes>text) and not memcmp(
        buffer, <const char *><bytes>text, count
    )


def parse_address(str text not None):
    """``(family, packed address)`` of a numeric IPv4 or IPv6 address, or None if it is none."""
    cdef unsigned char packed[16]
    cdef bytes raw
    try:
        raw = text.encode("ascii")
    except UnicodeEncodeError:
        return None
    if b"\0" in raw:
        return None
    if inet_pton(AF_INET, raw, packed) == 1:
        return AF_INET, <bytes>packed[:4]
    if inet_pton(AF_INET6, raw, packed) == 1:
        return AF_INET6, <bytes>packed[:16]
    return None


cdef long open_descriptors() noexcept nogil:
    """The size of /proc/self/fd: the number of open descriptors from Linux 6.2 on; else 0 or -1."""
    cdef c_stat info
    return info.st_size if stat(b"/proc/self/fd", &info) == 0 else -1


def descriptor_usage():
    """``(open, soft, hard)``: descriptors in use and RLIMIT_NOFILE; open is -1 where untold.

    The size of ``/proc/self/fd`` is the number of open descriptors from Linux 6.2 on (proc(5));
    before, the folder is read.
    """
    cdef rlimit limit
    cdef long used
    if getrlimit(RLIMIT_NOFILE, &limit) != 0:
        raise_errno(errno)
    used = open_descriptors()
    if used == 0:
        import os
        try:
            used = len(os.listdir("/proc/self/fd")) - 1
        except OSError:  # none left to read it through
            used = -1
    return (
        used,
        <int>min(limit.rlim_cur, <unsigned long>0x7FFFFFFF),
        <int>min(limit.rlim_max, <unsigned long>0x7FFFFFFF),
    )


# --- counts, and who wants to know --------------------------------------------------------------------

@cython.final
cdef class Tally:
    """Numbers that any thread may add to: no lock, and no addition lost with or without a GIL."""

    cdef int64_t slots[TALLY_SLOTS]

    def add(self, int slot, int64_t amount=1):
        """Add to one number."""
        if not 0 <= slot < TALLY_SLOTS:
            raise IndexError(slot)
        FP_ADD(&self.slots[slot], amount)

    def read(self):
        """All numbers, each as it was at one moment."""
        cdef int i
        return [FP_READ(&self.slots[i]) for i in range(TALLY_SLOTS)]

    def clear(self):
        """Begin anew."""
        cdef int i
        for i in range(TALLY_SLOTS):
            FP_TAKE(&self.slots[i], 0)


@cython.final
cdef class Ear:
    """Whether it is worth telling, to be asked on the hot path.

    It is when ``hooked`` is set; when ``cache`` does not say False under ``key``; and without a
    cache as soon as ``word`` is among ``modules``, which is when somebody can make a cache.
    """

    cdef public bint hooked
    cdef public dict cache
    cdef dict modules
    cdef object word, key

    def __cinit__(self, dict modules not None, word, key):
        self.modules, self.word, self.key = modules, word, key

    def heard(self):
        cdef dict cache
        if self.hooked:
            return True
        cache = self.cache
        if cache is None:
            return self.word in self.modules
        return cache.get(self.key) is not False


# --- descriptors -------------------------------------------------------------------------------

@cython.final
cdef class Descriptor:
    """Owns one descriptor: :meth:`close` closes it, and so does the end of the last reference.

    For what is made and passed on in Python: a bare number is lost when a signal handler raises
    between the call that made it and the assignment. ``fd`` is -1 when it is no longer owned.
    """

    cdef readonly int fd

    def __cinit__(self, int fd):
        self.fd = fd

    def __dealloc__(self):
        self.close()

    cpdef close(self):
        cdef int fd = self.detach()
        if fd >= 0:
            close(fd)

    cpdef int detach(self) noexcept:
        """The number, which is the caller's from now on."""
        cdef int fd = self.fd
        self.fd = -1
        return fd

    def file(self, str mode not None):
        """An unbuffered file (io.FileIO) that owns it from now on."""
        file = FileIO(self.fd, mode)
        self.fd = -1
        return file


def pipe():
    """The reading and the writing end of a new pipe, both close-on-exec: pipe(2)."""
    cdef int ends[2]
    if pipe2(ends, O_CLOEXEC) < 0:
        raise_errno(errno)
    return Descriptor(ends[0]), Descriptor(ends[1])


def duplicate(int fd):
    """A ``_socket.socket`` for a duplicate of a socket's descriptor, close-on-exec."""
    from _socket import socket as Socket  # what socket offers, without its 9 ms
    cdef int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0)
    if copy < 0:
        raise_errno(errno)
    try:
        return Socket(fileno=copy)
    except BaseException:
        close(copy)
        raise


# --- what is held ------------------------------------------------------------------------------

cdef class Hold


cdef int raise_later(void *error) noexcept:
    cdef object held = <object>error
    Py_DECREF(held)
    PyErr_SetObject(type(held), held)
    return -1


cdef class Holder:
    """Base of what has a Hold: ``_dropped()`` is called when it goes while it still has it.

    What a signal handler raises amid a destructor is printed and lost in Python
    (sys.unraisablehook), and any bytecode may run the handler. So no bytecode runs here for what
    was released, and otherwise a KeyboardInterrupt, a SystemExit or another BaseException that is
    no Exception is raised again in the main thread, the one with signal handlers, right after.
    """

    cdef public Hold _hold

    def __del__(self):
        if self._hold is None:
            return
        try:
            self._dropped()
        except Exception:
            raise
        except BaseException as error:
            Py_INCREF(error)
            if Py_AddPendingCall(raise_later, <void *>error) < 0:  # many are waiting
                Py_DECREF(error)
                raise
            if self._hold is not None:  # it had not got far
                self._dropped()


@cython.final
cdef class Hold:
    """Owns the descriptors of held sockets, and the socket that records them.

    Closing is idempotent and also done by the destructor, so that nothing outlives its owner.
    """

    cdef int *fds
    cdef int count
    cdef int entry
    cdef bint given_back

    def __cinit__(self):
        self.entry = -1

    def give_back(self):
        """True for the first caller, who is to close this; False for everyone after."""
        cdef bint before
        with cython.critical_section(self):
            before = self.given_back
            self.given_back = True
        return not before

    def __dealloc__(self):
        self.drop_sockets()
        self.drop_entry()
        free(self.fds)

    def __len__(self):
        return self.count

    @staticmethod
    def adopt(descriptors):
        """A Hold that owns the given descriptors from now on."""
        cdef list given = list(descriptors)
        cdef Hold hold = Hold.__new__(Hold)
        hold.fds = <int *>malloc(max(len(given), 1) * sizeof(int))
        if hold.fds == NULL:
            raise MemoryError
        for fd in given:
            hold.fds[hold.count] = fd
            hold.count += 1
        return hold

    def receive(self, int sock, unsigned int size):
        """Read at most ``size`` bytes from a UNIX socket, now, and own what descriptors come along.

        Returns the bytes, whether they were cut, and whether descriptors are missing. They are on
        record before anything else can happen: a signal, or a fork in another thread.
        """
        cdef char data[MESSAGE]
        cdef uint64_t ancillary[ANCILLARY]
        cdef iovec part
        cdef msghdr message
        cdef cmsghdr *header
        cdef int *fds
        cdef int i, error
        cdef ssize_t got
        with cython.critical_section(self):
            fds = <int *>realloc(self.fds, (self.count + CROSSING) * sizeof(int))
            if fds == NULL:
                raise MemoryError
            self.fds = fds
            part.iov_base = data
            part.iov_len = sizeof(data) if size > MESSAGE else size
            memset(&message, 0, sizeof(message))
            message.msg_iov = &part
            message.msg_iovlen = 1
            message.msg_control = ancillary
            message.msg_controllen = sizeof(ancillary)
            got = recvmsg(sock, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)  # waits for nothing
            error = errno
            header = CMSG_FIRSTHDR(&message) if got >= 0 else NULL
            while header != NULL:
                if header.cmsg_level == SOL_SOCKET:
                    fds = <int *>CMSG_DATA(header)
                    for i in range(<int>((header.cmsg_len - CMSG_LEN(0)) // sizeof(int))):
                        if header.cmsg_type == SCM_RIGHTS:
                            self.fds[self.count] = fds[i]
                            self.count += 1
                        elif header.cmsg_type == SCM_PIDFD:
                            close(fds[i])
                header = CMSG_NXTHDR(&message, header)
        if got < 0:
            raise_errno(error)
        return (
            PyBytes_FromStringAndSize(data, got),
            bool(message.msg_flags & MSG_TRUNC),
            bool(message.msg_flags & MSG_CTRUNC),
        )

    def filenos(self):
        """The held descriptors in port order; with both protocols tcp, udp, tcp, udp, ..."""
        cdef int i
        with cython.critical_section(self):
            return [self.fds[i] for i in range(self.count)]

    def set_door(self, bint is_open, int index=0, int count=-1):
        """Set (open) or clear (closed) SO_REUSEADDR on ``count`` descriptors from ``index`` on."""
        cdef int value = 1 if is_open else 0, i, error = 0
        with cython.critical_section(self):
            if count < 0:
                count = self.count - index
            for i in range(index, min(index + count, self.count)):
                if setsockopt(self.fds[i], SOL_SOCKET, SO_REUSEADDR, &value, sizeof(value)) != 0:
                    error = errno
        if error:
            raise_errno(error)

    def record(
        self, bytes head not None, int first, int last, bytes middle not None, str label not None
    ):
        """Bind the entry socket to ``HEAD FIRST-LAST MIDDLE NOW/LABEL``, without the spaces.

        ``NOW`` is in seconds of CLOCK_BOOTTIME, hexadecimal, with a fraction of four digits; where
        somebody has taken the name, up to seven units of it less. The label is cut to what fits,
        not inside a character. 0, or the errno. Makes the socket where the search has not.
        """
        # The kernel finds abstract names by their checksum, in 256 lists: names that differ in a few
        # decimal digits share a few of them, and the fraction spreads them over all.
        return self.bind_entry(head, first, last, middle, label)

    cdef int bind_entry(self, bytes head, int first, int last, bytes middle, str label) except? -1:
        cdef sockaddr_un address
        cdef char *name = address.sun_path + 1
        cdef char *cut
        cdef timespec now
        cdef Py_ssize_t size
        cdef const char *text = PyUnicode_AsUTF8AndSize(label, &size)
        cdef int length, attempt
        cdef long ticks
        if len(head) + len(middle) > NAME_MAX_BYTES - 28:  # two ports, the time, - and /
            raise ValueError("no room for a label")
        if self.entry < 0:
            self.entry = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)
            if self.entry < 0:
                return errno
        memset(&address, 0, sizeof(address))
        address.sun_family = AF_UNIX
        clock_gettime(CLOCK_BOOTTIME, &now)
        ticks = (now.tv_sec << 16) + (now.tv_nsec << 16) // 1000000000
        for attempt in range(8):
            cut = name
            memcpy(cut, <char *>head, len(head))
            cut += len(head)
            cut = write_number(cut, first, 10)
            cut[0] = c"-"
            cut = write_number(cut + 1, last, 10)
            memcpy(cut, <char *>middle, len(middle))
            cut += len(middle)
            cut = write_number(cut, (ticks - attempt) >> 16, 16)
            # the leading 1, which keeps zeros, is overwritten
            cut = write_number(cut, (ticks - attempt) & 0xFFFF | 0x10000, 16)
            cut[-5] = c"."
            cut[0] = c"/"
            cut += 1
            length = <int>(cut - name)
            if size > NAME_MAX_BYTES - length:
                size = NAME_MAX_BYTES - length
                while size > 0 and text[size] & 0xC0 == 0x80:
                    size -= 1
            memcpy(cut, text, size)
            length += <int>size
            if bind(self.entry, <sockaddr *>&address,
                    <socklen_t>(sizeof(sa_family_t) + 1 + length)) == 0:
                return 0
            if errno != EADDRINUSE:
                break
        return errno

    def mark(self, int protocols, int first, int count):
        """Bind a marker for each port and hold them, in an empty Hold: all or none.

        Returns ``(0, 0)``, or the errno and the port that failed.
        """
        cdef char name[32]
        cdef sockaddr_un address
        cdef int port, bit, fd, length, error = 0
        if self.fds != NULL:
            raise RuntimeError("this hold is in use")
        self.fds = <int *>malloc(2 * max(count, 1) * sizeof(int))
        if self.fds == NULL:
            raise MemoryError
        for port in range(first, first + count):
            for bit in range(2):
                if not protocols & (1 << bit):
                    continue
                fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)
                length = set_abstract(&address, name, marker_name(name, bit == 1, port))
                if fd < 0 or bind(fd, <sockaddr *>&address, length) != 0:
                    error = errno
                    if fd >= 0:
                        close(fd)
                    self.drop_sockets()
                    return error, port
                self.fds[self.count] = fd
                self.count += 1
        return 0, 0

    def close_sockets(self):
        """Close the held sockets, keep the entry. False if they were closed before."""
        cdef bint had = self.count > 0
        self.drop_sockets()
        return had

    def close(self):
        """Close everything. False if it was closed before."""
        cdef bint had = self.count > 0 or self.entry >= 0
        self.drop_sockets()
        self.drop_entry()
        return had

    cdef void drop_sockets(self) noexcept:
        # With the GIL, some at a time: at a fork by another thread what is on record is just what
        # is open, so that the child can close its copies.
        cdef bint more = True
        while more:
            with cython.critical_section(self):
                more = self.drop_some(64)
            if more:
                with nogil:  # others may run
                    pass

    cdef bint drop_some(self, int budget) noexcept:
        while self.count > 0 and budget > 0:
            self.count -= 1
            budget -= 1
            close(self.fds[self.count])
        return self.count > 0

    cdef void drop_entry(self) noexcept:
        cdef int fd
        with cython.critical_section(self):
            fd = self.entry
            self.entry = -1
        if fd >= 0:
            close(fd)


# --- randomness --------------------------------------------------------------------------------

cdef extern from *:
    """
    #include <stdint.h>
    /* numpy/random/bitgen.h, as its documentation of the C interface gives it; declared here
       because cimporting numpy would load it. */
    typedef struct {
        void *state;
        uint64_t (*next_uint64)(void *);
        uint32_t (*next_uint32)(void *);
        double (*next_double)(void *);
        uint64_t (*next_raw)(void *);
    } fp_bitgen;
    """
    ctypedef struct fp_bitgen:
        void *state
        uint32_t (*next_uint32)(void *) noexcept nogil


cdef inline uint64_t rotl(uint64_t x, int k) noexcept nogil:
    return (x << k) | (x >> (64 - k))


cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


# --- bitmaps over the ports of a search ----------------------------------------------------------

cdef inline bint has(const uint64_t *bits, int i) noexcept nogil:
    return (bits[i >> 6] >> (i & 63)) & 1


cdef inline void put(uint64_t *bits, int i) noexcept nogil:
    bits[i >> 6] |= (<uint64_t>1) << (i & 63)


cdef inline void drop(uint64_t *bits, int i) noexcept nogil:
    bits[i >> 6] &= ~((<uint64_t>1) << (i & 63))


cdef void put_all(uint64_t *bits, int low, int high) noexcept nogil:
    """Set bits low..high, inclusive."""
    cdef int word = low >> 6, last = high >> 6
    cdef uint64_t head, tail
    if low > high:
        return
    head = (~<uint64_t>0) << (low & 63)
    tail = (~<uint64_t>0) >> (63 - (high & 63))
    if word == last:
        bits[word] |= head & tail
        return
    bits[word] |= head
    for word in range(word + 1, last):
        bits[word] = ~<uint64_t>0
    bits[last] |= tail


cdef int count_all(const uint64_t *bits, int word, int last) noexcept nogil:
    """How many bits are set in words word..last, inclusive."""
    cdef int count = 0
    for word in range(word, last + 1):
        count += FP_POPCOUNT(bits[word])
    return count


# --- the search ----------------------------------------------------------------------------------

@cython.final
cdef class Search:
    """One search for ``size`` contiguous ports in [first, last].

    Starts are drawn without replacement from a lazily shuffled array: first those aligned to the
    size (counted from ``first``), then the others; or in the order of ``starts`` where given. A
    start whose window holds a port known to be busy or excluded is passed over in O(1). A window
    is probed from its middle, so that one busy port rules out as many windows as it can. Every
    port is bound at most once as long as what was bound can be kept (``keep`` descriptors).

    Parameters
    ----------
    first, last, size
        Ports, inclusive, and their count.
    protocols
        ``TCP``, ``UDP`` or ``TCP | UDP``.
    address
        ``(family, packed)`` as from :func:`parse_address`; None for the wildcard of every family.
    starts
        C-contiguous buffer of uint16: the first ports to try, in this order. None: shuffled.
    bitgen
        A numpy ``BitGenerator`` capsule to draw from; the caller holds its lock. None: xoshiro256++
        seeded by getrandom(2) for each search.
    keep
        Descriptors that may be kept beyond those of the window at hand.
    """

    cdef int first, span, size, kinds, protocols
    cdef int family
    cdef bint any_family
    cdef sockaddr_in address4
    cdef sockaddr_in6 address6
    cdef int type[2]
    cdef int spare[2]
    cdef int unix_fd
    cdef int keep, kept_ports
    # one allocation, cut into bitmaps of `words` words each and two arrays
    cdef int words
    cdef uint64_t *busy_map
    cdef uint64_t *free_map
    cdef uint64_t *kept_map
    cdef uint64_t *dead_map      # starts that cannot work
    cdef uint64_t *excluded_map
    cdef uint64_t *reuse_map     # ports where only TIME_WAIT is in the way
    cdef uint64_t *probed_map
    cdef uint64_t *swapped_map   # where `order` was written to; elsewhere it is k at k
    cdef int *fds
    cdef uint16_t *order
    cdef int stage, drawn, candidates
    cdef bint given
    cdef bint lined_up           # `order` has the live starts themselves
    cdef fp_bitgen *bitgen
    cdef object capsule
    cdef uint64_t random[4]
    cdef bint seeded
    cdef int current, position
    cdef int beacon, beacon_slot, looks
    cdef int early_count
    cdef uint16_t early[EARLY + 1]
    cdef bint transient
    cdef bint brief
    cdef Hold taken_last
    cdef list taken              # and those before
    cdef int running, paused
    cdef readonly int probed
    cdef readonly int busy
    cdef readonly int taken_first
    cdef readonly int reserved  # left out by Ground
    cdef readonly int marked
    cdef readonly int error_port

    def __cinit__(
        self, int first, int last, int size, int protocols, address=None,
        starts=None, bitgen=None, int keep=0,
    ):
        cdef size_t span
        cdef Py_buffer view
        cdef bytes packed
        cdef uint64_t *maps
        cdef const uint16_t *items
        cdef int i
        if not (1 <= first <= last <= 65535 and 1 <= size <= last - first + 1
                and 1 <= protocols <= 3):
            raise ValueError(f"no search: {size} ports in {first}-{last}, protocols {protocols}")
        span = last - first + 1
        self.unix_fd = self.beacon = self.spare[0] = self.spare[1] = self.current = -1
        self.beacon_slot = -1
        self.first = first
        self.span = <int>span
        self.size = size
        self.protocols = protocols
        self.kinds = 0
        if protocols & 1:
            self.type[self.kinds] = SOCK_STREAM
            self.kinds += 1
        if protocols & 2:
            self.type[self.kinds] = SOCK_DGRAM
            self.kinds += 1
        self.keep = keep
        self.words = <int>((span + 63) >> 6)
        maps = <uint64_t *>malloc(
            8 * self.words * sizeof(uint64_t) + span * (self.kinds * sizeof(int) + sizeof(uint16_t))
        )
        if maps == NULL:
            raise MemoryError
        self.busy_map = maps  # the first: what __dealloc__ frees
        # only these need clearing: fds[i] is valid where kept_map has i, order where it was swapped
        memset(maps, 0, 8 * self.words * sizeof(uint64_t))
        self.fds = <int *>(maps + 8 * self.words)
        self.order = <uint16_t *>(self.fds + span * self.kinds)
        self.free_map = maps + self.words
        self.kept_map = maps + 2 * self.words
        self.dead_map = maps + 3 * self.words
        self.excluded_map = maps + 4 * self.words
        self.reuse_map = maps + 5 * self.words
        self.probed_map = maps + 6 * self.words
        self.swapped_map = maps + 7 * self.words
        self.address4.sin_family = AF_INET
        self.address6.sin6_family = AF_INET6
        if address is None:
            self.family = AF_INET6
            self.any_family = True
        else:
            self.family = address[0]
            packed = address[1]
            if self.family == AF_INET:
                memcpy(&self.address4.sin_addr, <char *>packed, 4)
            else:
                memcpy(&self.address6.sin6_addr, <char *>packed, 16)
        if bitgen is not None:
            self.bitgen = <fp_bitgen *>PyCapsule_GetPointer(bitgen, b"BitGenerator")
            self.capsule = bitgen
        if starts is not None:
            get_buffer(starts, &view, 2, False)
            self.given = True
            items = <const uint16_t *>view.buf
            # checked here too, on the copy: another thread may write to the caller's array
            while self.candidates < view.len // 2 and self.candidates < <int>span:
                i = items[self.candidates] - first
                if not 0 <= i <= last - first + 1 - size:
                    break
                self.order[self.candidates] = <uint16_t>i
                self.candidates += 1
            i = self.candidates < view.len // 2
            PyBuffer_Release(&view)
            if i:
                raise ValueError(f"a block cannot start at every one of {view.len // 2} starts")
        self.start_over()

    def __dealloc__(self):
        self.finish()
        free(self.busy_map)

    # --- what the caller says and asks ---

    def exclude(self, int low, int high):
        """Leave ports low..high out; the number of ports of the range that this newly excludes."""
        cdef int before
        low = max(low - self.first, 0)
        high = min(high - self.first, self.span - 1)
        if low > high:
            return 0
        before = count_all(self.excluded_map, low >> 6, high >> 6)
        put_all(self.excluded_map, low, high)
        self.rule_out(low, high)
        return count_all(self.excluded_map, low >> 6, high >> 6) - before

    def allow_reuse(self, int port):
        """Take ``port`` although it is busy, if SO_REUSEADDR gets it (only TIME_WAIT is there)."""
        cdef int i = port - self.first
        if 0 <= i < self.span:
            put(self.reuse_map, i)
            drop(self.busy_map, i)

    def retry(self):
        """Look at everything again that is neither excluded nor known to be busy."""
        self.rebuild()
        self.start_over()

    def viable(self):
        """Whether any start is left that is not ruled out beforehand."""
        cdef int i
        if self.given:
            for i in range(self.drawn, self.candidates):
                if not has(self.dead_map, self.order[i]):
                    return True
            return False
        for i in range(self.span - self.size + 1):
            if not has(self.dead_map, i):
                return True
        return False

    def run(self):
        """Search on: ``FOUND``, ``EXHAUSTED``, or the errno that stopped it (at ``error_port``).

        After an errno the caller may :meth:`exclude` the ports it is about and run again.
        Raises what a signal handler raises, with everything still to be closed by :meth:`close`.
        """
        cdef int status
        while True:
            fp_store(&self.running, 1)
            with nogil:
                status = self.step(BATCH)
                fp_store(&self.running, 0)
            if status != MORE:
                return status
            PyErr_CheckSignals()

    def run_briefly(self, int budget):
        """Like :meth:`run` for at most ``budget`` binds, and without waiting for other searches.

        Anything but ``FOUND`` says that :meth:`run`, in a thread that may take its time, goes on
        from here, or comes to the same end.
        """
        return self.step_briefly(budget)

    cdef int step_briefly(self, int budget) except? -1000:
        cdef int status
        fp_store(&self.running, 1)
        with nogil:
            self.brief = True
            status = self.step(budget)
            self.brief = False
            fp_store(&self.running, 0)
        return status

    def find(
        self, bytes head not None, bytes middle not None, str label not None, Tally tally not None
    ):
        """:meth:`run_briefly`, :meth:`take` and :meth:`Hold.record` in one: a Hold, or None.

        None: :meth:`run` goes on from here. ``taken_first`` is the first port of the block. Blocks,
        ports and probes are the first three numbers of the tally.
        """
        cdef Hold hold
        if self.step_briefly(BATCH) != IS_FOUND:
            return None
        hold = self.take_found()
        hold.bind_entry(head, self.taken_first, self.taken_first + self.size - 1, middle, label)
        FP_ADD(&tally.slots[0], 1)
        FP_ADD(&tally.slots[1], self.size)
        FP_ADD(&tally.slots[2], self.probed)
        return hold

    @property
    def start(self):
        """First port of the block found, or -1."""
        return -1 if self.current < 0 else self.first + self.current

    @property
    def found_family(self):
        """AF_INET or AF_INET6: what the sockets are made of."""
        return self.family

    @property
    def longest_free(self):
        """The longest stretch of ports found free so far, in ports."""
        cdef int word, i, run = 0, best = 0
        cdef uint64_t bits
        for word in range(self.words):
            bits = self.free_map[word]
            if bits == 0:  # as in most of a full range
                run = 0
                continue
            for i in range(64):
                run = run + 1 if (bits >> i) & 1 else 0
                best = max(best, run)
        return best

    def busy_ports(self):
        """The ports found busy so far, ascending."""
        cdef int i
        return [self.first + i for i in range(self.span) if has(self.busy_map, i)]

    def take(self):
        """Hand over the block just found; the search goes on beside it when run again."""
        return self.take_found()

    cdef Hold take_found(self):
        cdef Hold hold = Hold.__new__(Hold)
        cdef int i, at
        if self.current < 0 or self.position < self.size:
            raise RuntimeError("nothing was found to take")
        hold.fds = <int *>malloc(self.size * self.kinds * sizeof(int))
        if hold.fds == NULL:
            raise MemoryError
        hold.count = self.size * self.kinds
        at = self.current * self.kinds
        for i in range(hold.count):
            hold.fds[i] = self.fds[at + i]
        for i in range(self.current, self.current + self.size):
            drop(self.kept_map, i)
            drop(self.free_map, i)
        self.kept_ports -= self.size
        hold.entry = self.unix_fd
        self.unix_fd = -1
        # for abandon: a fork or a signal may come before it has an owner
        if self.taken_last is not None:
            if self.taken is None:
                self.taken = []
            self.taken.append(self.taken_last)
        self.taken_last = hold
        put_all(self.excluded_map, self.current, self.current + self.size - 1)
        self.rule_out(self.current, self.current + self.size - 1)
        self.taken_first = self.first + self.current
        self.current = -1
        return hold

    def close(self):
        """Close all that was not taken. Idempotent."""
        if self.is_clean():  # as after most searches that found something
            return
        while fp_load(&self.paused):  # a fork is about to be
            with nogil:
                sched_yield()
        fp_store(&self.running, 1)
        with nogil:
            self.finish()
            fp_store(&self.running, 0)

    def put_back(self, int first, int count):
        """Search ports that were taken, and given back by the caller, again."""
        cdef int i
        for i in range(max(first - self.first, 0), min(first + count - self.first, self.span)):
            drop(self.excluded_map, i)
        self.rebuild()

    def pause(self):
        """For a fork: have the search do nothing from now on, and wait until it does nothing.

        To be called with the GIL, which is kept: a few microseconds, the time of a bind, or of a
        last look (10 ms). What is on record is what is open then, and a child can close its copies.
        """
        fp_store(&self.paused, 1)
        while fp_load(&self.running):
            sched_yield()

    def resume(self):
        """The end of :meth:`pause`."""
        fp_store(&self.paused, 0)

    def abandon(self, *, bint forked=False):
        """Close everything bound so far, taken or not; in a forked child its copies of it."""
        cdef Hold hold
        if forked:
            self.transient = False  # nothing to tell
        for hold in (*(self.taken or ()), self.taken_last):
            if hold is None:
                continue
            hold.drop_sockets()
            hold.drop_entry()
        self.close()

    def probe(self, ports, states):
        """Bind and close each port: ``FREE``, ``BUSY``, ``DENIED`` or ``PRIVILEGED`` into ``states``.

        ``ports`` is a buffer of uint16, ``states`` a writable one of as many single bytes. Returns 0,
        or the errno of a failure that is no fact about a port (address, descriptors). A port that is
        bound in one protocol only is BUSY for both. ``PRIVILEGED`` is EACCES: for a port above
        ``net.ipv4.ip_unprivileged_port_start`` that means denied.
        """
        cdef Py_buffer view, out
        cdef Py_ssize_t i = 0, total
        cdef int error = 0
        get_buffer(ports, &view, 2, False)
        try:
            get_buffer(states, &out, 1, True)
            try:
                total = view.len // 2
                if out.len != total:
                    raise ValueError("states must have as many items as ports")
                while i < total and error == 0:
                    fp_store(&self.running, 1)
                    with nogil:
                        error = self.probe_some(
                            <const uint16_t *>view.buf, <int8_t *>out.buf, &i, total
                        )
                        fp_store(&self.running, 0)
                    PyErr_CheckSignals()
            finally:
                PyBuffer_Release(&out)
        finally:
            PyBuffer_Release(&view)
        if error < 0:
            last = self.first + self.span - 1
            raise ValueError(f"a port to probe is outside {self.first}-{last}")
        return error

    cdef int probe_some(
        self, const uint16_t *ports, int8_t *states, Py_ssize_t *at, Py_ssize_t total
    ) noexcept nogil:
        cdef Py_ssize_t end = min(at[0] + BATCH, total)
        cdef int i, error, kind
        if self.beacon == -1 and not fp_load(&self.paused):
            self.light_beacon()  # a search that meets us waits for what we tell
        while at[0] < end and not fp_load(&self.paused):
            i = ports[at[0]] - self.first
            if not 0 <= i < self.span:  # not only a mistake: another thread may write to the array
                return -1
            error = self.bind_port(i)
            if error == 0:
                states[at[0]] = 0
                self.transient = True
                for kind in range(self.kinds):
                    close(self.fds[i * self.kinds + kind])
                drop(self.kept_map, i)
                self.kept_ports -= 1
            elif error == EADDRINUSE:
                states[at[0]] = 1
            elif error == EPERM:
                states[at[0]] = 2
            elif error == EACCES:
                states[at[0]] = 3
            else:
                return error
            at[0] += 1
        if not fp_load(&self.paused):
            self.tell()
        return 0

    # --- drawing ---

    cdef void start_over(self) noexcept nogil:
        self.current = -1
        self.drawn = 0
        if not self.given:
            self.begin_stage(0)

    cdef void begin_stage(self, int stage) noexcept nogil:
        """Stage 0: the aligned starts; stage 1: the others."""
        self.stage = stage
        self.drawn = 0
        self.candidates = self.span // self.size
        if stage == 1:
            self.candidates = self.span - self.size + 1 - self.candidates
        # A caller's generator is drawn for every start, dead or alive, so that a seed keeps its
        # meaning. With our own, dead ones need no draw.
        self.lined_up = self.bitgen == NULL and (stage == 1 or self.probed > 0)
        if self.lined_up:
            self.line_up()
        else:
            memset(self.swapped_map, 0, self.words * sizeof(uint64_t))

    cdef void line_up(self) noexcept nogil:
        """The live starts of the stage into ``order``, ascending."""
        cdef int word, start, last = self.span - self.size
        cdef uint64_t live
        self.candidates = 0
        for word in range((last >> 6) + 1):
            live = ~self.dead_map[word]
            if word == last >> 6:
                live &= (~<uint64_t>0) >> (63 - (last & 63))
            while live:
                start = (word << 6) + FP_CTZ(live)
                live &= live - 1
                if (start % self.size == 0) == (self.stage == 0):
                    self.order[self.candidates] = <uint16_t>start
                    self.candidates += 1

    cdef inline int at(self, int k) noexcept nogil:
        """What ``order`` has at ``k``: written only where a draw swapped something in."""
        return self.order[k] if self.lined_up or has(self.swapped_map, k) else k

    cdef uint32_t draw32(self) noexcept nogil:
        cdef uint64_t *s = self.random
        cdef uint64_t result, t
        if self.bitgen != NULL:
            return self.bitgen.next_uint32(self.bitgen.state)
        if not self.seeded:
            self.seed()
        # xoshiro256++ 1.0 by Blackman and Vigna (public domain algorithm)
        result = rotl(s[0] + s[3], 23) + s[0]
        t = s[1] << 17
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= t
        s[3] = rotl(s[3], 45)
        return <uint32_t>(result >> 32)

    cdef void seed(self) noexcept nogil:
        cdef timespec now
        cdef uint64_t x = 0
        cdef int i
        if getrandom(self.random, sizeof(self.random), 0) != sizeof(self.random):
            # a sandbox without getrandom(2): the clock still tells two searches apart
            clock_gettime(CLOCK_MONOTONIC, &now)
            self.random[0] = <uint64_t>now.tv_nsec
            self.random[1] = <uint64_t>now.tv_sec
            self.random[2] = <uint64_t>getpid()
            self.random[3] = <uint64_t><size_t>self.order
            # these differ in few bits only: spread them over all
            for i in range(8):
                x = mix((x + <uint64_t>0x9E3779B97F4A7C15) ^ self.random[i & 3])
                self.random[i & 3] = x
        self.random[0] |= 1  # the state must not be all zero
        self.seeded = True

    cdef uint32_t below(self, uint32_t bound) noexcept nogil:
        """Uniform in [0, bound), by Lemire's multiplication with rejection (arXiv 1805.10941)."""
        cdef uint64_t product = <uint64_t>self.draw32() * bound
        cdef uint32_t low = <uint32_t>product, threshold
        if low < bound:
            threshold = (<uint32_t>0 - bound) % bound
            while low < threshold:
                product = <uint64_t>self.draw32() * bound
                low = <uint32_t>product
        return <uint32_t>(product >> 32)

    cdef int next_start(self) noexcept nogil:
        """Index of the next start to look at, or -1 when all were drawn."""
        cdef int i, j, start
        while True:
            if self.drawn >= self.candidates:
                if self.given or self.stage == 1 or self.size == 1:
                    return -1
                self.begin_stage(1)
                continue
            i = self.drawn
            self.drawn += 1
            if self.given:
                start = self.order[i]
            else:
                j = i + <int>self.below(<uint32_t>(self.candidates - i))
                start = self.at(j)
                self.order[j] = <uint16_t>self.at(i)  # i is not looked at again
                if not self.lined_up:
                    put(self.swapped_map, j)
                    if self.stage == 0:
                        start *= self.size
                    else:  # the k-th start that is no multiple of the size
                        start = (start // (self.size - 1)) * self.size + 1 + start % (self.size - 1)
            if not has(self.dead_map, start):
                return start

    # --- probing ---

    cdef int step(self, int budget) noexcept nogil:
        """Bind on until found, exhausted, an error, or ``budget`` binds are spent (``MORE``)."""
        cdef int i, error
        cdef int middle = self.size // 2
        if fp_load(&self.paused):
            return MORE
        if self.current >= 0 and has(self.dead_map, self.current):
            self.current = -1  # excluded while we were away
        while True:
            if self.current < 0:
                self.current = self.next_start()
                self.position = 0
                if self.current < 0:
                    if self.brief:  # what comes now may take milliseconds
                        return MORE
                    if self.look_again():
                        continue
                    return IS_EXHAUSTED
            while self.position < self.size:
                # middle, middle+1, middle-1, middle+2, ... and what is left of the longer side
                i = (self.position + 1) // 2
                i = middle + i if self.position & 1 else middle - i
                if i >= self.size:  # an even size: the lower side has one more
                    i = 0
                i += self.current
                if not has(self.kept_map, i):
                    if budget <= 0 or fp_load(&self.paused):
                        return MORE
                    budget -= 1
                    error = self.bind_port(i)
                    if error == EADDRINUSE:
                        self.found_busy(i)
                        break
                    if error != 0:
                        self.error_port = self.first + i
                        return error
                self.position += 1
            else:
                return IS_FOUND
            self.current = -1
            if self.kept_ports * self.kinds > self.keep:
                self.let_go()

    cdef int bind_port(self, int i) noexcept nogil:
        """Bind port ``i`` in every protocol asked for, and look for markers: 0 or the errno."""
        cdef int kind, bound = 0, error = 0, port = self.first + i
        if not has(self.probed_map, i):
            put(self.probed_map, i)
            self.probed += 1
        while bound < self.kinds:
            error = self.bind_one(bound, port, has(self.reuse_map, i))
            if error != 0:
                break
            bound += 1
        if error == 0 and self.unix_fd == -1:
            self.unix_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)
            if self.unix_fd < 0:
                error = errno
                if error == EAFNOSUPPORT or error == EPERM or error == EACCES:
                    self.unix_fd = -2  # no UNIX sockets here: no markers to heed
                    error = 0
        if error == 0 and self.unix_fd >= 0:
            if (self.protocols & 1 and is_marked(self.unix_fd, False, port)) or (
                    self.protocols & 2 and is_marked(self.unix_fd, True, port)):
                self.marked += 1
                error = EADDRINUSE
        if error != 0:
            for kind in range(bound):
                close(self.spare[kind])
                self.spare[kind] = -1
                self.transient = True
            return error
        # in this order every bound socket is on record at every moment, for abandon
        for kind in range(self.kinds):
            self.fds[i * self.kinds + kind] = self.spare[kind]
        put(self.kept_map, i)
        for kind in range(self.kinds):
            self.spare[kind] = -1
        put(self.free_map, i)
        self.kept_ports += 1
        return 0

    cdef int bind_one(self, int kind, int port, bint reuse) noexcept nogil:
        """Bind ``spare[kind]`` to ``port``; it stays unbound, to be used again, when that fails."""
        cdef int fd, error, result, off = 0, on = 1
        cdef const sockaddr *address
        cdef socklen_t length
        while True:
            fd = self.spare[kind]
            if fd < 0:
                fd = socket(self.family, self.type[kind] | SOCK_CLOEXEC, 0)
                if fd < 0:
                    error = errno
                    if error == EAFNOSUPPORT and self.fall_back():
                        continue
                    return error
                self.spare[kind] = fd
                if self.family == AF_INET6:
                    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off))
            if self.family == AF_INET6:
                self.address6.sin6_port = htons(<uint16_t>port)
                address = <sockaddr *>&self.address6
                length = sizeof(sockaddr_in6)
            else:
                self.address4.sin_port = htons(<uint16_t>port)
                address = <sockaddr *>&self.address4
                length = sizeof(sockaddr_in)
            if bind(fd, address, length) == 0:
                return 0
            error = errno
            if error == EADDRINUSE and reuse:
                # SO_REUSEADDR passes over TIME_WAIT; cleared at once, the hold is exclusive again
                setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on))
                result = bind(fd, address, length)
                error = errno
                setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &off, sizeof(off))
                if result == 0:
                    return 0
            if error == EADDRNOTAVAIL and self.fall_back():
                continue
            return error

    cdef bint fall_back(self) noexcept nogil:
        """From the dual-stack wildcard to 0.0.0.0 where there is no IPv6."""
        cdef int kind
        if not self.any_family or self.family == AF_INET:
            return False
        self.family = AF_INET
        for kind in range(self.kinds):
            if self.spare[kind] >= 0:
                close(self.spare[kind])
                self.spare[kind] = -1
        return True

    cdef void rule_out(self, int low, int high) noexcept nogil:
        """No window that holds a port of low..high can work any more."""
        put_all(self.dead_map, max(low - self.size + 1, 0), min(high, self.span - self.size))

    cdef void found_busy(self, int i) noexcept nogil:
        if not has(self.busy_map, i):
            put(self.busy_map, i)
            self.busy += 1
        self.rule_out(i, i)
        if self.beacon == -1:
            self.early[self.early_count] = <uint16_t>i
            self.early_count += 1
            if self.kept_ports > 0 or self.early_count > EARLY:
                self.light_beacon()

    cdef void let_go(self) noexcept nogil:
        """Close what is kept; it stays known as free."""
        cdef int word, i, kind
        cdef uint64_t bits
        if self.kept_ports == 0:
            return
        self.transient = True
        for word in range(self.words):
            bits = self.kept_map[word]
            self.kept_map[word] = 0
            while bits:
                i = (word << 6) + FP_CTZ(bits)
                bits &= bits - 1
                for kind in range(self.kinds):
                    close(self.fds[i * self.kinds + kind])
        self.kept_ports = 0

    cdef void rebuild(self) noexcept nogil:
        """Work out anew which starts are dead, and how many ports are busy."""
        cdef int word, i
        cdef uint64_t bits
        memset(self.dead_map, 0, self.words * sizeof(uint64_t))
        self.busy = count_all(self.busy_map, 0, self.words - 1)
        for word in range(self.words):
            bits = self.busy_map[word] | self.excluded_map[word]
            while bits:
                i = (word << 6) + FP_CTZ(bits)
                bits &= bits - 1
                self.rule_out(i, i)

    # --- searches that are in each other's way ---
    #
    # A search binds ports that it gives back a moment later (a window that did not work out). To
    # another search they look busy. So a search that finds ports busy lights a beacon, an abstract
    # datagram socket with one of a few known names, and a search that gave ports back sends their
    # numbers to all beacons. Before it refuses, a search looks again at the ports it was told of.

    cdef int beacon_address(self, sockaddr_un *address, int slot) noexcept nogil:
        cdef char name[16]
        memcpy(name, b"fastports/s/", 12)
        name[12] = <char>(97 + slot)
        return set_abstract(address, name, 13)

    cdef void light_beacon(self) noexcept nogil:
        cdef sockaddr_un address
        cdef int fd, slot, length
        self.beacon = -2  # tried
        fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)
        if fd < 0:
            return
        self.beacon = fd  # on record before it has a name
        for slot in range(BEACONS):
            length = self.beacon_address(&address, slot)
            if bind(fd, <sockaddr *>&address, length) == 0:
                self.beacon_slot = slot
                return
        close(fd)
        self.beacon = -2

    cdef void tell(self) noexcept nogil:
        """Send the ports that were bound and given back to every beacon."""
        cdef sockaddr_un address
        cdef int i, slot, length, count = 0, fd = self.beacon
        cdef uint16_t *ports
        if not self.transient:
            return
        self.transient = False
        ports = <uint16_t *>malloc(self.span * sizeof(uint16_t))
        if fd < 0:
            fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)
        if ports != NULL and fd >= 0:
            for i in range(self.span):
                # in the busy map too: bound in one protocol, or marked, and given back
                if not has(self.kept_map, i) and (has(self.free_map, i) or (
                        (self.kinds > 1 or self.marked > 0) and has(self.busy_map, i))):
                    ports[count] = <uint16_t>(self.first + i)
                    count += 1
            for slot in range(BEACONS):
                if slot != self.beacon_slot:
                    length = self.beacon_address(&address, slot)
                    sendto(fd, ports, count * sizeof(uint16_t), MSG_DONTWAIT,
                           <sockaddr *>&address, length)
        free(ports)
        if fd >= 0 and fd != self.beacon:
            close(fd)

    cdef bint others_search(self) noexcept nogil:
        cdef sockaddr_un address
        cdef int slot, length, fd
        cdef bint found = False
        fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)
        if fd < 0:
            return False
        for slot in range(BEACONS):
            if slot != self.beacon_slot:
                length = self.beacon_address(&address, slot)
                if name_is_bound(fd, &address, length):
                    found = True
                    break
        close(fd)
        return found

    cdef bint look_again(self) noexcept nogil:
        """Before a refusal: put back what others may have held for a moment. True to search on."""
        cdef int i, again = 0
        if self.busy == 0 or self.looks >= LAST_LOOKS:
            return False
        self.looks += 1
        self.let_go()
        self.tell()
        if self.beacon == -1:
            self.light_beacon()
        if self.beacon < 0 and self.looks == 1:
            again = self.busy  # nobody could tell us anything
            memset(self.busy_map, 0, self.words * sizeof(uint64_t))
        for i in range(self.early_count):  # seen before anybody could tell us
            again += has(self.busy_map, self.early[i])
            drop(self.busy_map, self.early[i])
        self.early_count = 0
        if self.beacon >= 0:
            again += self.listen_to_others()
        if again == 0:
            return False
        self.rebuild()
        self.start_over()
        return True

    cdef int listen_to_others(self) noexcept nogil:
        """Take what others gave back out of the busy map; how many ports that is."""
        cdef int count, i, port, messages = 0, again = 0
        cdef uint16_t *ports = <uint16_t *>malloc(65536 * sizeof(uint16_t))
        cdef ssize_t size
        cdef pollfd poller
        cdef timespec begin, now
        if ports == NULL:
            return 0
        poller.fd = self.beacon
        poller.events = <short>POLLIN
        clock_gettime(CLOCK_MONOTONIC, &begin)
        while True:
            size = recv(self.beacon, ports, 65536 * sizeof(uint16_t), 0)
            clock_gettime(CLOCK_MONOTONIC, &now)
            if size >= 0 and messages < BEACON_QUEUE:
                messages += 1
                count = <int>(size // <ssize_t>sizeof(uint16_t))
                for i in range(count):
                    port = ports[i] - self.first
                    if 0 <= port < self.span and has(self.busy_map, port):
                        drop(self.busy_map, port)
                        again += 1
            elif ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) // 1000000
                    >= LAST_LOOK_WAIT_MS or size >= 0 or not self.others_search()):
                break
            else:
                poll(&poller, 1, 1)
        if messages >= BEACON_QUEUE:  # the queue was full: more may have been said
            again = self.busy
            memset(self.busy_map, 0, self.words * sizeof(uint64_t))
        free(ports)
        return again

    cdef bint is_clean(self) noexcept nogil:
        """Whether there is nothing to close and nothing to tell."""
        return (
            self.kept_ports == 0 and not self.transient and self.beacon < 0 and self.unix_fd < 0
            and self.spare[0] < 0 and self.spare[1] < 0
        )

    cdef void finish(self) noexcept nogil:
        cdef int kind
        if self.busy_map == NULL:
            return
        self.let_go()
        self.tell()
        self.current = -1
        for kind in range(2):
            if self.spare[kind] >= 0:
                close(self.spare[kind])
                self.spare[kind] = -1
        if self.unix_fd >= 0:
            close(self.unix_fd)
            self.unix_fd = -1
        if self.beacon >= 0:
            close(self.beacon)
            self.beacon = -2


# --- searches of the same ground -----------------------------------------------------------------

@cython.final
cdef class Ground:
    """Where searches look, for as long as the two sysctls that decided it read the same.

    What the policy worked out once, so that a call that asks for nothing special need not again.

    Parameters
    ----------
    sysctls
        ``((path, text), (path, text))`` as :func:`read_file` takes and gives them.
    first, last, protocols, address
        As for :class:`Search`.
    cuts
        Pairs of ports, inclusive, to leave out.
    spare
        Descriptors to leave to others; at most ``most`` are kept beyond a window.
    plan
        Anything; kept for the caller.
    """

    cdef bytes one_path, other_path
    cdef bytes one, other
    cdef int first, last, protocols, spare, most
    cdef object address
    cdef tuple cuts
    cdef readonly object plan

    def __cinit__(
        self, tuple sysctls not None, int first, int last, int protocols, address,
        tuple cuts not None, int spare, int most, plan,
    ):
        (self.one_path, self.one), (self.other_path, self.other) = sysctls
        self.first, self.last, self.protocols = first, last, protocols
        self.address = address
        self.cuts = cuts
        self.spare, self.most = spare, most
        self.plan = plan

    def begin(self, ports not None):
        """A Search for as many ports in a row; None where the policy has to look itself.

        That is where a sysctl has changed, ports or descriptors do not suffice, or their number
        cannot be told quickly.
        """
        cdef Search search
        cdef rlimit limit
        cdef long used, needed, room
        cdef int keep = 0, too_large
        cdef long size = PyLong_AsLongAndOverflow(ports, &too_large)
        if too_large or not (1 <= size <= self.last - self.first + 1 and reads_as(self.one_path, self.one)
                and reads_as(self.other_path, self.other)):
            return None
        if size > 1:
            used = open_descriptors()
            # an entry, and the socket in hand
            needed = size * (2 if self.protocols == 3 else 1) + 2
            if used <= 0 or getrlimit(RLIMIT_NOFILE, &limit) != 0:
                return None
            room = <long>min(limit.rlim_cur, <unsigned long>0x7FFFFFFF) - used - needed
            if room < 0:
                return None
            keep = <int>max(min(<long>self.most, (room - self.spare) // 2), <long>0)
        search = Search.__new__(
            Search, self.first, self.last, size, self.protocols, self.address, None, None, keep
        )
        if self.cuts:
            for low, high in self.cuts:
                search.reserved += search.exclude(low, high)
            if not search.viable():
                return None
        return search


# --- arrays of ports --------------------------------------------------------------------------------

cdef int get_buffer(object array, Py_buffer *view, Py_ssize_t itemsize, bint writable) except -1:
    """A C-contiguous one-dimensional view. Plain Py_buffer: typed memoryviews cost 2 ms at import."""
    PyObject_GetBuffer(array, view, PyBUF_WRITABLE | PyBUF_ND if writable else PyBUF_ND)
    if view.ndim != 1 or view.itemsize != itemsize:
        PyBuffer_Release(view)
        raise ValueError(f"need a one-dimensional array of items of {itemsize} bytes")
    return 0


def check_ports(ports, int first, int last, bint distinct):
    """Index of the first port outside first..last, or (``distinct``) seen before; -1 for none."""
    cdef uint64_t seen[1024]
    cdef Py_buffer view
    cdef const uint16_t *items
    cdef Py_ssize_t i, bad = -1
    memset(seen, 0, sizeof(seen))
    get_buffer(ports, &view, 2, False)
    items = <const uint16_t *>view.buf
    for i in range(view.len // 2):
        if not first <= items[i] <= last or (distinct and has(seen, items[i])):
            bad = i
            break
        put(seen, items[i])
    PyBuffer_Release(&view)
    return bad
