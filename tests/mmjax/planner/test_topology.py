"""Clusters from text, YAML and real machines: copies of public reports, names replaced, some columns left out."""

from pathlib import Path

import numpy as np
import pytest

from mmjax.errors import ConfigurationError
from mmjax.planner.hardware import GPUS, find_gpu
from mmjax.planner.machine import Machine, Nic, discover, parse_gpus, parse_matrix, parse_nics, read_nics
from mmjax.planner.topology import bandwidth_matrix, cluster_graph, machine_cluster, machine_graph, read_cluster

MACHINES = Path(__file__).parent / "machines"


def machine(name: str) -> Machine:
    return parse_matrix((MACHINES / f"{name}.txt").read_text(encoding="utf-8"))


# File, GPUs, NVLinks of GPU0 to GPU1, link of GPU0 to the last GPU, cards, card nearest to GPU0 and to the last GPU.
@pytest.mark.parametrize(
    ("name", "num_gpus", "nvlinks", "last", "num_nics", "nearest"),
    [
        ("dgx_a100", 8, 12, "NV12", 12, ("mlx5_0", "mlx5_9")),
        ("dgx_h100", 8, 18, "NV18", 12, ("NIC0", "NIC11")),
        ("h200", 8, 18, "NV18", 8, ("mlx5_4", "mlx5_2")),
        ("b200", 8, 18, "NV18", 8, ("NIC0", "NIC7")),
        ("b200_one_without_nvlink", 8, 18, "NV18", 0, (None, None)),
        ("dgx1_v100", 8, 1, "NV2", 2, ("mlx5_0", "mlx5_1")),
        ("pcie_8_p40_old_driver", 8, 0, "PXB", 1, ("mlx5_0", "mlx5_0")),
        ("pcie_4_gpus", 4, 0, "SYS", 4, ("NIC0", "NIC3")),
        ("pcie_6_gpus_underlined", 6, 0, "SYS", 0, (None, None)),
        ("one_h100_pcie", 1, None, "X", 1, ("mlx5_0", "mlx5_0")),
    ],
)
def test_real_matrices_are_read(name, num_gpus, nvlinks, last, num_nics, nearest):
    found = machine(name)
    assert len(found.gpus) == num_gpus and len(found.nic_links) == num_nics
    assert found.links[0][-1] == last
    if nvlinks is not None:
        assert found.nvlinks()[0][1] == nvlinks
    assert (found.nearest_nics()[0], found.nearest_nics()[-1]) == nearest


def test_every_gpu_of_an_h200_node_has_a_card_of_its_own():
    nearest = machine("h200").nearest_nics()
    assert [int(name.removeprefix("mlx5_")) for name in nearest] == [4, 1, 0, 3, 6, 7, 5, 2]


def test_a_gpu_without_its_nvlinks_is_named_and_slows_the_whole_machine():
    broken = machine("b200_one_without_nvlink")
    assert broken.faults() == ["GPU2 has 0 NVLinks to others, most GPUs here have 108"]
    assert machine("b200").faults() == machine("pcie_4_gpus").faults() == machine("dgx1_v100").faults() == []
    matrix = bandwidth_matrix(machine_graph(broken, find_gpu("b200")))
    # 18 links of 50 GB/s at 80 %; half of PCIe's 50 GB/s between sockets.
    assert matrix[0, 1] == 720e9 and matrix[2, 7] == 25e9 and matrix[2, 2] == 0
    names = Machine(gpus=("NVIDIA B200",) * 8, links=broken.links, nic_links=broken.nic_links)
    assert machine_cluster(names).inside.bandwidth == find_gpu("b200").pcie_bandwidth


def test_no_gpu_is_a_machine_without_gpus():
    def no_tools(command):
        raise FileNotFoundError(command[0])

    assert discover(no_tools, Path("/nonexistent")).gpus == ()
    assert discover(lambda _: "No devices were found\n", Path("/nonexistent")).gpus == ()
    with pytest.raises(ConfigurationError, match="--cluster 8xh200"):
        machine_cluster(Machine(gpus=(), links=()))


def test_a_whole_machine_is_discovered(tmp_path):
    for card, state, rate in [("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "10 Gb/sec (4X)")]:
        port = tmp_path / "class" / "infiniband" / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(rate + "\n")
    outputs = {
        "--query-gpu=index,name": "".join(f"{index}, NVIDIA H200\n" for index in range(8)),
        "topo": (MACHINES / "h200.txt").read_text(),
    }
    found = discover(lambda command: outputs[command[1]], tmp_path)
    assert found.nics == (Nic(name="mlx5_0", is_up=True, gigabits=400), Nic(name="mlx5_1", is_up=False, gigabits=10))
    assert found.faults() == ["mlx5_1 is down"] and found.working_nics == ("mlx5_0",)
    cluster = machine_cluster(found, nodes=2)
    assert cluster.name == "2x8xh200"
    # One card of 50 GB/s for 8 GPUs, at 80 %.
    assert cluster.between.bandwidth == pytest.approx(5e9)


def test_card_listings_of_two_tools():
    devinfo = "hca_id:\tmlx5_0\n\ttransport:\t\tInfiniBand (0)\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_DOWN (1)\n"
    devinfo += "\nhca_id:\tmlx5_1\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n"
    rdma = "link mlx5_0/1 state DOWN physical_state POLLING netdev p1p1 \nlink mlx5_1/1 state ACTIVE netdev p1p2 \n"
    for text in (devinfo, rdma):
        assert [(nic.name, nic.is_up) for nic in parse_nics(text)] == [("mlx5_0", False), ("mlx5_1", True)]
    assert read_nics(Path("/nonexistent")) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: (MACHINES / "h100_columns_run_together.txt").read_text(), "NODENODE"),
        (lambda text: text.replace("GPU3\tNV18", "GPX3\tNV18"), "no row of GPU3"),
        (lambda text: text[: text.index("GPU5\tNV18") + 30], "row of GPU5 cut short"),
        (lambda text: text.replace("GPU1\tNV18", "GPU1\tNV17"), "NV17 from GPU1 to GPU0, NV18 back"),
        (lambda text: text.replace("GPU1\tNV18", "GPU1\tFOO"), "'FOO' in the row of GPU1"),
        (lambda text: text.replace("NIC7\tCPU", "NIC7CPU"), "'NIC7CPU' in the header"),
    ],
)
def test_damaged_matrices_are_refused(change, message):
    text = change((MACHINES / "h200.txt").read_text())
    with pytest.raises(ConfigurationError, match=message):
        parse_matrix(text)


def test_a_lost_gpu_is_an_error():
    with pytest.raises(ConfigurationError, match="reset or remove"):
        parse_gpus("0, NVIDIA H200\nUnable to determine the device handle for GPU 0000:02:00.0: GPU is lost.\n")
    with pytest.raises(ConfigurationError, match="7, as nvidia-smi lists"):
        parse_matrix((MACHINES / "h200.txt").read_text(), ["NVIDIA H200"] * 7)


def test_drivers_names_find_the_gpu():
    names = {
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA H20": "h20",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
    }
    assert {name: find_gpu(name).name for name in names} == names
    with pytest.raises(ConfigurationError, match="did you mean 'h100'"):
        find_gpu("h1000")


def test_a_short_text_describes_a_cluster():
    cluster = read_cluster("16x8xh200")
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.num_devices) == (16, 8, 128)
    assert cluster.gpu == GPUS["h200"]
    # 18 links of 25 GB/s, and 400 Gbit/s for each GPU, both at 80 %.
    assert cluster.inside.bandwidth == pytest.approx(360e9) and cluster.between.bandwidth == pytest.approx(40e9)
    assert read_cluster("8xh200").num_nodes == 1 and read_cluster("h200").num_devices == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16x8", "16x8xh200"),
        ("0x8xh200", "0 nodes of 8 GPUs"),
        ("16x8xh201", "did you mean"),
        ("999999x9999xh200", "at most"),
    ],
)
def test_impossible_texts_are_refused(text, message):
    with pytest.raises(ConfigurationError, match=message):
        read_cluster(text)


def test_yaml_describes_a_cluster_and_its_contradictions(tmp_path):
    path = tmp_path / "cluster.yaml"

    def read(text: str):
        path.write_text(text)
        return read_cluster(str(path))

    base = "nodes: 4\ngpus_per_node: 4\ngpu: a100\n"
    assert read(base + "nics_per_node: 2\nnic_gigabits: 200\n").between.bandwidth == pytest.approx(0.8 * 12.5e9)
    for more, message in {
        "total_gpus: 8": "total_gpus 16",
        "nics_per_node: 0": "a link between the nodes",
        "nodez: 3": "nodez",
        "gpu: [1]": "gpu as str",
        "nodes: [": "readable YAML",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            read(base + more)
    with pytest.raises(ConfigurationError, match="no NVLink"):
        read("nodes: 1\ngpus_per_node: 2\ngpu: l40s\nnvlink_gigabytes: 100\n")
    with pytest.raises(ConfigurationError, match="No such file"):
        read_cluster(str(tmp_path / "missing.yaml"))


def test_the_widest_way_inside_a_node_is_nvlink_and_between_nodes_the_network():
    cluster = read_cluster("2x2xh200")
    matrix = bandwidth_matrix(cluster_graph(cluster))
    inside, between = cluster.inside.bandwidth, cluster.between.bandwidth
    expected = np.array(
        [[0, inside, between, between], [inside, 0, between, between]] + [[between, between, 0, inside]] * 2
    )
    expected[3] = [between, between, inside, 0]
    np.testing.assert_allclose(matrix, expected)
