"""The files in launch/: shell that parses, and Kubernetes objects that fit together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvps.hosts import read_hostfile
from hvps.task_cluster import read_jobs
from tests.launching import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.rglob("*.sh")), ROOT / "tools" / "container.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    shell = script.read_text().splitlines()[0].split("/")[-1].split()[-1]
    subprocess.run([shell, "-n", script], check=True, timeout=20)


@pytest.mark.parametrize("name", ["mpirun.sh", "horovodrun.sh", "ps_cluster.sh"])
def test_help(name: str) -> None:
    done = subprocess.run(
        [LAUNCH / name, "-h"], capture_output=True, text=True, check=True, timeout=20
    )
    assert f"launch/{name}" in done.stdout
    assert "set -euo" not in done.stdout


def test_an_argument_is_missing() -> None:
    done = subprocess.run(
        [LAUNCH / "ps_cluster.sh", "a", "b"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2
    assert "received: a b" in done.stderr


def test_the_example_of_a_hostfile() -> None:
    hosts = read_hostfile(str(LAUNCH / "hostfile.example"))
    assert [(host.name, host.slots) for host in hosts] == [("node1", 4), ("node2", 4)]


def objects(name: str) -> dict[str, Any]:
    text = (LAUNCH / "k8s" / name).read_text()
    return {f"{o['kind']}/{o['metadata']['name']}": o for o in yaml.safe_load_all(text)}


def test_parameter_servers_on_kubernetes_fit_together() -> None:
    found = objects("ps.yaml")
    numbers = found["ConfigMap/hvps-cluster"]["data"]
    ps, workers = found["StatefulSet/hvps-ps"]["spec"], found["Job/hvps-worker"]["spec"]
    service = found["Service/hvps-ps"]
    assert ps["replicas"] == int(numbers["NUM_PS"])
    assert workers["completions"] == workers["parallelism"] == int(numbers["NUM_WORKERS"])
    assert workers["completionMode"] == "Indexed"
    # Pods have names of their own only under a headless service that they name.
    assert service["spec"]["clusterIP"] == "None"
    assert ps["serviceName"] == workers["template"]["spec"]["subdomain"] == "hvps-ps"
    policy = objects("networkpolicy.yaml")["NetworkPolicy/hvps-ps"]["spec"]
    for template in (ps["template"], workers["template"]):
        labels = template["metadata"]["labels"].items()
        assert service["spec"]["selector"].items() <= labels
        assert policy["podSelector"]["matchLabels"].items() <= labels
        (container,) = template["spec"]["containers"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (port,) = policy["ingress"][0]["ports"]
    assert port["port"] == container["ports"][0]["containerPort"]


@pytest.mark.parametrize(("role", "index"), [("ps", "hvps-ps-1"), ("worker", "2")])
def test_a_task_on_kubernetes_knows_its_place(tmp_path: Path, role: str, index: str) -> None:
    data = objects("ps.yaml")["ConfigMap/hvps-cluster"]["data"]
    (tmp_path / "task.py").write_text(data["task.py"])
    shown = tmp_path / "python"  # stands first on PATH, where the task's program is looked for
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$TF_CONFIG" "$*"\n')
    shown.chmod(0o755)
    env = {**os.environ, "NUM_PS": data["NUM_PS"], "NUM_WORKERS": data["NUM_WORKERS"]}
    done = subprocess.run(
        [sys.executable, tmp_path / "task.py", role, index, "configs/ps.yaml", "run.name=a"],
        env={**env, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    config, arguments = done.stdout.splitlines()
    assert arguments == "-m hvps.train configs/ps.yaml run.name=a"
    content = json.loads(config)
    task = content["task"]
    place = read_jobs(content["cluster"]).place(task["type"], task["index"])
    assert place == ((role, 1, 2) if role == "ps" else (role, 2, 3))
    peers = data["HVPS_PEERS"].split()
    addresses = [address for job in ("ps", "worker") for address in content["cluster"][job]]
    assert [f"{peer}:3333" for peer in peers] == addresses


def test_ranks_on_kubernetes() -> None:
    spec = objects("mpijob.yaml")["MPIJob/hvps-allreduce"]["spec"]
    replicas = spec["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    ranks = launcher["args"][launcher["args"].index("-np") + 1]
    assert int(ranks) == spec["slotsPerWorker"] * replicas["Worker"]["replicas"]
    peers = launcher["env"][0]["value"].split(", ")
    assert len(peers) == replicas["Worker"]["replicas"]
