"""Kubernetes objects of a deployment, rendered from `templates/*.yaml.j2`."""

import json

import jinja2

from configs.overrides import to_json
from launch import cli
from launch.tools.deploy import deployment as commands
from launch.tools.deploy.deploy_settings import CONFIG, COORDINATOR_PORT, SCRATCH, SECRETS, SHM, TPU_PORT
from launch.tools.deploy.deployment import Deployment

_LIVENESS_FILE = f"{SHM}/sluice-liveness"
_MAX_RESTARTS = 50
"""Maximum restarts of the whole learner, which resumes from its checkpoint; hosts may be preempted often in a long run.
"""


def render(deployment: Deployment) -> dict[str, str]:
    """Returns YAML files by name, for `kubectl apply -f`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("launch.tools.deploy"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = _quoted
    run, settings, config = deployment.run, deployment.settings, deployment.config
    domain = f"{run}.{settings.namespace}.svc"
    ports = {
        "weights": settings.port * (config.publish.serve != "none"),
        "coordinator": COORDINATOR_PORT * (deployment.learner.count > 1),
        "tpu": TPU_PORT * deployment.learner.is_tpu,
    }
    environment.globals |= {
        "deployment": deployment,
        "settings": settings,
        "learner": deployment.learner,
        "run": run,
        "config": to_json(config),
        "service_account": settings.service_account or f"{run}-sluice",
        "serves": config.publish.serve != "none",
        "has_code_rewards": "code" in config.parts,
        "ports": {name: port for name, port in ports.items() if port},
        "learner_arguments": commands.learner(
            deployment,
            config=f"{CONFIG}/config.json",
            address=f"{run}-learner-0-{{process_id}}.{domain}",
            coordinator=f"{run}-learner-0-0.{domain}:{COORDINATOR_PORT}",
            index="$(SLUICE_PROCESS_ID)",
        ),
        "actor_arguments": commands.actor(deployment, name="$(SLUICE_NAME)", work_dir=f"{SCRATCH}/actor"),
        "node_arguments": commands.local(config=f"{CONFIG}/config.json"),
        "liveness": {
            "learner": ["python", *commands.probe(_LIVENESS_FILE, deployment.learner_bounds)],
            "actor": ["python", *commands.probe(_LIVENESS_FILE, deployment.actor_bounds)],
        },
        "readiness": ["python", *commands.probe(_LIVENESS_FILE, None)],
        "secrets": commands.secrets(f"{SECRETS}/shared"),
        "MAX_RESTARTS": _MAX_RESTARTS,
        "LIVENESS_FILE": _LIVENESS_FILE,
        **{"CONFIG": CONFIG, "SCRATCH": SCRATCH, "SECRETS": SECRETS, "SHM": SHM},
        **{"USAGE_ERROR": int(cli.USAGE_ERROR), "SUPERSEDED": int(cli.SUPERSEDED)},
    }
    names = ("run", "node") if settings.one_node else ("run", "learner", "actors")
    return {f"{name}.yaml": environment.get_template(f"{name}.yaml.j2").render() for name in names}


def _quoted(value: object) -> str:
    """Formats a value as JSON, which YAML accepts, so that a name such as `true` or `123` stays a string."""
    return json.dumps(value, ensure_ascii=False)


def secrets_of(deployment: Deployment) -> list[str]:
    """Returns the commands that create the pods' secrets from key files; no secret is rendered."""
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
