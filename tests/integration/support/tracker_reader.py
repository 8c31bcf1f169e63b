"""What a tracker shows of a run, read with its own library: `python tracker_reader.py NAME FOLDER PROJECT RUN`.

Prints JSON: the scalars by name as [step, value] pairs, the times of `loss` in Unix seconds as [step, time] pairs, what
the run was told of its config and of metrics, how many runs there are, and whether the library imported torch.
"""

import glob
import json
import pathlib
import sqlite3
import sys

name, folder, project, run = sys.argv[1:]
scalars: dict[str, list[list[float]]] = {}
times: list[list[float]] = []


def add(row: dict, step: int) -> None:
    for key, value in row.items():
        scalars.setdefault(key, []).append([step, value])


if name == "wandb":
    import struct

    import wandb  # noqa: F401  # pyright: ignore[reportMissingImports]  # for what it imports
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    def records(data: bytes):
        """The records of a transaction log: LevelDB's log format (blocks of 32 KiB) after a header of 7 bytes."""
        position, parts = 7, []
        while position + 7 <= len(data):
            if (left := 32768 - position % 32768) < 7:
                position += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, position)
            parts.append(data[position + 7 : position + 7 + size])
            position += 7 + size
            if kind in (1, 4):  # whole, or the last part
                yield b"".join(parts)
                parts = []

    config, runs = {}, set()
    for path in sorted(glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")):
        for data in records(pathlib.Path(path).read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                runs.add((record.run.project, record.run.run_id, record.run.display_name))
                config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
            if record.HasField("history"):
                row = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                if "loss" in row:
                    times.append([row["step"], row["_timestamp"]])
                add({k: v for k, v in row.items() if not k.startswith("_") and k != "step"}, row["step"])
    told = {"seed": config["run"]["seed"], "about": config["metrics"], "runs": sorted(runs)}
elif name == "mlflow":
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == project]
    runs = client.search_runs([experiment.experiment_id])
    for key in runs[0].data.metrics:
        for one in client.get_metric_history(runs[0].info.run_id, key):
            add({key: one.value}, one.step)
            if key == "loss":
                times.append([one.step, one.timestamp / 1e3])
    tags = runs[0].data.tags
    lines = "".join(tags[t] for t in sorted(tags) if t in ("mlflow.note.content",) or t.startswith("sluice.metrics"))
    told = {
        "seed": int(runs[0].data.params["run.seed"]),
        "about": {line[3:].split("` | ")[0]: line.split("` | ")[1][:-2] for line in lines.splitlines()[2:]},
        "runs": [[project, r.data.tags["sluice.run"], r.info.run_name] for r in runs],
    }
else:
    import trackio  # noqa: F401  # pyright: ignore[reportMissingImports]  # for what it imports

    db = sqlite3.connect(pathlib.Path(folder) / "trackio" / f"{project}.db")
    names = set()
    for run_name, step, values in db.execute("select run_name, step, metrics from metrics order by id"):
        names.add(run_name)
        add(json.loads(values), step)
    (config,) = db.execute("select config from configs").fetchone()
    config = json.loads(config)
    told = {"seed": config["run"]["seed"], "about": config["metrics"], "runs": sorted(names)}
print(json.dumps({"scalars": scalars, "times": times, "torch": "torch" in sys.modules, **told}))
