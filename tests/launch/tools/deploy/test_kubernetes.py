"""Rendered objects, held against Kubernetes' own schemas, ours for JobSet, and what they must say."""

import json
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from configs import overrides
from launch.tools.deploy import kubernetes
from launch.tools.deploy.deployment import Deployment, deploy
from tests.launch.tools.deploy.cases import ALL, KUBERNETES, config, gpus_alone, one_node, settings, trial, v5p_and_h100
from tests.launch.tools.deploy.command_lines import parse
from tests.launch.tools.deploy.crds import JOBSET

VERSION = "1.33.0"


def objects(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """All rendered objects by kind and name."""
    found = [o for text in kubernetes.render(deployment).values() for o in yaml.safe_load_all(text)]
    by_name = {f"{o['kind']}/{o['metadata']['name']}": o for o in found}
    assert len(by_name) == len(found)
    return by_name


def pod(found: dict[str, Any]) -> dict[str, Any]:
    """The pod's spec in a JobSet, Job or Deployment."""
    spec = found["spec"]
    if found["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]["spec"]


def pods(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """The pods' specs by their container's name."""
    found = [pod(o) for o in objects(deployment).values() if o["kind"] in ("JobSet", "Job", "Deployment")]
    return {p["containers"][0]["name"]: p for p in found}


def environment(spec: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in spec["containers"][0]["env"]}


def _filled_in(argument: str, values: dict[str, str]) -> str:
    """As the node hands it on."""
    for name, value in values.items():
        argument = argument.replace(name, value)
    return argument


def check_jobset(found: dict[str, Any]) -> None:
    """By our schema, its job and pod by Kubernetes'."""
    jsonschema.validate(found, JOBSET)
    (job,) = found["spec"]["replicatedJobs"]
    as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job["template"]["spec"]}
    kubernetes_validate.validate(as_job, VERSION, strict=True)


@pytest.mark.parametrize("case", ALL)
def test_rendered_objects_are_what_the_schemas_want(case):
    for found in objects(ALL[case]()).values():
        if found["kind"] == "JobSet":
            check_jobset(found)
        else:
            kubernetes_validate.validate(found, VERSION, strict=True)
        if found["kind"] in ("JobSet", "Job", "Deployment"):
            template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod(found)}
            kubernetes_validate.validate(template, VERSION, strict=True)


@pytest.mark.parametrize(
    "breaking",
    [
        lambda o: o["spec"].update(failurePolicies={}),
        lambda o: o["spec"]["failurePolicy"]["rules"][0].update(action="FailJob"),
        lambda o: o["spec"]["replicatedJobs"][0]["template"]["spec"].update(parallel=16),
        lambda o: pod(o)["containers"][0].update(livenessprobe={}),
    ],
)
def test_schemas_refuse_a_jobset_with_a_wrong_field(breaking):
    found = objects(v5p_and_h100())["JobSet/tpu-v5p-64"]
    check_jobset(found)
    breaking(found)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_jobset(found)


@pytest.mark.heavy
@pytest.mark.parametrize("case", ALL)
def test_rendered_commands_are_ones_that_the_programs_take(case):
    for name, spec in pods(ALL[case]()).items():
        (container,) = spec["containers"]
        assert container["command"] == ["tini", "--", "python"]
        values = {"$(SLUICE_PROCESS_ID)": "15", "$(SLUICE_NAME)": "run-actors-6c5d8-xk2lp"}
        given = parse([_filled_in(argument, values) for argument in container["args"]])
        assert set(given) <= {"publish.advertise"}, name
        for probe in ("livenessProbe", "readinessProbe"):
            if probe in container:
                python, *arguments = container[probe]["exec"]["command"]
                assert python == "python" and arguments[:2] == ["-m", "launch.supervision.kubernetes_probe"]
                parse(arguments)


def test_names_that_yaml_reads_as_something_else_stay_text():
    wanted = config("tiny", model__path="", prompts__path="", run__name="true")
    more = {"namespace": "123", "storage_claim": "1.5", "service_account": "null", "mount": "/a b #'\"\u00e9\U0001f600"}
    on_cpus = settings(KUBERNETES, learner="cpu", actors="cpu", num_params=0.0, **more)
    found = objects(deploy(wanted, on_cpus))
    for one in found.values():
        assert one["metadata"]["namespace"] == "123"
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "true"
    spec = pod(found["JobSet/true"])
    assert spec["serviceAccountName"] == "null"
    assert {"name": "storage", "persistentVolumeClaim": {"claimName": "1.5"}} in spec["volumes"]
    assert {"name": "storage", "mountPath": more["mount"]} in spec["containers"][0]["volumeMounts"]


def test_slice_of_64_v5p_chips_is_16_hosts_that_start_and_fail_together():
    jobset = objects(v5p_and_h100())["JobSet/tpu-v5p-64"]
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    spec = job["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (16, 16, 0)
    assert spec["completionMode"] == "Indexed"
    one = pod(jobset)
    assert one["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    asked = one["containers"][0]["resources"]
    assert asked["requests"]["google.com/tpu"] == asked["limits"]["google.com/tpu"] == "4"
    arguments = one["containers"][0]["args"]
    assert "--num_processes=16" in arguments and "--process_id=$(SLUICE_PROCESS_ID)" in arguments
    # JobSet's names: <jobset>-<job>-<index>-<pod index>.<subdomain>
    assert "--coordinator=tpu-v5p-64-learner-0-0.tpu-v5p-64.default.svc:8476" in arguments
    assert jobset["spec"]["network"]["subdomain"] == "tpu-v5p-64"
    assert jobset["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_actors_are_a_deployment_of_a_gpu_each_under_their_pods_name():
    actors = objects(v5p_and_h100())["Deployment/tpu-v5p-64-actors"]
    assert actors["spec"]["replicas"] == 32
    one = pod(actors)
    assert one["restartPolicy"] == "Always"
    assert one["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert one["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert environment(one)["SLUICE_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert "--name=$(SLUICE_NAME)" in one["containers"][0]["args"]


def test_longest_name_of_a_run_leaves_room_for_what_jobset_and_the_network_make_of_it():
    name = "r" * 40
    made = config(run__name=name, actor__num_engines=2)
    jobset = objects(deploy(made, settings(KUBERNETES, learner="v5p", actors="h100")))[f"JobSet/{name}"]
    (job,) = jobset["spec"]["replicatedJobs"]
    host = f"{name}-{job['name']}-0-{job['template']['spec']['completions'] - 1}"
    labels = [host, jobset["spec"]["network"]["subdomain"]]
    if "coordinator" in jobset["spec"]:  # JobSet gives each pod a label with this one's name in full
        labels.append(f"{name}-{job['name']}-0-0.{jobset['spec']['network']['subdomain']}")
    assert [label for label in labels if len(label) > 63] == []


def test_learner_on_gpus_takes_whole_hosts_and_actors_as_many_as_an_engine_wants():
    found = pods(gpus_alone())
    assert found["learner"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "--num_processes=2" in found["learner"]["containers"][0]["args"]
    assert found["actor"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_pods_with_gpus_find_the_driver_where_gke_mounts_it():
    path = "/usr/local/nvidia/lib64"
    found = {**pods(gpus_alone()), **pods(one_node())}
    assert {role: environment(spec)["LD_LIBRARY_PATH"] for role, spec in found.items()} == dict.fromkeys(
        ("learner", "actor", "node"), path
    )
    assert "LD_LIBRARY_PATH" not in environment(pods(v5p_and_h100())["learner"])
    assert "LD_LIBRARY_PATH" not in environment(pods(v5p_and_h100(node_labels="nvidia"))["actor"])


def test_one_node_is_one_pod_that_runs_launch_local_without_secrets():
    found = pods(one_node())
    assert set(found) == {"node"}
    assert found["node"]["containers"][0]["args"] == ["-m", "launch.local", "--config=/etc/sluice/config.json"]
    assert found["node"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert not [v for v in found["node"]["volumes"] if "secret" in v]


@pytest.mark.parametrize("case", ALL)
def test_every_pod_is_without_rights(case):
    for spec in pods(ALL[case]()).values():
        assert spec["automountServiceAccountToken"] is False
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == security["fsGroup"] == 10001
        own = spec["containers"][0]["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
        assert own["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("case", ["v5p-and-h100", "gpus-alone", "trial", "trial-of-hosts"])
def test_secrets_are_named_and_each_role_has_its_own_alone(case):
    deployment = ALL[case]()
    text = json.dumps(kubernetes.render(deployment))
    assert "password" not in deployment.config.store.url and "BEGIN" not in text
    found, run = pods(deployment), deployment.run
    secrets = {r: {v["secret"]["secretName"] for v in s["volumes"] if "secret" in v} for r, s in found.items()}
    assert secrets == {"learner": {run, f"{run}-tls"}, "actor": {run}}
    for role, spec in found.items():
        variables = environment(spec)
        assert variables["PGPASSWORD"] == {"secretKeyRef": {"name": f"{run}-{role}", "key": "password"}}
        mounts = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"]]
        for name in ("SLUICE_TOKEN_FILE", "SLUICE_TLS_CA", "PGSSLROOTCERT"):
            assert any(variables[name].startswith(f"{mount}/") for mount in mounts)
        assert ("SLUICE_TLS_KEY" in variables) == (role == "learner")
    for volume in (v for s in found.values() for v in s["volumes"] if "secret" in v):
        assert volume["secret"]["defaultMode"] & 0o007 == 0


@pytest.mark.parametrize("case", ALL)
def test_every_mount_has_its_volume_and_every_volume_its_mount(case):
    for spec in pods(ALL[case]()).values():
        mounts = [m["name"] for m in spec["containers"][0]["volumeMounts"]]
        assert sorted(mounts) == sorted(v["name"] for v in spec["volumes"]) and len(set(mounts)) == len(mounts)


def test_config_map_holds_the_very_config_that_the_learner_reads():
    deployment = v5p_and_h100()
    data = objects(deployment)["ConfigMap/tpu-v5p-64"]["data"]
    assert overrides.from_dict(json.loads(data["config.json"])) == deployment.config
    assert "config.json: |" in kubernetes.render(deployment)["run.yaml"]


def test_shared_memory_and_graces_are_the_deployments():
    deployment = v5p_and_h100()
    found = pods(deployment)
    sizes = {"learner": deployment.learner_shm_gib, "actor": deployment.actor_shm_gib}
    graces = {"learner": deployment.learner_grace_s, "actor": deployment.actor_grace_s}
    for role, spec in found.items():
        (shm,) = [v["emptyDir"] for v in spec["volumes"] if v["name"] == "shm"]
        assert shm == {"medium": "Memory", "sizeLimit": f"{sizes[role]}Gi"}
        assert spec["terminationGracePeriodSeconds"] == graces[role]
        assert spec["containers"][0]["livenessProbe"]["terminationGracePeriodSeconds"] < graces[role]


def test_budgets_select_the_pods_of_their_role():
    found = objects(gpus_alone())
    for role, owner in (("learner", "JobSet/tpu-v5p-64"), ("actor", "Deployment/tpu-v5p-64-actors")):
        wanted = found[f"PodDisruptionBudget/tpu-v5p-64-{role}"]["spec"]["selector"]["matchLabels"]
        spec = found[owner]["spec"]
        if "replicatedJobs" in spec:
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        assert wanted.items() <= spec["template"]["metadata"]["labels"].items()
    assert found["PodDisruptionBudget/tpu-v5p-64-learner"]["spec"]["minAvailable"] == 2


def test_weights_through_a_bucket_need_no_certificate():
    wanted = config(publish__serve="none", publish__bucket="s3://bucket/weights")
    deployment = deploy(wanted, settings(KUBERNETES, learner="v5p", actors="h100"))
    spec = pods(deployment)["learner"]
    assert "SLUICE_TLS_KEY" not in environment(spec)
    assert not [a for a in spec["containers"][0]["args"] if "advertise" in a]
    assert [p["name"] for p in spec["containers"][0]["ports"]] == ["coordinator", "tpu"]


def test_trial_on_cpus_asks_for_no_accelerator():
    for spec in pods(trial()).values():
        assert "nodeSelector" not in spec
        assert set(spec["containers"][0]["resources"]["limits"]) == {"memory"}
