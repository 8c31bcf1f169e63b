"""A schema of ours for JobSet, which Kubernetes' own schemas don't hold.

Written from the fields of jobset.x-k8s.io/v1alpha2 as its API reference gives them: those that we render, their types
and choices, and nothing else is let through. The job template inside is held against Kubernetes' own schema apart.
"""

from typing import Any

_NAME = {"type": "string", "pattern": "^[a-z]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


JOBSET = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata={"type": "object", "required": ["name", "namespace"]},
    spec=_object(
        ["replicatedJobs"],
        network=_object(
            [],
            enableDNSHostnames={"type": "boolean"},
            subdomain=_NAME,
            publishNotReadyAddresses={"type": "boolean"},
        ),
        successPolicy=_object(
            ["operator"], operator={"enum": ["All", "Any"]}, targetReplicatedJobs={"type": "array", "items": _NAME}
        ),
        failurePolicy=_object(
            [],
            maxRestarts={"type": "integer", "minimum": 0},
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules={
                "type": "array",
                "items": _object(
                    ["name", "action"],
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={
                        "enum": [
                            "FailJobSet",
                            "RestartJobSet",
                            "RestartJobSetAndIgnoreMaxRestarts",
                            "RestartJob",
                            "RestartJobAndIgnoreMaxRestarts",
                        ]
                    },
                    onJobFailureReasons={
                        "type": "array",
                        "items": {
                            "enum": [
                                "BackoffLimitExceeded",
                                "DeadlineExceeded",
                                "FailedIndexes",
                                "MaxFailedIndexesExceeded",
                                "PodFailurePolicy",
                            ]
                        },
                    },
                    targetReplicatedJobs={"type": "array", "items": _NAME},
                ),
            },
        ),
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["name", "template"],
                name=_NAME,
                replicas={"type": "integer", "minimum": 1},
                template=_object([], metadata={"type": "object"}, spec={"type": "object"}),
            ),
        },
    ),
)
