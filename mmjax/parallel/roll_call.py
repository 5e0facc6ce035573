"""A meeting of all processes before JAX connects them: who is missing, who differs, said by name.

JAX itself aborts without a message when a peer never comes, and accepts processes that differ. So process 0 first
listens on the coordinator's port itself: each other one sends a line of JSON that says who it is, and gets one back.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from mmjax.errors import ConfigurationError
from mmjax.parallel.launch import Placement

_MAX_BYTES = 1 << 16
_RETRY_SECONDS = 0.2
# A stranger that connects and says nothing holds up the others no longer than this.
_SILENCE_SECONDS = 5


def meet(placement: Placement, identity: Mapping[str, str], timeout_seconds: float) -> None:
    """Returns once all processes are there and agree in every value of `identity`.

    Raises:
      ConfigurationError: the port is in use, the coordinator does not answer, a process is missing or there twice, or
        one differs; the same message in every process that was reached.
    """
    if placement.num_processes == 1:
        return
    words = {
        "process": placement.process_index,
        "processes": placement.num_processes,
        "host": socket.gethostname(),
        "identity": dict(identity),
    }
    deadline = time.monotonic() + timeout_seconds
    host, _, port = placement.coordinator.rpartition(":")
    if placement.process_index == 0:
        _call_roll(int(port), words, deadline)
    else:
        _answer(host.strip("[]"), int(port), words, deadline)


def _call_roll(port: int, own: dict[str, Any], deadline: float) -> None:
    present: dict[int, tuple[dict[str, Any], socket.socket]] = {}
    fault: dict[str, str] | None = None
    try:
        listener = socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            f"port {port} of this host",
            found=str(error.strerror or error),
            expected="a free port for the coordinator",
            remedy="end what uses it, or give another one by --launch.coordinator host:port",
        ) from error
    with listener:
        while len(present) < own["processes"] - 1 and fault is None:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, own["processes"])) - present.keys())
                fault = {
                    "where": "processes of the run",
                    "found": f"no process {', '.join(map(str, missing))} of {own['processes']} in time",
                    "expected": "all of them",
                    "remedy": "look at their logs, or raise --launch.start-timeout-seconds",
                }
                break
            theirs = _read_line(connection, min(deadline, time.monotonic() + _SILENCE_SECONDS))
            if not isinstance(theirs, dict) or "process" not in theirs:
                connection.close()
                continue
            fault = _difference(own, theirs, present)
            if theirs["process"] in present:
                _send_line(connection, {"fault": fault})
                connection.close()
            else:
                present[theirs["process"]] = (theirs, connection)
    for _, connection in present.values():
        with connection:
            _send_line(connection, {"fault": fault})
    if fault is not None:
        raise ConfigurationError(fault.pop("where"), **fault)


def _difference(own: dict[str, Any], theirs: dict[str, Any], present: Mapping[int, Any]) -> dict[str, str] | None:
    who = f"process {theirs['process']} on {theirs.get('host')}"
    if theirs.get("processes") != own["processes"]:
        return {
            "where": who,
            "found": f"{theirs.get('processes')} processes in its count",
            "expected": f"{own['processes']}, as process 0 has it",
            "remedy": "give all the same number of processes",
        }
    if theirs["process"] in present:
        return {
            "where": who,
            "found": f"a second process of this index (the first is on {present[theirs['process']][0].get('host')})",
            "expected": "each index once",
            "remedy": "number the processes from 0 without repetition",
        }
    identity = theirs.get("identity", {})
    differing = [name for name, value in own["identity"].items() if identity.get(name) != value]
    if differing:
        name = differing[0]
        return {
            "where": f"{who}: {', '.join(differing)}",
            "found": str(identity.get(name)),
            "expected": f"{own['identity'][name]}, as in process 0 on {own['host']}",
            "remedy": "start all processes with the same command, software and files",
        }
    return None


def _answer(host: str, port: int, own: dict[str, Any], deadline: float) -> None:
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(0.001, min(5, deadline - time.monotonic())))
            break
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise ConfigurationError(
                    f"coordinator {host}:{port}",
                    found=str(error.strerror or error),
                    expected="process 0 to answer there",
                    remedy="check that process 0 runs, its address, and that no firewall is between",
                ) from error
            time.sleep(_RETRY_SECONDS)
    with connection:
        _send_line(connection, own)
        # Process 0 answers when all are there, at its own deadline at the latest.
        answer = _read_line(connection, deadline + 10)
    if not isinstance(answer, dict):
        raise ConfigurationError(
            f"coordinator {host}:{port}",
            found="a connection that ended without an answer",
            expected="process 0 of this run",
            remedy="look at the log of process 0; something else may use the port",
        )
    if fault := answer.get("fault"):
        raise ConfigurationError(fault.pop("where"), **fault)


def _send_line(connection: socket.socket, words: Any) -> None:
    # One that is gone says why in its own log.
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(words).encode() + b"\n")


def _read_line(connection: socket.socket, deadline: float) -> Any:
    """One line of JSON, or None."""
    received = b""
    try:
        while not received.endswith(b"\n"):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(4096)
            received += chunk
            if not chunk or len(received) > _MAX_BYTES:
                return None
        return json.loads(received)
    except (OSError, ValueError):
        return None
