"""Gains that the five papers claim, and what Sluice measures for each."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """A row of the first table of docs/results.md."""

    name: str
    paper: str
    """The paper's number and its place."""
    bench: str
    key: str
    """Value of the bench's JSON that has an aim there."""
    opponent: str
    """What the gain is over."""
    unit: str = "times as fast"
    """What the number counts; headlines of one unit share a panel of the figure."""
    reason: str = ""
    """Measured cause, where the aim is missed."""


HEADLINES = (
    Headline(
        name="Overlap, R = 96: time per round",
        paper="-42.3% at best (RolloutPipe, section 5.2)",
        bench="overlap",
        key="reduction_pct_R96_rolloutpipe",
        unit="% less time per round",
        opponent="serial, the same compute",
        reason="within an error of 7: the learner computes 5.75 s a round beside a working engine, 10% more than "
        "serial's 5.20 beside an idle one; at equal computation it would be 45",
    ),
    Headline(
        name="Frontier dispatch over CGP: least of all sizes and engines",
        paper="2.5% at least (RolloutPipe, section 5.2)",
        bench="overlap",
        key="min_fgd_over_cgp_pct",
        unit="% less time per round",
        opponent="CGP",
        reason="six of nine are at or below 0, all within their errors; the lowest is the engine of 8 places at R = 96 "
        "(-24 to +11), whose places a frontier of three groups fills as CGP does, since engines start the first groups "
        "first in either. The paced engine, which two groups keep busy, gains 10, 5 and -1%",
    ),
    Headline(
        name="Tail batching at 32x, trained tokens/s",
        paper="2.21 (RollPacker, Table 2)",
        bench="tail",
        key="tokens_speedup_32x",
        opponent="serial",
        reason="1.17 in samples: this engine makes 12,100 tokens/s of 64 sequences and 13,200 of 128, so the requests "
        "that over-provisioning adds cost what it saves, and a long round takes 2.8 times as long as serial's",
    ),
    Headline(
        name="Tail batching at 32x, engine paced at the paper's speeds",
        paper="2.21 (RollPacker, Table 2)",
        bench="paced",
        key="tokens_speedup_tail_32x",
        opponent="serial",
        reason="1.89 in samples: long responses wait for the long rounds, of which there are few; these take up "
        "to 10 s where serial's mean round takes 6, since all of their caches are long and each step reads them",
    ),
    Headline(
        name="Tail batching at 32x with all other parts",
        paper="2.56 (RollPacker, Table 2)",
        bench="tail",
        key="tokens_speedup_32x_streamed",
        opponent="serial",
        reason="as above; helpers on devices that engines give up are measured apart (`tests.bench.stream_trainer`)",
    ),
    Headline(
        name="In-flight updates at the same largest lag",
        paper="about 2 (PipelineRL, section 5.1)",
        bench="inflight",
        key="tokens_per_s_ratio_both_cores",
        opponent="conventional RL with both cores in either phase",
        reason="appendix A allows 1.03 here, since vLLM on one core has 96% of its speed at 64 of 256 sequences, and "
        "1.44 at this lag on any engine. 91% of the engine's places are in use; the actor, which starts and stores 128 "
        "responses/s, shares the engine's core",
    ),
    Headline(
        name="In-flight updates, largest lag of 16 or more",
        paper="1.57 at g_max = 133 (PipelineRL, appendix A.4)",
        bench="inflight",
        key="tokens_per_s_ratio_ideal",
        opponent="conventional RL that moves both cores at no cost",
        reason="as above: the ideal opponent loses nothing to rounds that drain",
    ),
    Headline(
        name="In-flight updates, lag of 16 or more, engine paced",
        paper="1.57 at g_max = 133 (PipelineRL, appendix A.4)",
        bench="inflight",
        key="tokens_per_s_ratio_ideal_paced",
        opponent="conventional RL that moves both cores at no cost",
    ),
    Headline(
        name="Async ratio alpha = 2",
        paper="2.24 (ROLL Flash, RLVR)",
        bench="async_ratio",
        key="speedup_both_cores_alpha_2",
        opponent="synchronous training, engines on both cores in either",
        reason="at most 1.30, at alpha = 4: actor and engine share a core, and each sample that is a ticket of its own "
        "takes twice the actor's time (1.9 ms; 1.0 as one of a group). With one engine the actor took 44% of that core "
        "at alpha = 2, 26% in the synchronous run (2026-11-29)",
    ),
    Headline(
        name="Async ratio alpha = 2, engines paced at the paper's speeds",
        paper="2.24 (ROLL Flash, RLVR)",
        bench="paced",
        key="tokens_speedup_alpha_2",
        opponent="synchronous training, both chips generate and then train",
        reason="a learner on one chip of two allows 2.0 or so at any alpha, since the synchronous run trains a quarter "
        "of its time on both; the learner waits 24% of the time",
    ),
    Headline(
        name="Agentic: environment-level asynchrony, redundant environments",
        paper="2.72 (ROLL Flash)",
        bench="agentic",
        key="speedup_redundant",
        opponent="batch rollouts",
    ),
    Headline(
        name="Queue scheduling over 16 engines",
        paper="2.4 (ROLL Flash)",
        bench="engines",
        key="queue_scheduling_speedup",
        opponent="batch rollouts",
    ),
    Headline(
        name="Asynchronous rewards with the adaptive timeout",
        paper="1.6 (RollPacker, Figure 13)",
        bench="rewards",
        key="adaptive_speedup",
        opponent="asynchronous rewards with a fixed timeout",
        reason="1.79 in short rounds, 1.19 in long ones",
    ),
    Headline(
        name="Rewards: exposed share",
        paper="at most 0.05",
        bench="rewards",
        key="exposed_share",
        unit="share or error, less is better",
        opponent="none",
        reason="running one answer takes 0.08 s of CPU, and most of the 256 of a short round end within 7 s: the queue "
        "for both cores adds 0.8 to 2.3 s to its 16 s; 0.03 in long rounds, and 0.047 of a whole step with its "
        "training, which is the paper's measure (Table 1)",
    ),
    Headline(
        name="Planner: largest error on measured runs",
        paper="at most 10% (ours)",
        bench="planner",
        key="max_rel_error_real",
        unit="share or error, less is better",
        opponent="measured runs",
        reason="in-flight updates with H = 32 are predicted 27 to 34% too fast, all others that count within 20%: the "
        "actor takes 3.3 ms of the engine's core per sample (2026-12-01); requests cost 0.7 to 1.1 in the profile",
    ),
)
