"""Processes that meet on loopback, and those that cannot."""

import socket
import threading
import time

from mmjax.errors import ConfigurationError
from mmjax.parallel.launch import Placement
from mmjax.parallel.roll_call import meet


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run(processes: list[tuple[int, int, dict[str, str]]], timeout: float = 10, port: int = 0) -> list[str]:
    """What each (index, count, identity) is told: an empty text where all is well."""
    port = port or free_port()
    told = [""] * len(processes)

    def one(number: int, index: int, count: int, identity: dict[str, str]) -> None:
        placement = Placement(
            coordinator=f"127.0.0.1:{port}", num_processes=count, process_index=index, local_devices=None, origins={}
        )
        try:
            meet(placement, identity, timeout)
        except ConfigurationError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=one, args=(number, *process)) for number, process in enumerate(processes)]
    for thread in reversed(threads):
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return told


def test_processes_that_agree_all_go_on():
    assert run([(index, 4, {"jax": "1"}) for index in range(4)]) == [""] * 4


def test_a_missing_process_is_named_to_all_others():
    told = run([(0, 4, {}), (1, 4, {}), (3, 4, {})], timeout=1)
    assert all("no process 2 of 4" in text for text in told)


def test_a_process_that_differs_is_named_with_what_differs():
    told = run([(0, 3, {"settings": "a"}), (1, 3, {"settings": "b"}), (2, 3, {"settings": "a"})])
    assert all("process 1" in text and "settings" in text for text in (told[0], told[1]))


def test_another_world_size_is_refused():
    told = run([(0, 2, {}), (1, 3, {})])
    assert all("3 processes" in text for text in told)


def test_an_index_that_is_there_twice_is_refused():
    told = run([(0, 3, {}), (1, 3, {}), (1, 3, {})])
    assert all("second process" in text for text in told)


def test_a_port_in_use_and_an_absent_coordinator_are_told():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        assert "in use" in run([(0, 2, {})], port=port)[0]
    assert "process 0 to answer" in run([(1, 2, {})], timeout=0.5)[0]
