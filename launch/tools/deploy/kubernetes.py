"""Kubernetes objects of a deployment."""

from typing import Any

import yaml

from configs.overrides import to_json
from launch import cli
from launch.tools.deploy import deployment as deploy_deployment
from launch.tools.deploy.deploy_settings import (
    CONFIG,
    COORDINATOR_PORT,
    GKE_GPU,
    SCRATCH,
    SECRETS,
    SHM,
    TPU_PORT,
    DeploySettings,
    Hosts,
)
from launch.tools.deploy.deployment import Deployment, HangTimeouts

Json = dict[str, Any]
PULSE = f"{SHM}/sluice-pulse"
_PROBE_S, _PROBE_TIMEOUT_S, _PROBE_FAILURES = 20, 15, 3
_KILL_GRACE_S = 10
"""Of a process that hangs: it saves nothing any more."""
_EPHEMERAL = "20Gi"
_GKE_DRIVER = "/usr/local/nvidia/lib64"
"""Where GKE mounts the driver's libraries; pods name it in LD_LIBRARY_PATH, says
cloud.google.com/kubernetes-engine/docs/how-to/gpus. NVIDIA's container runtime puts them where they are found."""
INDEX = "SLUICE_PROCESS_ID"


def learner_pod(deployment: Deployment) -> Json:
    """One host of the learner; it is not started again by itself, since all start together."""
    name, settings = deployment.run, deployment.settings
    domain = f"{name}.{settings.namespace}.svc"
    arguments = deploy_deployment.learner(
        deployment,
        config=f"{CONFIG}/config.json",
        address=f"{name}-learner-0-{{process_id}}.{domain}",
        coordinator=f"{name}-learner-0-0.{domain}:{COORDINATOR_PORT}",
        index=f"$({INDEX})",
    )
    container = _container("learner", settings.learner_image, arguments, deployment.learner)
    container["livenessProbe"] = _liveness(deployment.learner_bounds)
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container["env"] = [
        *_environment(deployment.learner, cache=f"{settings.mount}/cache"),
        {"name": INDEX, "valueFrom": index},
        *_secret_environment(f"{name}-learner"),
    ]
    container["volumeMounts"] += [
        _mount("storage", settings.mount),
        _mount("config", CONFIG, read_only=True),
        _mount("shared", f"{SECRETS}/shared", read_only=True),
    ]
    volumes = [_claim(settings.storage_claim), _config_map(name), _secret("shared", name)]
    if deployment.config.publish.serve != "none":
        container["env"] += _variables(
            SLUICE_TLS_CERT=f"{SECRETS}/tls/tls.crt", SLUICE_TLS_KEY=f"{SECRETS}/tls/tls.key"
        )
        container["volumeMounts"].append(_mount("tls", f"{SECRETS}/tls", read_only=True))
        volumes.append(_secret("tls", f"{name}-tls"))
    container["ports"] = _ports(deployment)
    return _pod(
        deployment,
        container,
        deployment.learner,
        volumes,
        component="learner",
        shm_gib=deployment.learner_shm_gib,
        restart="Never",
        grace_s=deployment.learner_grace_s,
    )


def actor_pod(deployment: Deployment) -> Json:
    """One actor; its pod's name is its own. A process that ends is started again in its place, by itself."""
    name, settings = deployment.run, deployment.settings
    arguments = deploy_deployment.actor(deployment, name="$(SLUICE_NAME)", work_dir=f"{SCRATCH}/actor")
    container = _container("actor", settings.actor_image, arguments, deployment.actor)
    container["livenessProbe"] = _liveness(deployment.actor_bounds)
    container["readinessProbe"] = _probe(None)
    container["env"] = [
        *_environment(deployment.actor, cache=f"{SCRATCH}/cache"),
        {"name": "SLUICE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *_secret_environment(f"{name}-actor"),
    ]
    container["volumeMounts"].append(_mount("shared", f"{SECRETS}/shared", read_only=True))
    return _pod(
        deployment,
        container,
        deployment.actor,
        [_secret("shared", name)],
        component="actor",
        shm_gib=deployment.actor_shm_gib,
        restart="Always",
        grace_s=deployment.actor_grace_s,
    )


def node_pod(deployment: Deployment) -> Json:
    """A machine with learner and engines. launch.local watches them itself, and needs no probe."""
    settings = deployment.settings
    arguments = deploy_deployment.local(config=f"{CONFIG}/config.json")
    container = _container("node", settings.learner_image, arguments, deployment.learner)
    container["env"] = _environment(deployment.learner, cache=f"{settings.mount}/cache", has_pulse=False)
    container["volumeMounts"] += [_mount("storage", settings.mount), _mount("config", CONFIG, read_only=True)]
    return _pod(
        deployment,
        container,
        deployment.learner,
        [_claim(settings.storage_claim), _config_map(deployment.run)],
        component="node",
        shm_gib=deployment.learner_shm_gib,
        restart="Never",
        grace_s=deployment.learner_grace_s,
    )


def labels(deployment: Deployment, component: str = "") -> Json:
    """Of all objects of the run, or of one role's."""
    found = {"app.kubernetes.io/name": "sluice", "app.kubernetes.io/instance": deployment.run}
    return found | ({"app.kubernetes.io/component": component} if component else {})


def service_account(deployment: Deployment) -> str:
    """The account that pods run under."""
    return deployment.settings.service_account or f"{deployment.run}-sluice"


def _pod(
    deployment: Deployment,
    container: Json,
    hosts: Hosts,
    volumes: list[Json],
    *,
    component: str,
    shm_gib: int,
    restart: str,
    grace_s: int,
) -> Json:
    uid = deployment.settings.uid
    security: Json = {"runAsUser": uid, "runAsGroup": uid, "runAsNonRoot": uid != 0, "fsGroup": uid}
    spec: Json = {
        "serviceAccountName": service_account(deployment),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": security
        | {"fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [
            *volumes,
            {"name": "scratch", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}},
        ],
    }
    if "code" in deployment.config.parts and component != "learner":
        _let_isolate(spec, container, deployment.settings)
    if hosts.resource:
        spec["nodeSelector"] = dict(hosts.labels)
        spec["tolerations"] = [{"key": hosts.resource, "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": labels(deployment, component)}, "spec": spec}


def _let_isolate(spec: Json, container: Json, settings: DeploySettings) -> None:
    """Lets a pod's processes make user namespaces, and mount /proc in them, without any right outside of the pod."""
    if settings.sandbox_runtime:
        spec["runtimeClassName"] = settings.sandbox_runtime
        return
    spec["hostUsers"] = False
    container["securityContext"] |= {
        "seccompProfile": {"type": "Localhost", "localhostProfile": settings.sandbox_seccomp},
        "appArmorProfile": {"type": "Unconfined"},  # the default one refuses mounts
        "procMount": "Unmasked",  # over a masked /proc the kernel lets nobody mount another
    }


def _container(name: str, image: str, arguments: list[str], hosts: Hosts) -> Json:
    """Under tini, which hands signals on and reaps what an engine leaves."""
    asked: Json = {"cpu": str(hosts.cpus), "memory": f"{hosts.memory_gib}Gi", "ephemeral-storage": _EPHEMERAL}
    limits: Json = {"memory": f"{hosts.memory_gib}Gi"}
    if hosts.resource:
        asked[hosts.resource] = limits[hosts.resource] = str(hosts.chips)
    return {
        "name": name,
        "image": image,
        "command": ["tini", "--", "python"],
        "args": arguments,
        "resources": {"requests": asked, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [_mount("scratch", SCRATCH), _mount("shm", SHM)],
    }


def _ports(deployment: Deployment) -> list[Json]:
    ports = {
        "weights": deployment.settings.port * (deployment.config.publish.serve != "none"),
        "coordinator": COORDINATOR_PORT * (deployment.learner.count > 1),
        "tpu": TPU_PORT * deployment.learner.is_tpu,
    }
    return [{"name": name, "containerPort": port} for name, port in ports.items() if port]


def _liveness(bounds: HangTimeouts) -> Json:
    return _probe(bounds) | {"terminationGracePeriodSeconds": _KILL_GRACE_S}


def _probe(bounds: HangTimeouts | None) -> Json:
    return {
        "exec": {"command": ["python", *deploy_deployment.probe(PULSE, bounds)]},
        "periodSeconds": _PROBE_S,
        "timeoutSeconds": _PROBE_TIMEOUT_S,
        "failureThreshold": _PROBE_FAILURES,
    }


def _environment(hosts: Hosts, *, cache: str, has_pulse: bool = True) -> list[Json]:
    return _variables(
        HOME=SCRATCH,
        TMPDIR=SCRATCH,
        PYTHONUNBUFFERED="1",
        SLUICE_CACHE=cache,
        **({"SLUICE_LIVENESS_FILE": PULSE} if has_pulse else {}),
        **({"LD_LIBRARY_PATH": _GKE_DRIVER} if GKE_GPU in hosts.labels else {}),
    )


def _secret_environment(login: str) -> list[Json]:
    """The password as a variable: as a secret's file the group may read it, and libpq refuses such files."""
    password = {"secretKeyRef": {"name": login, "key": "password"}}
    return [
        *_variables(**dict(deploy_deployment.secrets(f"{SECRETS}/shared"))),
        {"name": "PGPASSWORD", "valueFrom": password},
    ]


def _variables(**values: str) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _mount(name: str, path: str, *, read_only: bool = False) -> Json:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def _claim(name: str) -> Json:
    return {"name": "storage", "persistentVolumeClaim": {"claimName": name}}


def _config_map(run: str) -> Json:
    return {"name": "config", "configMap": {"name": run}}


def _secret(name: str, secret: str) -> Json:
    """Readable by the pod's user through its group, and by nobody else."""
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


_MAX_RESTARTS = 50
"""Of the whole learner: each goes on from its checkpoint, and hosts are taken away and given back in a long run."""
_HOPELESS = [cli.USAGE_ERROR, cli.SUPERSEDED]
"""Codes of a learner that must not be started again."""
_ROLLOUT_S = 3600


def render(deployment: Deployment) -> dict[str, str]:
    """Files by name, each a stream of YAML documents for `kubectl apply -f`."""
    if deployment.settings.one_node:
        files = {"run.yaml": _base(deployment), "node.yaml": [node_job(deployment)]}
    else:
        files = {
            "run.yaml": _base(deployment),
            "learner.yaml": [learner_budget(deployment), learner_jobset(deployment)],
            "actors.yaml": [actor_budget(deployment), actor_deployment(deployment)],
        }
    return {name: _dump(objects) for name, objects in files.items()}


def learner_jobset(deployment: Deployment) -> Json:
    """One job of a pod a host, with a headless service; a pod that fails ends all, and all start again.

    What was wrongly started, or was superseded, is not started again.
    """
    hosts = deployment.learner
    job: Json = {
        "completionMode": "Indexed",
        "completions": hosts.count,
        "parallelism": hosts.count,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "learner", "operator": "In", "values": _HOPELESS},
                }
            ]
        },
        "template": learner_pod(deployment),
    }
    metadata = _metadata(deployment, deployment.run, "learner")
    if hosts.is_tpu and hosts.count > 1:  # a slice is a node pool: never half of two
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool",
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": deployment.run, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": _MAX_RESTARTS,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [
                {
                    "name": "learner",
                    "replicas": 1,
                    "template": {"metadata": {"labels": labels(deployment, "learner")}, "spec": job},
                }
            ],
        },
    }


def actor_deployment(deployment: Deployment) -> Json:
    """Actors that know nothing of each other: one that dies is started again, alone."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(deployment, f"{deployment.run}-actors", "actor"),
        "spec": {
            "replicas": deployment.num_actors,
            "selector": {"matchLabels": labels(deployment, "actor")},
            # There is no accelerator to spare for a surge.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
            "progressDeadlineSeconds": _ROLLOUT_S,
            "template": actor_pod(deployment),
        },
    }


def node_job(deployment: Deployment) -> Json:
    """A machine with learner and engines: one pod, started again where it fails, and going on from its checkpoint."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(deployment, deployment.run, "node"),
        "spec": {
            "backoffLimit": _MAX_RESTARTS,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": "node",
                            "operator": "In",
                            "values": [cli.USAGE_ERROR],
                        },
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": node_pod(deployment),
        },
    }


def learner_budget(deployment: Deployment) -> Json:
    """No host of the learner is drained as long as it trains: one that goes ends all."""
    return _budget(deployment, "learner", {"minAvailable": deployment.learner.count})


def actor_budget(deployment: Deployment) -> Json:
    """Actors are drained one after the other."""
    return _budget(deployment, "actor", {"maxUnavailable": 1})


def secrets_of(deployment: Deployment) -> list[str]:
    """The commands that make the secrets the pods read, from files of one folder; what they hold is never rendered."""
    if deployment.settings.one_node:
        return []
    run, to = deployment.run, f"kubectl -n {deployment.settings.namespace} create secret"
    files = "--from-file=token=keys/token --from-file=ca.pem=keys/ca.pem --from-file=store-ca.pem=keys/store-ca.pem"
    tls = [f"{to} tls {run}-tls --cert=keys/server.pem --key=keys/server.key"]
    return [
        f"{to} generic {run} {files}",
        *(tls if deployment.config.publish.serve != "none" else []),
        *(f"{to} generic {run}-{role} --from-file=password=keys/{role}-password" for role in ("learner", "actor")),
    ]


class _Dumper(yaml.SafeDumper):
    """Long texts as they are, and everything in full where it stands."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _dump(objects: list[Json]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)


def _base(deployment: Deployment) -> list[Json]:
    config: Json = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(deployment, deployment.run),
        "data": {"config.json": to_json(deployment.config)},
    }
    if deployment.settings.service_account:
        return [config]
    account: Json = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(deployment, service_account(deployment)),
        "automountServiceAccountToken": False,
    }
    return [account, config]


def _budget(deployment: Deployment, component: str, bound: Json) -> Json:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(deployment, f"{deployment.run}-{component}", component),
        "spec": bound | {"selector": {"matchLabels": labels(deployment, component)}},
    }


def _metadata(deployment: Deployment, name: str, component: str = "") -> Json:
    return {
        "name": name,
        "namespace": deployment.settings.namespace,
        "labels": labels(deployment, component),
    }
