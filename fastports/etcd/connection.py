"""Endpoints, channels, login, and what gRPC's errors mean.

The client object serves for its channels and its credentials; calls go to the stubs, with a
deadline each. That is what keeps the client's own habits out: it locks an endpoint out for 300
seconds after one failure, sends call credentials over plaintext (which gRPC refuses), never logs
in again, waits for ever without a timeout, and lets part of the errors through untranslated.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time

from ..errors import (
    InvalidRequest,
    RegistryDenied,
    RegistryError,
    RegistryTimeout,
    RegistryUnavailable,
)
from ..events import ETCD_CALLS, ETCD_FAULTS, ETCD_MICROSECONDS, emit
from ..events import count as add
from .runner import Late, Runner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

PIP_LINE = "pip install 'fastports[etcd]'"
#: With several endpoints, seconds one of them may take before the next is asked.
PATIENCE = 2.0

_METHODS = {
    "txn": ("KV/Txn", "TxnResponse"),
    "range": ("KV/Range", "RangeResponse"),
    "grant": ("Lease/LeaseGrant", "LeaseGrantResponse"),
    "revoke": ("Lease/LeaseRevoke", "LeaseRevokeResponse"),
    # A stream in the service's words. Called as a unary call it is one request, one answer and the
    # end of the stream on the wire, and needs no thread that feeds an iterator.
    "keepalive": ("Lease/LeaseKeepAlive", "LeaseKeepAliveResponse"),
    "time_to_live": ("Lease/LeaseTimeToLive", "LeaseTimeToLiveResponse"),
    "alarm": ("Maintenance/Alarm", "AlarmResponse"),
    "status": ("Maintenance/Status", "StatusResponse"),
    "authenticate": ("Auth/Authenticate", "AuthenticateResponse"),
}
_CHANNEL_OPTIONS = (
    # A channel of our own, not one that the process shares: the state of its reconnects is ours.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection whose packets vanish is noticed; etcd allows a ping every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", -1),
)


class Endpoint:
    """One server as the caller named it."""

    __slots__ = ("host", "netloc", "port", "secure")

    def __init__(self, host: str, port: int, secure: bool) -> None:
        self.host: str = host
        self.port: int = port
        self.secure: bool = secure
        self.netloc: str = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __repr__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.netloc}"


def parse_endpoints(given: str | Sequence[str], *, tls: bool) -> tuple[Endpoint, ...]:
    """Endpoints out of ``"host:2379,http://[::1]:2379"`` or a sequence of such words.

    ``tls`` is what a word without a scheme means.
    """
    words = given.split(",") if isinstance(given, str) else list(given)
    found: list[Endpoint] = []
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise _bad_endpoint(word, "an endpoint is a word such as etcd-0:2379")
        endpoint = _parse_endpoint(word.strip(), tls)
        if endpoint.netloc not in (other.netloc for other in found):
            found.append(endpoint)
    if not found:
        raise _bad_endpoint(given, "at least one endpoint is needed")
    return tuple(found)


def _bad_endpoint(value: object, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{value!r} is no etcd endpoint: {why}; write host:2379, http://host:2379, "
        "https://host:2379 or [address]:2379",
        argument="endpoints",
        value=value,
    )


def _parse_endpoint(word: str, tls: bool) -> Endpoint:
    scheme, separator, rest = word.partition("://")
    if separator:
        if scheme not in ("http", "https"):
            raise _bad_endpoint(word, f"the scheme {scheme!r} is unknown")
        secure = scheme == "https"
        if tls and not secure:
            raise _bad_endpoint(word, "certificates are given, so its scheme must be https")
        rest = rest[:-1] if rest.endswith("/") else rest
    else:
        secure, rest = tls, word
    if any(c in rest for c in "/@?#\\") or any(ord(c) <= 32 or ord(c) == 127 for c in rest):
        raise _bad_endpoint(word, "only a host and a port can stand there")
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise _bad_endpoint(word, "an IPv6 address stands in brackets")
        port = tail[1:] if tail else "2379"
        _check_v6(word, host)
    elif rest.count(":") > 1:
        host, port = rest, "2379"
        _check_v6(word, host)
    else:
        host, colon, port = rest.partition(":")
        port = port if colon else "2379"
    if not host:
        raise _bad_endpoint(word, "the host is missing")
    if len(host) > 253 or not _encodable(host):  # RFC 1035, without the dot at the end
        raise _bad_endpoint(word[:300], "that is no host's name")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536):
        raise _bad_endpoint(word, "the port must be from 1 to 65535")
    return Endpoint(host, int(port), secure)


def _check_v6(word: str, host: str) -> None:
    from socket import AF_INET6, inet_pton

    try:
        inet_pton(AF_INET6, host.partition("%")[0])
    except (OSError, ValueError) as exc:
        raise _bad_endpoint(word, "that is no IPv6 address") from exc


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _why_no_pem(path: str) -> str:
    """Why a file cannot be one of PEM; empty if it can. A pipe is not looked into."""
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            return "it is a directory"
        if not os.access(path, os.R_OK):
            return "it cannot be read"
        if stat.S_ISREG(kind):
            with open(path, "rb") as file:
                if b"-----BEGIN " not in file.read(1 << 20):
                    return "nothing of PEM is in it"
    except OSError as exc:
        return exc.strerror or "it cannot be read"
    except ValueError:  # a null byte
        return "that is no path"
    return ""


class Credentials:
    """What it takes to be let in; checked without a connection."""

    __slots__ = ("ca", "cert", "key", "password", "user")

    def __init__(
        self,
        user: str | None,
        password: str | None,
        ca: str | None,
        cert: str | None,
        key: str | None,
    ) -> None:
        if (user is None) != (password is None):
            missing = "password" if password is None else "user"
            raise InvalidRequest(
                f"user and password belong together; give {missing}=, too", argument=missing
            )
        if (cert is None) != (key is None):
            missing = "key" if key is None else "cert"
            raise InvalidRequest(
                f"cert and key belong together; give {missing}=, too", argument=missing
            )
        for name, word in (("user", user), ("password", password)):
            if word is not None and not (isinstance(word, str) and _encodable(word)):
                raise InvalidRequest(f"{name} is text that UTF-8 can write", argument=name)
        for name, path in (("ca", ca), ("cert", cert), ("key", key)):
            why = "" if path is None else _why_no_pem(path)
            if why:
                raise InvalidRequest(
                    f"the file {path!r} cannot be used ({why}); give {name}= the path of a PEM"
                    " file",
                    argument=name,
                    value=path,
                )
        self.user: str | None = user
        self.password: str | None = password
        self.ca: str | None = ca
        self.cert: str | None = cert
        self.key: str | None = key

    @property
    def tls(self) -> bool:
        return self.ca is not None or self.cert is not None


class Call:
    """The budget of one request of ours, whatever number of attempts it takes.

    ``ambiguous`` is set as soon as an attempt ended such that the server may have done the work.
    """

    __slots__ = ("ambiguous", "deadline")

    def __init__(self, timeout: float) -> None:
        self.deadline: float = time.monotonic() + timeout
        self.ambiguous: bool = False

    @property
    def remaining(self) -> float:
        return self.deadline - time.monotonic()


def let_go(lock: Any) -> None:
    """Release a lock that this thread may have.

    An interrupt can come between acquire() and the assignment of its result; only the lock itself
    knows for certain.
    """
    if lock._is_owned():
        lock.release()


def _serialized(request: Any) -> bytes:
    """A message as bytes; what is that already (see wire.py) goes as it is."""
    raw: bytes = request if type(request) is bytes else request.SerializeToString()
    return raw


class Link:
    """One endpoint with its channel; ``answered`` tells whether it ever did."""

    __slots__ = ("answered", "channel", "endpoint", "methods", "watch")

    def __init__(self, endpoint: str, channel: Any, rpc: Any) -> None:
        self.endpoint: str = endpoint
        self.channel: Any = channel
        self.answered: bool = False
        self.methods: dict[str, Callable[..., Any]] = {
            name: channel.unary_unary(
                "/etcdserverpb." + path,
                request_serializer=_serialized,
                response_deserializer=getattr(rpc, response).FromString,
            )
            for name, (path, response) in _METHODS.items()
        }
        # The same thought as for keepalive: one request, then answers as long as they come.
        self.watch: Callable[..., Any] = channel.unary_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=rpc.WatchRequest.SerializeToString,
            response_deserializer=rpc.WatchResponse.FromString,
        )


def load_client() -> Any:
    """The installed python-etcd3 (or its twin ``pyetcd``), or an error that says what to type."""
    from importlib import import_module

    failures: list[tuple[str, Exception]] = []
    for name in ("etcd3", "pyetcd"):
        try:
            module = import_module(name)
            import_module(name + ".etcdrpc")
            return module
        # TypeError, AttributeError, ... out of generated code: the client of 2020 beside today's
        # protobuf, or two packages that wrote into one folder. Nothing narrower would do.
        except Exception as exc:
            failures.append((name, exc))
    name, cause = next(
        ((n, e) for n, e in failures if not isinstance(e, ModuleNotFoundError)), failures[0]
    )
    if isinstance(cause, ModuleNotFoundError) and cause.name in ("etcd3", "pyetcd"):
        raise RegistryError(f"the etcd client is not installed; type: {PIP_LINE}") from cause
    raise RegistryError(
        f"the installed etcd client {name!r} cannot be imported "
        f"({type(cause).__name__}: {str(cause)[:200]}); another package may have overwritten it or "
        f"be too old for this protobuf; remove the packages that provide {name!r} and type: "
        f"{PIP_LINE}"
    ) from cause


def _messages_of(client: Any) -> Any:
    """The module of message classes that belongs to a client object."""
    from importlib import import_module

    for cls in type(client).__mro__:
        package = cls.__module__.partition(".")[0]
        try:
            return import_module(package + ".etcdrpc")
        except ImportError:
            continue
    return import_module(load_client().__name__ + ".etcdrpc")


class Connection:
    """The channels of one process to etcd, made at the first call.

    Parameters
    ----------
    endpoints
        Where to go; None where ``factory`` or ``client`` is given.
    credentials
        User, password and files.
    factory
        Makes a python-etcd3 client; called again in another process or when its login expired.
    client
        A ready client object. It is not closed by us, and cannot log in again.
    """

    def __init__(
        self,
        endpoints: tuple[Endpoint, ...] | None,
        credentials: Credentials,
        factory: Callable[[], Any] | None = None,
        client: Any = None,
    ) -> None:
        self.endpoints = endpoints
        self.credentials = credentials
        self.factory = factory
        self.client: Any = client
        self.rpc: Any = None
        self._runner = Runner()
        self._lock = threading.RLock()
        self._links: tuple[Link, ...] = ()
        self._current = 0
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._logged_in = False
        self._closed = False
        self._rpc_error: type[BaseException] = OSError

    # -- links -----------------------------------------------------------------------------------

    def open(self, call: Call) -> tuple[Link, ...]:
        """The links, made now if they are not there yet."""
        if self._links and self._logged_in:
            return self._links
        try:
            if not self._lock.acquire(timeout=max(0.0, call.remaining)):
                raise self._late(None)
            if self._closed:
                raise RegistryError("the registry is closed; make a new one")
            if not self._links:
                self._make()
            if not self._logged_in:
                self._login(call)
            return self._links
        finally:
            let_go(self._lock)

    def _make(self) -> None:
        client = self.client
        if self.factory is not None:
            client = self.factory()
        if client is None:
            assert self.endpoints is not None
            module = load_client()
            from importlib import import_module

            rpc = import_module(module.__name__ + ".etcdrpc")
            links = tuple(
                Link(endpoint.netloc, self._channel(endpoint), rpc) for endpoint in self.endpoints
            )
        else:
            rpc = _messages_of(client)
            links = tuple(Link(name, channel, rpc) for name, channel in _channels_of(client))
            if self.factory is not None:
                self.client = client
        from importlib import import_module

        self._rpc_error = import_module("grpc").RpcError
        self.rpc = rpc
        # Ten thousand processes that got the same list do not all start at its first word.
        self._current = int.from_bytes(os.urandom(2), "big") % len(links)
        self._links = links

    def _channel(self, endpoint: Endpoint) -> Any:
        from importlib import import_module

        grpc = import_module("grpc")  # 73 ms; nobody without etcd pays them
        if not endpoint.secure:
            return grpc.insecure_channel(endpoint.netloc, options=_CHANNEL_OPTIONS)
        files: list[bytes | None] = []
        for name in ("ca", "key", "cert"):
            path = getattr(self.credentials, name)
            if path is None:
                files.append(None)
                continue
            try:
                with open(path, "rb") as file:
                    files.append(file.read())
            except OSError as exc:
                raise InvalidRequest(
                    f"the file {path!r} cannot be read any more ({exc.strerror}); give {name}= the "
                    "path of a PEM file",
                    argument=name,
                    value=path,
                ) from exc
        return grpc.secure_channel(
            endpoint.netloc, grpc.ssl_channel_credentials(*files), options=_CHANNEL_OPTIONS
        )

    def close(self) -> None:
        """Close what was opened here. A client object given by the caller stays open."""
        with self._lock:
            self._closed = True
            links, self._links = self._links, ()
            if self.factory is not None and self.client is not None:
                self.client.close()
            elif self.client is None:
                for link in links:
                    link.channel.close()
        self._runner.close()

    # -- login -----------------------------------------------------------------------------------

    def _login(self, call: Call) -> None:
        # Without this word a member that lost its leader lets every call wait.
        base = (("hasleader", "true"),)
        user, password = self.credentials.user, self.credentials.password
        if user is None:
            given = getattr(self.client, "metadata", None) or ()
            self._metadata = (*base, *given)
            self._logged_in = True
            return
        request = self.rpc.AuthenticateRequest(name=user, password=password)
        self._metadata = base
        try:
            answer = self._pass("authenticate", request, call)
        except RegistryError as exc:
            if "authentication is not enabled" not in str(exc):
                raise
        else:
            self._metadata = (*base, ("token", answer.token))
        self._logged_in = True

    def _login_again(self, used: tuple[tuple[str, str], ...], call: Call) -> bool:
        """A new token after one expired; False where there is nothing to log in with."""
        if self.credentials.user is None and self.factory is None:
            return False
        try:
            if not self._lock.acquire(timeout=max(0.0, call.remaining)):
                raise self._late(None)
            if self._closed or self._metadata is not used:
                return True  # another thread has done it
            if self.credentials.user is None:
                old = self.client
                self._make()
                old.close()
            self._logged_in = False
            self._login(call)
            return True
        finally:
            let_go(self._lock)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries beside its message: leader wanted, token."""
        return self._metadata

    # -- calls -----------------------------------------------------------------------------------

    def invoke(self, name: str, request: Any, call: Call) -> Any:
        """One pass over the endpoints; the retry policy stands above.

        An endpoint that cannot have taken the request, or does not answer in time, is followed by
        the next one: every request of ours may be sent twice.

        Raises
        ------
        RegistryError
            Of the last endpoint asked, with the server's words.
        """
        self.open(call)
        used = self._metadata
        try:
            return self._pass(name, request, call)
        except RegistryDenied as exc:
            if not exc.retryable or not self._login_again(used, call):
                raise
        return self._pass(name, request, call)

    def _pass(self, name: str, request: Any, call: Call) -> Any:
        links = self._links
        if not links:
            raise RegistryError("the registry is closed; make a new one")
        count = len(links)
        error: RegistryError | None = None
        for step in range(count):
            position = (self._current + step) % count
            link = links[position]
            remaining = call.remaining
            if remaining <= 0:
                break
            # Every endpoint but the last one leaves something of the budget to the others.
            limit = remaining
            if step + 1 < count:
                limit = min(limit, PATIENCE, remaining / (count - step))
            add(ETCD_CALLS)
            begin = time.monotonic()
            try:
                answer = self._runner.run(
                    lambda seconds, method=link.methods[name]: method(  # type: ignore[misc]
                        request, timeout=seconds, metadata=self._metadata
                    ),
                    limit,
                )
            except Late:
                error = _silent(link, "the call did not end at its deadline")
            except self._rpc_error as exc:
                error = translate(exc, link)
                error.__cause__ = exc
            except ValueError as exc:  # closed by another thread
                raise RegistryError(
                    f"the connection to {link.endpoint} was closed here ({exc}); make a new "
                    "registry",
                    endpoint=link.endpoint,
                    outcome="unknown",
                ) from exc
            else:
                link.answered = True
                if step:
                    self._current = position
                return answer
            finally:
                add(ETCD_MICROSECONDS, round((time.monotonic() - begin) * 1e6))
            add(ETCD_FAULTS)
            emit("etcd_fault", endpoint=link.endpoint, call=name, why=str(error))
            if error.outcome == "unknown":
                call.ambiguous = True
            if not error.retryable or isinstance(error, RegistryDenied):
                raise error
        if error is None:
            raise self._late(links[self._current])
        self._current = (self._current + 1) % count
        raise error

    def ask_one(self, link: Link, name: str, request: Any, call: Call) -> Any:
        """One call to one endpoint and no other, whether it has a leader or not."""
        metadata = [pair for pair in self._metadata if pair[0] != "hasleader"]
        try:
            return self._runner.run(
                lambda seconds: link.methods[name](request, timeout=seconds, metadata=metadata),
                max(0.0, call.remaining),
            )
        except Late:
            raise _silent(link, "the call did not end at its deadline") from None
        except self._rpc_error as exc:
            raise translate(exc, link) from exc

    def _late(self, link: Link | None) -> RegistryError:
        where = link.endpoint if link is not None else self._where()
        return RegistryTimeout(
            f"no time was left to ask etcd at {where}; allow a longer timeout",
            endpoint=where,
            outcome="not-applied",
        )

    def _where(self) -> str:
        if self.endpoints is not None:
            return ", ".join(endpoint.netloc for endpoint in self.endpoints)
        return ", ".join(link.endpoint for link in self._links) or "the client's endpoint"

    def links(self) -> tuple[Link, ...]:
        return self._links

    @property
    def current(self) -> Link:
        return self._links[self._current % len(self._links)]

    def advance(self) -> None:
        """Let the next call begin with another endpoint."""
        self._current = (self._current + 1) % max(1, len(self._links))

    @property
    def rpc_error(self) -> type[BaseException]:
        return self._rpc_error


def _channels_of(client: Any) -> list[tuple[str, Any]]:
    """Every channel of a python-etcd3 client, its locked-out endpoints included."""
    endpoints = getattr(client, "endpoints", None)
    if isinstance(endpoints, dict) and endpoints:
        return [(str(name), endpoint.channel) for name, endpoint in endpoints.items()]
    channel = getattr(client, "channel", None)
    if channel is None:
        raise InvalidRequest(
            f"a {type(client).__name__} has neither endpoints nor a channel; give endpoints, a "
            "python-etcd3 client or a function that makes one",
            argument="endpoints",
            value=client,
        )
    return [(str(getattr(client, "_url", "the client's endpoint")), channel)]


# What gRPC says before it comes to the point.
_PREAMBLE = re.compile(
    r"^failed to connect to all addresses; last error: (?:[A-Z]+: )?(?:ipv[46]:\S+: )?"
    r"(?:Failed to connect to remote host: )?"
)
_LOOK = "see that it runs and that the endpoint is right"
# What it means, by a part of gRPC's words.
_CURES = (
    ("CERTIFICATE_VERIFY_FAILED", "give ca= the certificate of whoever signed that of etcd"),
    ("Handshake read failed", "it may want no TLS: write http:// instead of https://"),
    ("Socket closed", "it may want TLS: write https://, and give ca="),
    ("before receiving SETTINGS", "something listens there but is silent: see that etcd runs"),
    ("Expected SETTINGS frame", "what answers there is no etcd: check the endpoint"),
)

# What etcd or gRPC says when the request certainly did nothing.
_NEVER_SENT = ("failed to connect to all addresses", "errors resolving", "no leader")
_LOGIN_EXPIRED = ("invalid auth token", "revision of auth store is old")
_NOT_LET_IN = ("authentication failed", "permission denied", "not permitted")


def _silent(link: Link, words: str) -> RegistryError:
    """Time ran out: somebody is slow there, or nobody ever was there."""
    where = link.endpoint
    if not link.answered:
        return RegistryUnavailable(
            f"etcd at {where} never answered within the time allowed ({words}); see that it "
            "runs and that nothing drops the packets",
            endpoint=where,
            outcome="unknown",
        )
    return RegistryTimeout(
        f"etcd at {where} did not answer in time ({words}); allow a longer timeout or look "
        "after its disk and its leader",
        endpoint=where,
    )


def translate(exc: Any, link: Link) -> RegistryError:
    """The nearest error of ours for a ``grpc.RpcError``."""
    code = exc.code().name
    words = exc.details() or code
    where = link.endpoint
    if code == "UNAVAILABLE":
        sent = not any(text in words for text in _NEVER_SENT)
        words = _PREAMBLE.sub("", words)
        if "no leader" in words:
            text = f"etcd at {where} has no leader ({words}); see that most members of it run"
        else:
            cure = next((cure for sign, cure in _CURES if sign in words), _LOOK)
            text = f"etcd at {where} cannot be reached ({words}); {cure}"
        return RegistryUnavailable(
            text, endpoint=where, outcome="unknown" if sent else "not-applied"
        )
    if code == "DEADLINE_EXCEEDED":
        return _silent(link, words)
    if code == "UNAUTHENTICATED" or any(text in words for text in _LOGIN_EXPIRED):
        return RegistryDenied(
            f"etcd at {where} does not take the login any more ({words}); give user= and "
            "password=, or a function that makes a client",
            endpoint=where,
            retryable=True,
        )
    if "user name is empty" in words:
        return RegistryDenied(
            f"etcd at {where} wants a login ({words}); give user= and password=", endpoint=where
        )
    if code == "PERMISSION_DENIED" or any(text in words for text in _NOT_LET_IN):
        return RegistryDenied(
            f"etcd at {where} refuses ({words}); check user=, password= and the role's key range "
            "v1/",
            endpoint=where,
        )
    if "too many requests" in words:  # of code UNKNOWN, which tells nothing
        return RegistryError(
            f"etcd at {where} is overloaded ({words}); try again later",
            endpoint=where,
            retryable=True,
        )
    if code == "RESOURCE_EXHAUSTED":
        return RegistryError(
            f"etcd at {where} has no room ({words}); compact and defragment it, then disarm the "
            "alarm, or ask for less in one request",
            endpoint=where,
        )
    if code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE"):
        return RegistryError(f"etcd at {where} refuses the request ({words})", endpoint=where)
    if code == "UNIMPLEMENTED":
        return RegistryUnavailable(
            f"what answers at {where} is no etcd ({words}); check the endpoint",
            endpoint=where,
            retryable=False,
        )
    return RegistryError(
        f"etcd at {where} failed ({code}: {words}); the call may be tried again",
        endpoint=where,
        retryable=code in ("INTERNAL", "UNKNOWN", "ABORTED", "DATA_LOSS", "CANCELLED"),
        outcome="unknown",
    )
