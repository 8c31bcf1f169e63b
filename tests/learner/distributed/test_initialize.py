import pytest

from learner.distributed.initialize import ALONE, Identity, identify

SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for name in [*SLURM, "OMPI_MCA_orte_hnp_uri"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def slurm(monkeypatch):
    """Starts the process as a task of SLURM."""
    return lambda **changed: [monkeypatch.setenv(name, value) for name, value in (SLURM | changed).items()]


def of_flags(coordinator=None, num_processes=None, process_id=None):
    return identify(coordinator=coordinator, num_processes=num_processes, process_id=process_id, init_timeout_s=1)


def test_identity_without_flags_or_scheduler_is_a_process_alone():
    assert of_flags() == ALONE


def test_identity_of_flags_is_theirs_whatever_the_scheduler_says(slurm):
    slurm()
    assert of_flags("10.0.0.7:8476", 4, 1) == Identity(index=1, count=4, coordinator="10.0.0.7:8476")
    assert of_flags(num_processes=1) == ALONE


def test_identity_under_slurm_is_the_task_with_the_first_node_as_coordinator(slurm):
    slurm()
    found = of_flags()
    assert (found.index, found.count) == (2, 3)
    assert found.coordinator.startswith("node07:")


def test_identity_under_slurm_with_one_task_is_a_process_alone(slurm):
    slurm(SLURM_NTASKS="1", SLURM_PROCID="0")
    assert of_flags() == ALONE


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("10.0.0.7:8476", 4, None), "--process_id missing"),
        ((None, 4, 1), "--coordinator missing"),
        (("10.0.0.7", 4, 1), "must be host:port"),
        (("10.0.0.7:99999", 4, 1), "must be host:port"),
        (("10.0.0.7:8476", 4, 4), "from 0 to"),
        (("10.0.0.7:8476", 0, 0), ">= 1"),
    ],
)
def test_identity_of_wrong_flags_is_refused_by_name(flags, said):
    with pytest.raises(ValueError, match=said):
        of_flags(*flags)
