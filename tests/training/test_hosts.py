"""Processes on two hosts prune as one process does. Network namespaces stand for the hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.processes import NETWORK
from tests.system.test_distributed import assert_alike, masks

pytestmark = pytest.mark.slow
ADDRESSES = ("10.213.77.1", "10.213.77.2")
WORDS = ["-m", "lobs", "prune", "mine:network", "--keep", "30%", "--out"]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Two namespaces joined by a cable, each as (name, device); removed afterwards."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command `ip` (iproute2)")
    names = [f"lobs-{os.getpid()}-{number}" for number in range(2)]
    ends = [(name, f"cable{number}") for number, name in enumerate(names)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            (left, one), (right, other) = ends
            ip(
                "link",
                "add",
                one,
                "netns",
                left,
                "type",
                "veth",
                "peer",
                "name",
                other,
                "netns",
                right,
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        for (name, device), address in zip(ends, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield ends
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start(host, folder, *words, **variables):
    name, device = host
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device, **variables}
    command = ["ip", "netns", "exec", name, sys.executable, *words]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def beside(tmp_path):
    """A folder for each host and one for the truth, each with the network's file in it."""
    folders = [tmp_path / name for name in ("first", "second", "alone")]
    for folder in folders:
        folder.mkdir()
        (folder / "mine.py").write_text(NETWORK)
    return folders


def test_torchrun_on_two_hosts_prunes_as_one_process_does(tmp_path, hosts):
    first, second, alone = folders = beside(tmp_path)
    members = []
    for rank, (host, folder) in enumerate(zip(hosts, folders, strict=False)):
        launch = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--node-rank",
            str(rank),
        ]
        launch += ["--master-addr", ADDRESSES[0], "--master-port", "29533"]
        members.append(start(host, folder, *launch, *WORDS, "out", "--resume", "run_store"))
    said = [member.communicate(timeout=300) for member in members]
    assert [member.returncode for member in members] == [0, 0], said
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *WORDS, "out"], cwd=alone, env=env, check=True, capture_output=True
    )
    assert_alike(masks(alone / "out"), masks(first / "out"))
    assert not {"out", "run_store"} & {
        path.name for path in second.iterdir()
    }  # only the first process writes


def test_a_cut_cable_ends_both_hosts_in_one_line_after_the_time_out(tmp_path, hosts):
    folders, members = beside(tmp_path), []
    for rank, (host, folder) in enumerate(zip(hosts, folders, strict=False)):
        where = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29534",
        }
        members.append(
            start(host, folder, *WORDS, "out", "--resume", "run_store", "--time-out", "20", **where)
        )
    while not (folders[0] / "run_store" / "calibration.safetensors").exists():
        assert all(member.poll() is None for member in members), [
            member.communicate() for member in members
        ]
        time.sleep(0.001)
    ip("-n", hosts[0][0], "link", "set", hosts[0][1], "down")
    told = [member.communicate(timeout=120)[1].splitlines() for member in members]
    assert [member.returncode for member in members] == [1, 1]
    for lines in told:  # lines of progress begin with the seconds that have passed
        rest = [line for line in lines if not line.startswith("[")]
        assert len(rest) == 1 and rest[0].startswith("error: process "), lines
        assert "has lost another" in rest[0]
