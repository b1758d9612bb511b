# cython: freethreading_compatible=True
"""Questions to the kernel about TCP and UDP sockets, over sock_diag netlink (sock_diag(7)).

One exact request tells in microseconds whether a port listens, however many sockets there are;
a dump lists the sockets of a range of ports. Nothing connects, nothing is sent to anybody, and no
privilege is needed. What is asked is the network namespace in which the socket was made.
"""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset, strerror

from fastports cimport _linux as c

#: Classes of state, as masks: what :func:`sockets` takes and what its rows carry.
LISTENING = 1 << 10
#: Bound, neither listening nor connected. The kernel shows such TCP sockets from Linux 6.8 on.
BOUND = 1 << 13
TIME_WAIT = 1 << 6
#: Every state with a peer, being opened or closed (``include/net/tcp_states.h``).
CONNECTED = sum(1 << state for state in (1, 2, 3, 4, 5, 8, 9, 11, 12))

cdef enum:
    STATE_ESTABLISHED = 1
    STATE_TIME_WAIT = 6
    STATE_CLOSE = 7
    STATE_LISTEN = 10
    STATE_BOUND = 13
    BUFFER = 32768  # the kernel fills at most this much of a dump in one message
    DUMPS = 4  # tries at a dump that others disturb; then the last one is taken


cdef struct Row:
    uint32_t inode
    uint32_t uid
    uint16_t port
    uint8_t state
    uint8_t family


cdef struct Rows:
    Row* row
    size_t count
    size_t room


cdef struct Request:
    c.nlmsghdr header
    c.inet_diag_req_v2 body


cdef struct Filter:
    c.nlattr attribute
    c.inet_diag_bc_op op[4]


cdef struct RangeRequest:
    c.nlmsghdr header
    c.inet_diag_req_v2 body
    Filter filter


cdef int ask_exact(int fd, uint32_t sequence, int protocol, int family, const uint8_t* address,
                   int port, c.inet_diag_msg* answer) noexcept nogil:
    """1 and the answer, 0 when there is no such socket, or minus the errno."""
    cdef Request request
    cdef char buffer[8192]
    cdef c.nlmsghdr* header
    cdef ssize_t got
    cdef int error
    cdef size_t length = 4 if family == c.AF_INET else 16
    memset(&request, 0, sizeof(request))
    request.header.nlmsg_len = sizeof(request)
    request.header.nlmsg_type = c.SOCK_DIAG_BY_FAMILY
    request.header.nlmsg_flags = c.NLM_F_REQUEST
    request.header.nlmsg_seq = sequence
    request.body.sdiag_family = family
    request.body.sdiag_protocol = protocol
    request.body.idiag_states = 0xFFFFFFFF
    request.body.id.idiag_cookie[0] = 0xFFFFFFFF  # INET_DIAG_NOCOOKIE
    request.body.id.idiag_cookie[1] = 0xFFFFFFFF
    if protocol == c.IPPROTO_UDP:  # udp_diag takes the local end as destination
        request.body.id.idiag_dport = c.htons(port)
        memcpy(request.body.id.idiag_dst, address, length)
    else:
        request.body.id.idiag_sport = c.htons(port)
        memcpy(request.body.id.idiag_src, address, length)
    while c.send(fd, &request, sizeof(request), 0) < 0:
        if errno != c.EINTR:
            return -errno
    while True:  # the answer is queued by the send itself; older answers are passed over
        got = c.recv(fd, buffer, sizeof(buffer), c.MSG_DONTWAIT)
        if got < 0:
            if errno == c.EINTR:
                continue
            return -errno
        header = <c.nlmsghdr*>buffer
        if got < <ssize_t>sizeof(c.nlmsghdr) or header.nlmsg_seq != sequence:
            continue
        if header.nlmsg_type == c.NLMSG_ERROR:
            error = (<c.nlmsgerr*>(buffer + c.NLMSG_HDRLEN)).error
            return 0 if error == -c.ENOENT else error
        if got < <ssize_t>(c.NLMSG_HDRLEN + sizeof(c.inet_diag_msg)):
            return -c.EPROTO
        memcpy(answer, buffer + c.NLMSG_HDRLEN, sizeof(c.inet_diag_msg))
        return 1


cdef int ask_range(int fd, uint32_t sequence, int protocol, int family, uint32_t states,
                   int first, int last, Rows* rows) noexcept nogil:
    """Rows of one dump are appended; 0, 1 when others disturbed the dump, or minus the errno."""
    cdef RangeRequest request
    cdef char buffer[BUFFER]
    cdef c.nlmsghdr* header
    cdef c.inet_diag_msg* message
    cdef Row* grown
    cdef ssize_t got, at
    cdef int disturbed = 0
    memset(&request, 0, sizeof(request))
    request.header.nlmsg_len = sizeof(request)
    request.header.nlmsg_type = c.SOCK_DIAG_BY_FAMILY
    request.header.nlmsg_flags = c.NLM_F_REQUEST | c.NLM_F_DUMP
    request.header.nlmsg_seq = sequence
    request.body.sdiag_family = family
    request.body.sdiag_protocol = protocol
    request.body.idiag_states = states
    # Each comparison is an op and an operand; "no" jumps four bytes past the end: no match.
    request.filter.attribute.nla_len = sizeof(Filter)
    request.filter.attribute.nla_type = c.INET_DIAG_REQ_BYTECODE
    request.filter.op[0].code = c.INET_DIAG_BC_S_GE
    request.filter.op[0].yes = 2 * sizeof(c.inet_diag_bc_op)
    request.filter.op[0].no = 5 * sizeof(c.inet_diag_bc_op)
    request.filter.op[1].no = first
    request.filter.op[2].code = c.INET_DIAG_BC_S_LE
    request.filter.op[2].yes = 2 * sizeof(c.inet_diag_bc_op)
    request.filter.op[2].no = 3 * sizeof(c.inet_diag_bc_op)
    request.filter.op[3].no = last
    while c.send(fd, &request, sizeof(request), 0) < 0:
        if errno != c.EINTR:
            return -errno
    while True:
        got = c.recv(fd, buffer, sizeof(buffer), c.MSG_DONTWAIT)
        if got < 0:
            if errno == c.EINTR:
                continue
            return -errno
        at = 0
        while got - at >= <ssize_t>sizeof(c.nlmsghdr):
            header = <c.nlmsghdr*>(buffer + at)
            if header.nlmsg_len < sizeof(c.nlmsghdr) or header.nlmsg_len > got - at:
                return -c.EPROTO
            if header.nlmsg_seq == sequence:
                disturbed |= (header.nlmsg_flags & c.NLM_F_DUMP_INTR) != 0
                if header.nlmsg_type == c.NLMSG_DONE:
                    return disturbed
                if header.nlmsg_type == c.NLMSG_ERROR:
                    return (<c.nlmsgerr*>(buffer + at + c.NLMSG_HDRLEN)).error
                if header.nlmsg_len < c.NLMSG_HDRLEN + sizeof(c.inet_diag_msg):
                    return -c.EPROTO
                message = <c.inet_diag_msg*>(buffer + at + c.NLMSG_HDRLEN)
                if rows.count == rows.room:
                    rows.room = rows.room * 2 + 64
                    grown = <Row*>realloc(rows.row, rows.room * sizeof(Row))
                    if grown == NULL:
                        rows.room = rows.count
                        return -c.ENOMEM
                    rows.row = grown
                rows.row[rows.count].port = c.ntohs(message.id.idiag_sport)
                rows.row[rows.count].state = message.idiag_state
                rows.row[rows.count].family = message.idiag_family
                rows.row[rows.count].inode = message.idiag_inode
                rows.row[rows.count].uid = message.idiag_uid
                rows.count += 1
            at += (header.nlmsg_len + 3) & ~<uint32_t>3


cdef object failure(int error, str what):
    return OSError(error, f"sock_diag: {what}: {strerror(error).decode()}")


cdef object state_class(int protocol, int state):
    if state == STATE_LISTEN:
        return LISTENING
    if state == STATE_TIME_WAIT:
        return TIME_WAIT
    if state == STATE_BOUND or state == STATE_CLOSE:  # an unconnected UDP socket is in CLOSE
        return BOUND
    return CONNECTED


cdef int protocol_number(str protocol) except -1:
    if protocol == "tcp":
        return c.IPPROTO_TCP
    if protocol == "udp":
        return c.IPPROTO_UDP
    raise ValueError(f"protocol {protocol!r} is neither 'tcp' nor 'udp'")


@cython.final
cdef class Diag:
    """One netlink socket to ask with, for as many questions as wanted; closed by the destructor.

    Not to be used by two threads at once.

    Raises
    ------
    OSError
        The kernel has no sock_diag (EPROTONOSUPPORT), or a sandbox refuses it.
    """

    cdef int fd
    cdef uint32_t sequence

    def __cinit__(self):
        self.fd = c.socket(c.AF_NETLINK, c.SOCK_RAW | c.SOCK_CLOEXEC, c.NETLINK_SOCK_DIAG)
        if self.fd < 0:
            raise failure(errno, "no netlink socket")
        self.sequence = 0

    def __dealloc__(self):
        self.close()

    cpdef close(self):
        """Give the descriptor back. Idempotent."""
        cdef int fd = self.fd
        self.fd = -1
        if fd >= 0:
            c.close(fd)

    def lookup(self, str protocol not None, bytes address not None, int port):
        """Which socket would serve a packet to this address and port, from nowhere in particular.

        Parameters
        ----------
        protocol
            ``"tcp"`` or ``"udp"``.
        address
            4 or 16 bytes, as ``inet_pton`` gives them. A listener on the address itself is found,
            and one on the wildcard of either family that covers it (a dual-stack one for IPv4).
        port
            1 to 65535.

        Returns
        -------
        tuple[int, int, int] or None
            State class (:data:`LISTENING`; :data:`BOUND` or :data:`CONNECTED` for UDP), inode and
            uid. None where nothing listens, or is bound for UDP.
        """
        cdef int number = protocol_number(protocol)
        cdef int family, found
        cdef c.inet_diag_msg answer
        cdef int fd = self.fd
        cdef uint32_t sequence
        cdef const uint8_t* octets = address
        if len(address) == 4:
            family = c.AF_INET
        elif len(address) == 16:
            family = c.AF_INET6
            # The kernel takes a mapped address for IPv4 only if the remote end is mapped too.
            if address.startswith(b"\0\0\0\0\0\0\0\0\0\0\xff\xff"):
                family = c.AF_INET
                octets += 12
        else:
            raise ValueError("an address is 4 or 16 bytes")
        if not 0 < port < 65536:
            raise ValueError(f"port {port} is not in 1..65535")
        self.sequence += 1
        sequence = self.sequence
        with nogil:
            found = ask_exact(fd, sequence, number, family, octets, port, &answer)
        if found < 0:
            raise failure(-found, f"{protocol} port {port}")
        if not found:
            return None
        return state_class(number, answer.idiag_state), answer.idiag_inode, answer.idiag_uid

    def sockets(self, int first, int last, str protocol not None, int states):
        """Every socket whose local port is in ``first..last`` and whose state is in ``states``.

        Both families. A walk through the kernel's tables: milliseconds for anything but
        :data:`LISTENING`, so it explains a refusal and is never the check.

        Returns
        -------
        list[tuple[int, int, int, int, int]]
            ``(port, state class, inode, uid, family)``, in no particular order. TIME_WAIT has no
            inode and no uid: both 0.
        """
        cdef int number = protocol_number(protocol)
        cdef int result = 0
        cdef int family, turn
        cdef int fd = self.fd
        cdef uint32_t wanted = states
        cdef uint32_t sequence
        cdef size_t index, before
        cdef Rows rows
        if not 0 < first <= last < 65536:
            raise ValueError(f"ports {first}-{last} are not a range in 1..65535")
        if number == c.IPPROTO_UDP:
            wanted = 0
            if states & <int>BOUND:
                wanted |= 1 << STATE_CLOSE
            if states & <int>CONNECTED:
                wanted |= 1 << STATE_ESTABLISHED
        memset(&rows, 0, sizeof(rows))
        try:
            for family in (c.AF_INET, c.AF_INET6):
                before = rows.count
                for turn in range(DUMPS):
                    self.sequence += 1
                    sequence = self.sequence
                    rows.count = before
                    with nogil:
                        result = ask_range(
                            fd, sequence, number, family, wanted, first, last, &rows
                        )
                    if result <= 0:
                        break
                if result == -c.ENOENT and family == c.AF_INET6:
                    continue  # a kernel without IPv6
                if result < 0:
                    raise failure(-result, f"{protocol} ports {first}-{last}")
            return [
                (
                    rows.row[index].port,
                    state_class(number, rows.row[index].state),
                    rows.row[index].inode,
                    rows.row[index].uid,
                    rows.row[index].family,
                )
                for index in range(rows.count)
            ]
        finally:
            free(rows.row)


def sockets(int first, int last, str protocol not None, int states):
    """:meth:`Diag.sockets` on a netlink socket of its own."""
    cdef Diag diag = Diag()
    try:
        return diag.sockets(first, last, protocol, states)
    finally:
        diag.close()


cdef bint refused(int fd, c.sockaddr_in* address) noexcept nogil:
    return (
        c.bind(fd, <c.sockaddr*>address, sizeof(c.sockaddr_in)) < 0 and errno == c.EADDRINUSE
    )


cdef int enters(int fd, c.sockaddr_in* address) noexcept nogil:
    return (
        c.bind(fd, <c.sockaddr*>address, sizeof(c.sockaddr_in)) == 0 and c.listen(fd, 1) == 0
    )


cdef const char* test_door(int* fds) noexcept nogil:
    """Hold an ephemeral port, try the door on it; the fact that does not hold, or NULL."""
    cdef c.sockaddr_in6 any_address
    cdef c.sockaddr_in address
    cdef c.socklen_t length = sizeof(any_address)
    cdef int zero = 0
    cdef int one = 1
    memset(&any_address, 0, sizeof(any_address))
    memset(&address, 0, sizeof(address))
    any_address.sin6_family = c.AF_INET6
    address.sin_family = c.AF_INET
    fds[0] = c.socket(c.AF_INET6, c.SOCK_STREAM | c.SOCK_CLOEXEC, 0)
    if fds[0] >= 0:
        c.setsockopt(fds[0], c.IPPROTO_IPV6, c.IPV6_V6ONLY, &zero, sizeof(zero))
    if fds[0] < 0 or c.bind(fds[0], <c.sockaddr*>&any_address, sizeof(any_address)) < 0:
        if fds[0] >= 0:
            c.close(fds[0])
        fds[0] = c.socket(c.AF_INET, c.SOCK_STREAM | c.SOCK_CLOEXEC, 0)
        if c.bind(fds[0], <c.sockaddr*>&address, sizeof(address)) < 0:
            return b"no port can be bound"
    if c.getsockname(fds[0], <c.sockaddr*>&any_address, &length) < 0:
        return b"no port can be bound"
    address.sin_port = any_address.sin6_port  # at the same place in both families
    address.sin_addr.s_addr = c.htonl(0x7F000001)
    fds[1] = c.socket(c.AF_INET, c.SOCK_STREAM | c.SOCK_CLOEXEC, 0)
    fds[2] = c.socket(c.AF_INET, c.SOCK_STREAM | c.SOCK_CLOEXEC, 0)
    if fds[1] < 0 or fds[2] < 0:
        return b"no socket can be made"
    if not refused(fds[1], &address):
        return b"a held port can be bound"
    c.setsockopt(fds[1], c.SOL_SOCKET, c.SO_REUSEADDR, &one, sizeof(one))
    c.setsockopt(fds[2], c.SOL_SOCKET, c.SO_REUSEADDR, &one, sizeof(one))
    if not refused(fds[1], &address):
        return b"SO_REUSEADDR enters a held port whose door is closed"
    if c.setsockopt(fds[0], c.SOL_SOCKET, c.SO_REUSEADDR, &one, sizeof(one)) < 0:
        return b"SO_REUSEADDR cannot be set on a bound socket"
    if not enters(fds[1], &address):
        return b"an open door lets nobody in"
    if not refused(fds[2], &address):
        return b"a second server enters beside the one that listens"
    if c.setsockopt(fds[0], c.SOL_SOCKET, c.SO_REUSEADDR, &zero, sizeof(zero)) < 0:
        return b"SO_REUSEADDR cannot be cleared on a bound socket"
    return NULL


def door_facts():
    """Whether this kernel lets a server in beside a hold, and nobody else.

    Tries it with real sockets on an ephemeral port, in some 25 us.

    Returns
    -------
    str
        What does not hold here, in words; empty if everything does.
    """
    cdef int[3] fds
    cdef int index
    cdef const char* failed
    fds[0] = fds[1] = fds[2] = -1
    with nogil:
        failed = test_door(fds)
        for index in range(3):
            if fds[index] >= 0:
                c.close(fds[index])
    return "" if failed == NULL else failed.decode()


def shows_listeners():
    """Whether sock_diag works here and shows a socket that listens; asked with a real one."""
    cdef c.sockaddr_in address
    cdef c.socklen_t length = sizeof(address)
    cdef int fd
    memset(&address, 0, sizeof(address))
    address.sin_family = c.AF_INET
    address.sin_addr.s_addr = c.htonl(0x7F000001)
    fd = c.socket(c.AF_INET, c.SOCK_STREAM | c.SOCK_CLOEXEC, 0)
    try:
        if (
            fd < 0
            or not enters(fd, &address)
            or c.getsockname(fd, <c.sockaddr*>&address, &length) < 0
        ):
            return False
        diag = Diag()
        found = diag.lookup("tcp", b"\x7f\0\0\1", c.ntohs(address.sin_port))
        diag.close()
        return found is not None
    except OSError:
        return False
    finally:
        if fd >= 0:
            c.close(fd)
