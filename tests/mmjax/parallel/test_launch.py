"""Environments of launchers as they set them, and what comes of those that contradict each other."""

import pytest

from mmjax.errors import ConfigurationError
from mmjax.parallel.launch import LaunchOptions, first_host, resolve

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-18]",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "1(x16)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "5",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def test_nothing_around_is_one_process():
    assert resolve(LaunchOptions(), {"PATH": "/bin"}) is None


def test_one_slurm_task_per_node_uses_all_devices_of_the_node():
    placement = resolve(LaunchOptions(), SLURM)
    assert placement is not None
    assert (placement.num_processes, placement.process_index, placement.local_devices) == (16, 5, None)
    assert placement.coordinator.startswith("gpu03:")
    assert placement.origins["process_index"] == "SLURM_PROCID"


def test_jobs_on_one_host_get_ports_of_their_own():
    placements = [resolve(LaunchOptions(), SLURM | {"SLURM_JOB_ID": str(job)}) for job in (4242, 4242 + 4096)]
    ports = {placement.coordinator for placement in placements if placement is not None}
    assert len(ports) == 2


def test_several_slurm_tasks_of_a_node_share_its_devices():
    tasks = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,8(x15)", "SLURM_LOCALID": "3"}
    placement = resolve(LaunchOptions(), tasks)
    assert placement is not None and placement.local_devices == (3,)
    half = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x8)", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    placement = resolve(LaunchOptions(), half)
    assert placement is not None and placement.local_devices == (2, 3)
    bound = tasks | {"CUDA_VISIBLE_DEVICES": "6"}
    placement = resolve(LaunchOptions(), bound)
    assert placement is not None and placement.local_devices is None


def test_a_slurm_script_without_srun_is_refused_rather_than_run_once():
    script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}
    with pytest.raises(ConfigurationError, match="srun"):
        resolve(LaunchOptions(), script)
    assert resolve(LaunchOptions(launcher="none"), script) is None
    assert resolve(LaunchOptions(), script | {"SLURM_NTASKS": "1"}) is None


def test_open_mpi_4_tells_the_coordinator_and_5_must_be_told():
    four = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "123.0;tcp://10.1.2.3,192.168.0.1:40001"}
    placement = resolve(LaunchOptions(), four)
    assert placement is not None
    assert (placement.coordinator, placement.num_processes, placement.process_index) == ("10.1.2.3:8476", 16, 9)
    assert placement.local_devices == (1,)
    with pytest.raises(ConfigurationError, match=r"--launch\.coordinator"):
        resolve(LaunchOptions(), OPEN_MPI)
    told = resolve(LaunchOptions(coordinator="node0:9000"), OPEN_MPI)
    assert told is not None and told.coordinator == "node0:9000"
    alone = resolve(LaunchOptions(), OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "16"})
    assert alone is not None and alone.coordinator == "127.0.0.1:8476"


def test_a_kubernetes_job_takes_its_index_from_the_pod_and_the_rest_from_the_manifest():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
    with pytest.raises(ConfigurationError, match="num_processes"):
        resolve(LaunchOptions(), pod)
    manifest = {"JAX_COORDINATOR_ADDRESS": "run-0.run", "JAX_COORDINATOR_PORT": "1234", "JAX_NUM_PROCESSES": "4"}
    placement = resolve(LaunchOptions(), pod | manifest)
    assert placement is not None
    assert (placement.coordinator, placement.num_processes, placement.process_index) == ("run-0.run:1234", 4, 3)


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (LaunchOptions(num_processes=3), SLURM, "3 from --launch.num-processes; 16 from SLURM"),
        (LaunchOptions(), SLURM | OPEN_MPI, "process_index"),
        (LaunchOptions(), {"JAX_NUM_PROCESSES": "2"} | SLURM, "JAX_NUM_PROCESSES"),
        (LaunchOptions(coordinator="a:1", num_processes=2, process_index=2), {}, "0 to 1"),
        (LaunchOptions(coordinator="a:1", num_processes=2), {}, "process_index"),
        (LaunchOptions(coordinator="a:b", num_processes=2, process_index=0), {}, "host:port"),
        (LaunchOptions(coordinator="a:1", num_processes=2, process_index=0, local_devices="0;1"), {}, "0,1"),
        (LaunchOptions(launcher="slurm"), OPEN_MPI, "slurm"),
        (LaunchOptions(), SLURM | {"SLURM_PROCID": "x"}, "whole number"),
        (LaunchOptions(), SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "list like"),
        (LaunchOptions(), SLURM | {"SLURM_STEP_NODELIST": "gpu[03"}, "node list"),
    ],
)
def test_what_does_not_fit_together_is_refused_and_its_places_are_named(options, environment, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(options, environment)


def test_a_named_launcher_settles_a_conflict():
    placement = resolve(LaunchOptions(launcher="open_mpi", coordinator="n:1"), SLURM | OPEN_MPI)
    assert placement is not None and placement.process_index == 9


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("gpu[03-18]", "gpu03"),
        ("rack[1-2]-node[01-04,07],login1", "rack1-node01"),
        ("a,b[1-3]", "a"),
        ("c[7,9]", "c7"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes, host):
    assert first_host(nodes) == host
