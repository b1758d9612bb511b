"""Holds ports for a benchmark. One command a line on standard input; answers when it is done.

plain FIRST LAST SHARE SEED   bind that share of the ports, chosen by the seed, with plain sockets
blocks FIRST LAST SIZE        hold the ports in blocks of fastports
drop                          give everything back
"""

from __future__ import annotations

import random
import resource
import socket
import sys

import fastports

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
sockets: list[socket.socket] = []
blocks: list[fastports.PortBlock] = []
for line in sys.stdin:
    verb, *arguments = line.split()
    if verb == "plain":
        first, last = int(arguments[0]), int(arguments[1])
        ports = range(first, last + 1)
        share, seed = float(arguments[2]), int(arguments[3])
        for port in random.Random(seed).sample(ports, round(len(ports) * share)):
            sock = socket.socket(socket.AF_INET6)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(("::", port))
            sockets.append(sock)
    elif verb == "blocks":
        first, last, size = map(int, arguments)
        for port in range(first, last + 1, size):
            blocks.append(fastports.reserve((port, min(port + size - 1, last)), label="bench"))
    elif verb == "drop":
        for sock in sockets:
            sock.close()
        sockets.clear()
        for block in blocks:
            block.release()
        blocks.clear()
    print(len(sockets) + sum(map(len, blocks)), flush=True)
for block in blocks:
    block.release()
for sock in sockets:
    sock.close()
