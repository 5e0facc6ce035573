"""The tests of meshes against one device, in float64, on the devices that are here."""

import re
import subprocess
import sys

from multi_benchmarks.session import Session

_RESULT = re.compile(r"::(.+?) (PASSED|FAILED|ERROR|SKIPPED)")
# In shapes for a CPU one test that compiles next to nothing stands for all.
_TINY = ["-k", "initial_state or no_gradient_of_a_frozen or does_not_exist"]


def run(session: Session, name: str, *, file: str) -> None:
    """Report each test as it ends: those behind one that hangs are lost, those before it are not."""
    workers = ["-n", "0"] if session.is_tiny else ["-n", "3", "--dist", "worksteal"]
    chosen = _TINY if session.is_tiny else ["--gpu", "--slow", "-m", "mesh or multigpu"]
    command = ["nice", sys.executable, "-m", "pytest", "-v", "--color=no", *workers, *chosen, file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        for line in child.stdout or ():
            print(line, end="", flush=True)
            if (test := read_result(line)) is not None:
                session.report(test=test[0], result=test[1])
    # 5: no test was chosen.
    if child.returncode not in (0, 5):
        raise SystemExit(f"pytest ended with {child.returncode}")


def read_result(line: str) -> tuple[str, str] | None:
    """Name and result of a test from a line of `pytest -v`, which workers of xdist write the other way round."""
    found = _RESULT.search(line) or re.search(r"(PASSED|FAILED|ERROR|SKIPPED) \S*?::(.+)", line)
    if found is None:
        return None
    groups = found.groups()
    name, result = groups if found.re is _RESULT else groups[::-1]
    return name.strip(), result.lower()
