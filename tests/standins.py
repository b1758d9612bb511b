"""Programs in the place of big ones: same arguments, same ports, bound in the same way.

Arguments that the real program does not have are refused, so that a recipe cannot drift.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# what they share: sockets as each library makes them, and a note of what was bound
_COMMON = '''
import argparse, json, os, signal, socket, sys

held = []

def bound(port, host="0.0.0.0", *, reuse_address=True, reuse_port=False):
    """uvicorn, ZeroMQ and TCPStore all set SO_REUSEADDR before they bind."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
    s.bind((host, port))
    s.listen()
    held.append(s)
    return port

def first_free(port):
    """A look that binds plainly, gives the port back, and leaves it to be bound again."""
    while True:
        with socket.socket() as s:
            try:
                s.bind(("", port))
                return port
            except OSError:
                port += 1

def told(**ports):
    with open(os.environ["STANDINS"], "a") as file:
        facts = {"argv": sys.argv, "pid": os.getpid(), "ports": ports}
        file.write(json.dumps(facts) + "\\n")

def stay():
    while True:
        signal.pause()

def zmq_port(endpoint):
    scheme, host, port = endpoint.split(":")
    assert (scheme, host) == ("tcp", "//*"), endpoint
    return int(port)

def kv_events(text, dp):
    config = json.loads(text)
    known = {"enable_kv_cache_events", "publisher", "endpoint", "topic", "replay_endpoint"}
    assert set(config) <= known, config
    if not config["enable_kv_cache_events"] or config.get("publisher") != "zmq":
        return []
    return [bound(zmq_port(config["endpoint"]) + rank) for rank in range(dp)]

def nixl(tp, dp):
    base = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", 5600))
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
    return [bound(base + d * tp + t, host) for d in range(dp) for t in range(tp)]
'''

_VLLM = """
parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--host", default="0.0.0.0")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
parser.add_argument("--kv-transfer-config", type=json.loads)
parser.add_argument("--kv-events-config", default='{"enable_kv_cache_events": false}')
o = parser.parse_args()
tp, dp = o.tensor_parallel_size, o.data_parallel_size
ports = {}
if "VLLM_PORT" in os.environ:
    start = int(os.environ["VLLM_PORT"])
    ports["internal"] = [bound(first_free(start)) for _ in range(dp)]
if o.kv_transfer_config:
    assert o.kv_transfer_config["kv_connector"] == "NixlConnector"
    ports["nixl"] = nixl(tp, dp)
ports["kv"] = kv_events(o.kv_events_config, dp)
ports["http"] = [bound(o.port, o.host, reuse_port=True)]
told(**ports)
stay()
"""

_SGLANG = """
parser = argparse.ArgumentParser()
parser.add_argument("--model-path", required=True)
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=30000)
parser.add_argument("--tp", "--tp-size", type=int, default=1)
parser.add_argument("--dp", "--dp-size", type=int, default=1)
parser.add_argument("--nccl-port", type=int)
parser.add_argument("--dist-init-addr")
parser.add_argument("--nnodes", type=int, default=1)
parser.add_argument("--node-rank", type=int, default=0)
parser.add_argument("--enable-dp-attention", action="store_true")
o = parser.parse_args()
ports = {}
if o.dist_init_addr:
    host, _, port = o.dist_init_addr.rpartition(":")
    ports["dist"] = [bound(int(port))]  # rank 0 hosts the store
    if o.enable_dp_attention:
        ports["dist"] += [bound(int(port) + n, host) for n in range(1, 6 + o.dp)]
else:
    ports["nccl"] = [bound(o.nccl_port)]
ports["http"] = [bound(o.port, o.host)]
told(**ports)
stay()
"""

_DYNAMO_FRONTEND = """
parser = argparse.ArgumentParser()
parser.add_argument("--http-port", type=int, default=int(os.environ.get("DYN_HTTP_PORT", 8000)))
parser.add_argument("--router-mode")
o = parser.parse_args()
told(http=[bound(o.http_port)])
stay()
"""

_DYNAMO_VLLM = """
parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--kv-events-config", required=True)
parser.add_argument("--connector", nargs="*")
o = parser.parse_args()
told(
    system=[bound(int(os.environ["DYN_SYSTEM_PORT"]))],
    nixl=nixl(1, 1),
    kv=kv_events(o.kv_events_config, 1),
)
stay()
"""

# the agent hosts the store; the script's ranks find it by MASTER_ADDR and MASTER_PORT
_TORCHRUN = """
import subprocess
parser = argparse.ArgumentParser()
parser.add_argument("--nnodes", type=int, default=1)
parser.add_argument("--nproc-per-node", type=int, default=1)
parser.add_argument("--master-addr", default="127.0.0.1")
parser.add_argument("--master-port", type=int, default=29500)
parser.add_argument("--rdzv-backend", default="static")
parser.add_argument("--rdzv-endpoint")
parser.add_argument("script")
o = parser.parse_args()
address = o.rdzv_endpoint or f"{o.master_addr}:{o.master_port}"
host, _, port = address.rpartition(":")
told(store=[bound(int(port))])
ranks = [
    subprocess.Popen([sys.executable, o.script], env={**os.environ, "RANK": str(rank),
        "WORLD_SIZE": str(o.nproc_per_node), "MASTER_ADDR": host, "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True"})
    for rank in range(o.nproc_per_node)
]
sys.exit(max(rank.wait() for rank in ranks))
"""

_RAY = """
parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["start"])
parser.add_argument("--head", action="store_true", required=True)
parser.add_argument("--block", action="store_true", required=True)
names = ["port", "node-manager-port", "object-manager-port",
         "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
         "runtime-env-agent-port", "metrics-export-port"]
for name in [*names, "min-worker-port", "max-worker-port"]:
    parser.add_argument(f"--{name}", type=int, required=True)
o = vars(parser.parse_args())
ports = {name: [bound(o[name.replace("-", "_")])] for name in names}
low, high = o["min_worker_port"], o["max_worker_port"]
ports["workers"] = [bound(low), bound(high)]
assert high - low == 63
told(**ports)
stay()
"""

_PROGRAMS = {"vllm": _VLLM, "torchrun": _TORCHRUN, "ray": _RAY}
_MODULES = {
    "sglang/launch_server.py": _SGLANG,
    "dynamo/frontend.py": _DYNAMO_FRONTEND,
    "dynamo/vllm.py": _DYNAMO_VLLM,
}


def install(folder: Path, *, real: tuple[str, ...] = ()) -> dict[str, str]:
    """Write them below ``folder``, but for those that are there; the environment to run in.

    Each appends a line to the file that ``STANDINS`` names once it has bound its ports.
    """
    programs, modules = folder / "bin", folder / "lib"
    programs.mkdir()
    for name, text in _PROGRAMS.items():
        if name not in real:
            path = programs / name
            path.write_text(f"#!{sys.executable}\n{_COMMON}{text}")
            path.chmod(0o755)
    for name, text in _MODULES.items():
        path = modules / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_COMMON + text)
    paths = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": ":".join(paths),
        "PYTHONPATH": ":".join([str(modules), *os.environ.get("PYTHONPATH", "").split(":")]),
        "STANDINS": str(folder / "told"),
    }
