"""Pod templates: what learner, actor and a machine with both have in common, and what each has of its own."""

from typing import Any

from launch.deploy import commands
from launch.deploy.deployment import Bounds, Deployment
from launch.deploy.hardware import GKE_GPU, Hosts
from launch.deploy.settings import CONFIG, COORDINATOR_PORT, SCRATCH, SECRETS, SHM, TPU_PORT, Settings

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
    arguments = commands.learner(
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
    arguments = commands.actor(deployment, name="$(SLUICE_NAME)", work_dir=f"{SCRATCH}/actor")
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
    arguments = commands.local(config=f"{CONFIG}/config.json")
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


def _let_isolate(spec: Json, container: Json, settings: Settings) -> None:
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


def _liveness(bounds: Bounds) -> Json:
    return _probe(bounds) | {"terminationGracePeriodSeconds": _KILL_GRACE_S}


def _probe(bounds: Bounds | None) -> Json:
    return {
        "exec": {"command": ["python", *commands.probe(PULSE, bounds)]},
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
        **({"SLUICE_PULSE_FILE": PULSE} if has_pulse else {}),
        **({"LD_LIBRARY_PATH": _GKE_DRIVER} if GKE_GPU in hosts.labels else {}),
    )


def _secret_environment(login: str) -> list[Json]:
    """The password as a variable: as a secret's file the group may read it, and libpq refuses such files."""
    password = {"secretKeyRef": {"name": login, "key": "password"}}
    return [
        *_variables(**dict(commands.secrets(f"{SECRETS}/shared"))),
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
