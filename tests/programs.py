"""Programs that the hand-off tests start: each a way in which real servers behave.

All are started by ``program(name)`` as ``python -I -S -c``, which is up within some 15 ms.
"""

from __future__ import annotations

import sys

_COMMON = """
import os, signal, socket, sys, time
def serve(port, host="", reuse=True, family=socket.AF_INET, kind=socket.SOCK_STREAM):
    if "LISTEN_FDS" in os.environ:
        s = socket.socket(fileno=3)
        s.listen(256)
        return s
    s = socket.socket(family, kind)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if reuse:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((host, port))
    if kind == socket.SOCK_STREAM:
        s.listen(256)
    return s
def answer(s):
    while True:
        c, _ = s.accept()
        c.sendall(str(os.getpid()).encode())
        c.close()
"""

_PROGRAMS = {
    # what asyncio, http.server and most others do
    "server": "answer(serve(int(sys.argv[1]), *sys.argv[2:3]))",
    "server6": "answer(serve(int(sys.argv[1]), sys.argv[2], family=socket.AF_INET6))",
    "plain": "answer(serve(int(sys.argv[1]), reuse=False))",
    "late": "time.sleep(float(sys.argv[2])); answer(serve(int(sys.argv[1])))",
    "late_plain": "time.sleep(float(sys.argv[2])); answer(serve(int(sys.argv[1]), reuse=False))",
    "several": "held = [serve(int(p)) for p in sys.argv[1:]]; time.sleep(100)",
    "udp": "held = serve(int(sys.argv[1]), kind=socket.SOCK_DGRAM); time.sleep(100)",
    "both": """
s = serve(int(sys.argv[1])); u = serve(int(sys.argv[1]), kind=socket.SOCK_DGRAM); time.sleep(100)
""",
    "never": "time.sleep(100)",
    "stubborn": """
signal.signal(signal.SIGTERM, signal.SIG_IGN); s = serve(int(sys.argv[1])); time.sleep(100)
""",
    "graceful": """
signal.signal(signal.SIGTERM, lambda *a: (print("bye", flush=True), sys.exit(5)))
s = serve(int(sys.argv[1]))
while True: time.sleep(1)
""",
    # stays for a moment after SIGTERM, to see whether it comes again
    "counts_terms": """
terms = []
signal.signal(signal.SIGTERM, lambda *a: (os.write(1, b"term\\n"), terms.append(1)))
s = serve(int(sys.argv[1]))
while not terms: time.sleep(1)
time.sleep(0.3)
""",
    "fails": "print('first', file=sys.stderr); print('boom at last', file=sys.stderr); sys.exit(3)",
    "closes_streams": "os.close(0); os.close(1); os.close(2); answer(serve(int(sys.argv[1])))",
    # a worker listens, the parent waits for it
    "worker": """
if os.fork() == 0:
    answer(serve(int(sys.argv[1])))
os.wait()
""",
    # the parent ends, the grandchild has left group and session and listens a little later
    "daemon": """
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
time.sleep(0.2)
answer(serve(int(sys.argv[1])))
""",
    # the same, but it stays in its process group
    "background": """
if os.fork():
    os._exit(0)
time.sleep(0.2)
answer(serve(int(sys.argv[1])))
""",
    "thread": """
import threading
threading.Thread(target=lambda: answer(serve(int(sys.argv[1])))).start()
""",
    # the same, and nothing of the environment it was started with is left either
    "runaway": """
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
code = "import socket, sys, time; s = socket.socket(); s.setsockopt(1, 2, 1); "
code += "s.bind(('', int(sys.argv[1]))); s.listen(); c, _ = s.accept(); "
code += "c.sendall(b'%d' % __import__('os').getpid()); c.close(); time.sleep(100)"
os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", code, sys.argv[1]], {})
""",
    # children of its own, one of them in a session of its own, and no listener
    "tree": """
if os.fork() == 0:
    time.sleep(100)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
print("planted", flush=True)
time.sleep(100)
""",
    "says": """
print(sys.argv[1:]); print(os.environ.get("FASTPORTS_PORTS")); print(os.environ.get("X"))
""",
    "echo": """
data = sys.stdin.buffer.read()
sys.stdout.buffer.write(data.upper()); sys.stderr.buffer.write(b'%d' % len(data))
""",
}


def program(name: str, *arguments: str) -> list[str]:
    """The command line of one of the programs; most want ``"{port}"`` first."""
    return [sys.executable, "-I", "-S", "-c", _COMMON + _PROGRAMS[name], *arguments]
