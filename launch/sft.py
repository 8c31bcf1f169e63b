"""Supervised fine-tuning on one machine: `python -m launch.sft --config=sft --config.prompts.path=FILE`.

Trains on rows with a prompt and a response, or with a conversation (loss.name=sft). The run folder, its checkpoints and
the written model are those of launch.local, and `--config.model.path` of a later run takes the model. On several
machines, start `python -m launch.learner` on each.
"""

from launch import cli, local


def main() -> int:
    """Runs training; returns the exit codes of launch.local."""
    return local.train(("learner",), is_supervised=True)


if __name__ == "__main__":
    cli.run(main)
