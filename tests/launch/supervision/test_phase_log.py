from bridge.liveness import end_phase, read_phase, report_phase
from launch.supervision.child import PhaseLog


def test_phase_is_the_last_one_said_among_other_lines(tmp_path, capfd):
    file = tmp_path / "a.log"
    log = PhaseLog(file)
    assert log.phase() == ""  # there is no log yet
    report_phase("reading the prompts")
    file.write_text(f"I1 learner.py something\n{capfd.readouterr().out}W2 other\n")
    assert log.phase() == "reading the prompts"
    report_phase("compiling apply")
    end_phase()
    with open(file, "a") as out:
        out.write(capfd.readouterr().out)
    assert log.phase() == ""


def test_half_a_line_counts_once_it_is_whole(tmp_path):
    file = tmp_path / "a.log"
    file.write_text("phase: one\n")
    log = PhaseLog(tmp_path / "none")
    log._log = file
    assert log.phase() == "one"
    with open(file, "a") as out:
        out.write("phase: t")
    assert log.phase() == "one"
    with open(file, "a") as out:
        out.write("wo\n")
    assert log.phase() == "two"


def test_phase_of_the_process_before_is_not_this_ones(tmp_path):
    file = tmp_path / "a.log"
    file.write_text("phase: one\n")
    assert PhaseLog(file).phase() == ""


def test_log_that_was_cut_short_is_read_anew(tmp_path):
    file = tmp_path / "a.log"
    file.write_text("x" * 100 + "\n")
    log = PhaseLog(file)
    file.write_text("phase: new\n")
    assert log.phase() == "new"


def test_other_lines_are_no_phases():
    assert read_phase("I1123 phase: one") is None and read_phase("phases: one") is None
    assert read_phase("phase: over") == ""
    assert read_phase("(EngineCore pid=27263) phase: engine: building the model") == "engine: building the model"
