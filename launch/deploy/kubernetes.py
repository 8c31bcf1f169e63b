"""Kubernetes objects of a run. The learner is a JobSet: all hosts, or none. Actors are a Deployment: each by itself."""

import yaml

from configs.overrides import to_json
from launch import command_line
from launch.deploy import pods
from launch.deploy.deployment import Deployment
from launch.deploy.pods import Json

_MAX_RESTARTS = 50
"""Of the whole learner: each goes on from its checkpoint, and hosts are taken away and given back in a long run."""
_HOPELESS = [command_line.USAGE_ERROR, command_line.SUPERSEDED]
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
        "template": pods.learner_pod(deployment),
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
                    "template": {"metadata": {"labels": pods.labels(deployment, "learner")}, "spec": job},
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
            "selector": {"matchLabels": pods.labels(deployment, "actor")},
            # There is no accelerator to spare for a surge.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
            "progressDeadlineSeconds": _ROLLOUT_S,
            "template": pods.actor_pod(deployment),
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
                            "values": [command_line.USAGE_ERROR],
                        },
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": pods.node_pod(deployment),
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
        "metadata": _metadata(deployment, pods.service_account(deployment)),
        "automountServiceAccountToken": False,
    }
    return [account, config]


def _budget(deployment: Deployment, component: str, bound: Json) -> Json:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(deployment, f"{deployment.run}-{component}", component),
        "spec": bound | {"selector": {"matchLabels": pods.labels(deployment, component)}},
    }


def _metadata(deployment: Deployment, name: str, component: str = "") -> Json:
    return {
        "name": name,
        "namespace": deployment.settings.namespace,
        "labels": pods.labels(deployment, component),
    }
