"""The learner: `python -m launch.learner --config=configs/tiny.py` or `--run_dir=FOLDER`."""

from absl import logging

from bridge.pulse import Pulse
from launch import command_line
from launch.lifeline import die_with_parent


def main() -> int:
    """Trains the run to its end; 0 also when it was asked to stop."""
    die_with_parent()
    pulse = Pulse.of_this_process()
    pulse.start()
    command_line.log_to_stderr()
    with command_line.usage_errors():
        prepared = command_line.prepare(("learner",))
        # jax is loaded only once the input is known to be good.
        from learner.heart import Stopped
        from learner.loop import train
        from learner.start import open_run
        from learner.step_books import NotFiniteError

        run = open_run(prepared.config, prepared.folder, prepared.model_folder, pulse=pulse)
    try:
        train(run)
    except Stopped:
        logging.info("stopped step=%d; start again to go on from step %d", run.step, run.last_saved_step)
        return command_line.STOPPED
    except NotFiniteError as e:
        logging.error("%s; the run's folder and its checkpoint of step %d are kept", e, run.last_saved_step)
        return 1
    finally:
        run.close()
    return 0


if __name__ == "__main__":
    command_line.run(main)
