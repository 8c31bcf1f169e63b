"""What the bench wants, and what of it was met."""

from tests.bench.peers import workload

AIMS = {
    "vs_torch_packed": 1.05,
    "vs_torch_real": 1.05,
    "vs_tunix_shipped": 6.0,
    "vs_tunix_packed": 2.0,
    "peak_over_start_gb": 0.5,
    "computed_per_real_token": 1.06,
    "num_train_shapes": 1,
    "compile_28_over_8_layers": 1.1,
}
AT_LEAST = frozenset({"vs_torch_packed", "vs_torch_real", "vs_tunix_shipped", "vs_tunix_packed"})
"""The aims that a larger value is better for."""
RATIOS = {
    "vs_torch_packed": "torch_packed",
    "vs_torch_real": "torch_packed",
    "vs_torch_real_apart": "torch_packed",
    "vs_tunix_shipped": "tunix_padded",
    "vs_tunix_packed": "tunix_packed",
}


_OF_REAL = {"vs_torch_real": workload.REAL, "vs_torch_real_apart": workload.REAL_APART}
"""Ratios of the real model's shape, each of one batch."""


def batches_of(key: str) -> tuple[str, ...]:
    """The batches that a ratio is the median over."""
    return (_OF_REAL[key],) if key in _OF_REAL else workload.MAIN


def each_of(key: str) -> tuple[str, ...]:
    """The batches whose own ratio is told beside the median."""
    return () if key in _OF_REAL else tuple(b for b in workload.BATCHES if b not in _OF_REAL.values())


def aims_of(values: dict) -> dict:
    """The aims that have a value. A ratio is quoted with the fill, and with what its peer gets wrong.

    A ratio that rests on timings that other work disturbed meets no aim: load slows some sides far more than others.
    """
    aims = {}
    disturbed = {(side, batch) for side, _, batch in (name.rpartition("_") for name in values["disturbed"])}
    for key, aim in AIMS.items():
        if key not in values:
            continue
        value = values[key]
        aims[key] = {"value": value, "aim": aim, "met": value >= aim if key in AT_LEAST else value <= aim}
        if RATIOS.get(key) in values["numbers_wrong"]:
            aims[key]["remark"] = "the peer's numbers are wrong"
        if key in RATIOS and any(
            (side, batch) in disturbed for side in ("ours", RATIOS[key]) for batch in batches_of(key)
        ):
            aims[key] |= {"met": False, "remark": "disturbed by other work: time it again on a quiet machine"}
    if "vs_tunix_shipped" in aims:
        aims["vs_tunix_shipped"]["fill"] = values["fill"]
    return aims
