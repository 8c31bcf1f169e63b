"""Names, units and meanings of all metrics."""

import collections
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

LAST_EPOCH = "last_epoch/{}"
"""Name of a metric of the last epoch over an update's batch; other metrics of the row are of the first epoch."""
SHOWN_OF_LAST_EPOCH = (
    "loss",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "ratio/mean",
    "ratio/p01",
    "ratio/p50",
    "ratio/p99",
    "ess",
    "mismatch_kl",
    "reference_kl",
    "teacher_kl",
    "critic/loss",
    "critic/clip_fraction",
)
"""Metrics that earlier epochs may change; written only if rounds.epochs > 1."""


METRICS: dict[str, str] = {
    # name: unit and meaning
    "reward/mean": "mean reward over the update's responses",
    "real_tokens": "prompt and response tokens per update, including observed tokens",
    "reward/std": "standard deviation of the reward over the update's responses",
    "reward/min": "minimum reward over the update's responses",
    "reward/max": "maximum reward over the update's responses",
    "reward/zero_variance_groups": "fraction of groups without a trained response or with equal rewards (turn_grpo: "
    "equal returns of all turns; gae: without a trained response)",
    "reward/overlong_penalty": "mean soft overlong penalty added to the reward, at most 0; only where enabled",
    "reward/length_penalty": "mean length penalty added to the reward, of either sign; only where enabled",
    "verdicts/ok": "verdicts per update that give a reward, one per verifier and response",
    "verdicts/wrong": "verdicts per update that give no reward, one per verifier and response",
    "verdicts/timeout": "verdicts per update of code that exceeded its time limit; no reward (RollPacker section 4.3)",
    "verdicts/hang": "number of an update's responses whose verifier hung in every attempt; they get no reward",
    "verdicts/unscored": "responses per update that no verifier scored, such as truncated ones",
    "turns/mean": "mean number of turns over the update's episodes; only with environments",
    "turns/reward": "mean over the update's episodes of the sum of their turn rewards; only with environments",
    "response/mean_tokens": "tokens: mean response length in sampled tokens; excludes observed tokens",
    "response/max_tokens": "tokens: longest response in sampled tokens; excludes observed tokens",
    "response/observation_tokens": "tokens: mean observed tokens over the update's responses; only with environments",
    "response/thinking_tokens": "tokens: mean thinking length over the update's responses, including the marks",
    "response/thinking_unfinished": "fraction of the update's responses that end inside their thinking",
    "response/truncated": "fraction of the update's responses truncated by a limit of tokens or turns",
    "routing/captured": "fraction of the update's responses with their engine's routing; only with "
    "model.routing_replay",
    "routing/max_load": "load of the most loaded expert of any layer over its layer's mean, by the update's replayed "
    "routing; 1 is balanced",
    "routing/load_entropy": "entropy of the load over a layer's experts, as a fraction of log(experts), mean over "
    "layers; 1 is balanced",
    "loss": "nats: normalized objective",
    "entropy": "nats: mean policy entropy over trained tokens",
    "grad_norm": "global gradient norm before clipping",
    "learning_rate": "learning rate of the update",
    "ess": "effective sample size over tokens, 0 to 1 (PipelineRL eq. 6)",
    "ess_sequence": "effective sample size over sequences, 0 to 1",
    "lag/mean": "steps: mean lag over trained tokens",
    "lag/max": "steps: maximum lag over trained tokens",
    "lag/fraction_0": "fraction of trained tokens with lag 0",
    "lag/fraction_1": "fraction of trained tokens with lag 1",
    "lag/fraction_2-3": "fraction of trained tokens with lag 2 or 3",
    "lag/fraction_4-7": "fraction of trained tokens with lag 4 to 7",
    "lag/fraction_8_up": "fraction of trained tokens sampled by weights 8 or more optimizer steps old",
    "lag/ess_0": "effective sample size over tokens with lag 0, 0 to 1; NaN without such tokens",
    "lag/ess_1": "effective sample size over tokens with lag 1, 0 to 1; NaN without such tokens",
    "lag/ess_2-3": "effective sample size over tokens with lag 2 or 3, 0 to 1; NaN without such tokens",
    "lag/ess_4-7": "effective sample size over tokens with lag 4 to 7, 0 to 1; NaN without such tokens",
    "lag/ess_8_up": "effective sample size over tokens with lag 8 or more, 0 to 1; NaN without such tokens",
    "mismatch_kl": "nats: mean of log mu - log pi over trained tokens (k1)",
    "mismatch_kl_k3": "nats: Schulman's k3 estimate of KL(mu, pi); linear where pi / mu exceeds e^20",
    "reference_kl": "nats: mean of the configured KL estimate against the reference policy; 0 without one",
    "teacher_kl": "nats: mean over trained tokens with a teacher of log pi - log pi_teacher, or of "
    "loss.teacher_divergence; 0 without one",
    "max_abs_dlogprob": "nats: maximum of |log pi - log mu| over trained tokens",
    "max_abs_dlogprob_lag0": "nats: maximum of |log pi - log mu| over tokens with lag 0, engine against learner",
    "clip_fraction": "fraction of trained tokens whose ratio was clipped or truncated",
    "ratio/mean": "mean of pi / mu over trained tokens",
    "ratio/p01": "1st percentile of pi / mu over trained tokens; accurate to 1% of its logarithm",
    "ratio/p50": "median of pi / mu over trained tokens; accurate to 1% of its logarithm",
    "ratio/p99": "99th percentile of pi / mu over trained tokens; accurate to 1% of its logarithm",
    "correction/masked_tokens": "fraction of trained tokens with a correction weight of 0; only with loss.correction",
    "correction/rejected_tokens": "fraction of trained tokens that the correction rejected; only with loss.correction",
    "correction/rejected_sequences": "fraction of trained sequences all of whose tokens were rejected; only with "
    "loss.correction",
    "correction/vetoed_sequences": "fraction of trained sequences rejected by loss.correction.veto; only with "
    "loss.correction",
    "correction/vetoed_groups": "fraction of groups rejected by loss.correction.veto=group; only with loss.correction",
    "correction/ratio_mean": "mean over trained tokens of the ratio of loss.correction.weight, without it of reject, "
    "without both of the token; only with loss.correction",
    "correction/ratio_max": "maximum of the ratio of correction/ratio_mean; only with loss.correction",
    "tokens": "trained tokens per update, including those that the correction rejects",
    "sequences": "trained sequences per update",
    "critic/loss": "mean of the critic's loss over the update's actions, in squared units of the reward; only with a "
    "critic",
    "critic/explained_variance": "1 - variance of (return - value) / variance of the returns, over the update's "
    "actions, with the values before the update; at most 1, NaN for equal returns; only with a critic",
    "critic/mean_value": "mean value before the update over the update's actions; only with a critic",
    "critic/mean_return": "mean return over the update's actions, the critic's target; only with a critic",
    "critic/grad_norm": "global gradient norm of the critic before clipping; only with a critic",
    "critic/learning_rate": "learning rate of the critic; only with a critic",
    "critic/clip_fraction": "fraction of actions whose value the critic's clip left without a gradient, above 0 from "
    "the second epoch on; only with a critic",
    "critic/skipped_updates": "cumulative number of optimizer steps of the critic skipped because its loss or gradient "
    "was not finite; only with a critic",
    "skipped_updates": "cumulative number of optimizer steps skipped because loss or gradient was not finite",
    "skipped_in_a_row": "updates since the last one with an optimizer step that neither policy nor critic skipped",
    "num_compilations": "cumulative number of compilations of accumulate and apply; 2 for a single shape, 4 with a "
    "critic",
    "memory/host_peak_gib": "peak host memory of learner process 0 since its start, in GiB",
    "memory/device_peak_gib": "peak memory of the fullest local device since the learner's start, in GiB; only if the "
    "backend reports it (GPU, TPU)",
    "tokens_per_s": "tokens/s: real tokens trained per second of wall time, each counted once",
    "model_tflops_per_s": "TFLOP/s: model FLOPs per second, summed over all chips",
    "mfu": "model FLOPs utilization: model FLOPs per second over the chips' peak; NaN if the peak is unknown",
    "packing/fill": "real tokens per computed token",
    "groups/dropped": "cumulative number of dropped groups, for any reason",
    "groups/reissued": "cumulative number of reissued tickets",
    "groups/unreadable": "cumulative number of groups that cannot be decoded or differ from their row in the store",
    "groups/stale": "cumulative number of groups over the lag bound",
    "groups/below_min_version": "cumulative number of groups with tokens of weights older than their ticket's "
    "minimum version",
    "groups/zero_variance": "cumulative number of groups without a learning signal that were replaced by another "
    "prompt",
    "groups/overflow": "cumulative number of groups discarded for newer ones because the queue was full",
    "groups/wrong_size": "cumulative number of rejected groups: number of responses differs from the ticket's",
    "groups/out_of_vocabulary": "cumulative number of rejected groups: token id outside the model's vocabulary",
    "groups/too_long": "cumulative number of rejected groups: response over its token limit or over the model's "
    "context",
    "groups/future_version": "cumulative number of rejected groups: weights newer than the learner's",
    "groups/impossible_logprob": "cumulative number of rejected groups: behavior logprob that no sampled token can "
    "have",
    "groups/missing_teacher": "cumulative number of rejected groups: no logprobs of their teacher on a server",
    "groups/impossible_routing": "cumulative number of rejected groups: routed experts of another model, or one twice",
    "groups/extreme_reward": "cumulative number of rejected groups: reward too large for float32 advantages",
    "window/blocked_by_queue": "cumulative number of times that ticket issue paused because the ready queue was full",
    "window/blocked_by_lag": "cumulative number of times that ticket issue paused because of the async ratio or the "
    "lag bound",
    "ess_stops": "cumulative number of updates not applied because the batch's ESS was below the floor",
    "time/step_s": "seconds since the previous step",
    "time/train_s": "seconds of learner compute per update",
    "time/wait_s": "seconds that the learner waited for groups, per update",
    "time/publish_s": "seconds: publish latency of the last version, from hand-off until actors can read it; "
    "excludes bucket uploads",
    "time/publish_blocked_s": "seconds that the last publish blocked the learner",
    "publish/late": "cumulative number of publishes that were due while the previous one was in progress",
    "publish/replaced": "cumulative number of versions superseded before their publish began "
    "(publish.when_late=replace)",
    "publish/destination_failures": "cumulative number of failed writes of a version to an additional destination",
    "publish/destination_replaced": "cumulative number of versions superseded before they reached a slow "
    "destination, such as a bucket",
    "checkpoint/failed": "cumulative number of failed checkpoint saves, as on a full disk",
    "actor/pause_s": "seconds that generation was paused by the actors' last weight update",
    "actor/load_s": "seconds of actor/pause_s spent loading weights",
    "actor/prefetch_s": "seconds of weight copying before the pause, concurrent with generation",
    "actor/discarded_tokens": "cumulative number of tokens sampled by live actors that are in no group: races, "
    "restarts, in progress",
    "actor/verifier_failures": "cumulative number of failed or hung verifier calls of live actors; includes calls "
    "whose retry succeeded",
    "actor/episode_failures": "cumulative number of failed or hung environments of live actors; includes episodes "
    "whose retry succeeded",
    "actor/dropped_groups": "cumulative number of groups that live actors dropped because a response could not be "
    "scored or an episode could not be completed",
    "actor/judge_retries": "cumulative number of failed judge requests of live actors that were retried",
    "actor/judge_failures": "cumulative number of responses that the judge of live actors did not score",
    "actor/episode_failures/deadline": "of actor/episode_failures: environments over their time limit",
    "actor/episode_failures/crash": "of actor/episode_failures: crashed environment processes",
    "actor/episode_failures/exception": "of actor/episode_failures: exceptions raised by the environment",
    "actor/episode_failures/reply": "of actor/episode_failures: malformed replies (too large, not a Step, invalid "
    "reward)",
    "actor/episode_failures/start": "of actor/episode_failures: environments that did not start or rows that cannot "
    "be sent",
    "round/is_long": "1 if the round is drawn from the long-prompt queue, else 0",
    "round/long_queue": "prompts deferred to a later round because of long responses, at the end of the round "
    "(RollPacker section 4.1)",
    "round/frontier_width": "largest number of groups in service in the round (F_w of RolloutPipe eq. 5); only with "
    "admission.policy=frontier",
    "round/waiting_ratio_eq4": "learner's wait until a round has U complete groups, over the round's duration "
    "(RolloutPipe eq. 4)",
    "round/waiting_ratio": "wait / (wait + compute) of a round (RolloutPipe section 5.1)",
    "round/wait_s": "seconds per round that the learner waited for groups; excludes publishing and probes",
    "round/compute_s": "seconds of learner compute per round",
    "round/rollout_to_train_end_s": "seconds from a round's first ticket to the end of its last update",
    "round/first_dispatch_s": "seconds from a round's first ticket until its first U groups are complete",
    "round/first_group_s": "seconds from a round's first ticket to its first training",
    "round/recovered_s": "seconds from the time that a round's first U groups are complete until its last group is: "
    "rollout during which the learner can train (RolloutPipe eq. 3)",
    "helper/released_at": "fraction of a round's groups that were complete when engines gave their devices to the "
    "gradient helper (helpers.num_engines); 0 if they did not",
    "helper/batches": "micro-batches of a round that the helper trained",
    "helper/compute_s": "seconds in which the helper computed gradients in a round",
    "helper/start_s": "seconds until the helper had the engines' devices and the parameters; 0 if it did not help",
    "helper/hand_over_s": "seconds at a round's end until the helper's sum of gradients was in the learner's",
    "helper/lost": "processes of the helper that were lost in a round; the learner computes their micro-batches",
    "eval/loss": "nats: mean negative log-likelihood over the trained tokens of held-out rows; only with loss.name=sft",
    "eval/reward": "mean reward over the held-out problems",
    "eval/reward_stderr": "standard error of eval/reward, clustered by problem; NaN for a single problem",
    "eval/unscored_problems": "number of held-out problems that could not be scored, excluded from eval/reward",
    "eval/version": "step of the oldest weights that sampled the evaluation",
    "eval/last_version": "step of the newest weights that sampled the evaluation",
    "eval/response_tokens": "tokens: mean response length over the evaluation, in sampled tokens",
    "eval/thinking_tokens": "tokens: mean thinking length over the evaluation's responses, including the marks",
    "eval/thinking_unfinished": "fraction of the evaluation's responses that end inside their thinking",
    "eval/truncated": "fraction of the evaluation's responses truncated by a limit of tokens or turns",
    "eval/turns": "mean number of turns over the evaluation's episodes; only with environments",
    "prompts/epoch": "problems sampled, cumulative, over the rows of their file; the maximum over a mixture's files",
    "prompts/bad_rows": "cumulative number of malformed rows that were quarantined in quarantine.jsonl",
    "prompts/too_long_rows": "cumulative number of quarantined rows with an empty or too long prompt",
    "parity/max_abs_dlogprob": "nats: maximum |log pi - log mu| of engine against learner, on a probe right after a "
    "publish",
}
FAMILIES: dict[str, str] = {
    # `*` is the name of a source in prompts.mixture
    "prompts/*/epoch": "problems sampled from a source, cumulative, over its rows",
    "prompts/*/fraction": "fraction of problems drawn from a source now, by its weight and the curriculum",
    "prompts/*/problems": "cumulative number of problems sampled from a source",
    "prompts/*/reward": "running mean reward of a source's groups (prompts.curriculum_groups)",
    # `*` is the name of a verifier
    "rewards/?*": "mean unweighted score of a verifier, over the update's responses that it scored",
    "eval/rewards/?*": "mean unweighted score of a verifier, over the evaluation's responses that it scored",
    # `*` is the name of an evaluation set; `@k` is the number of samples (docs/evaluation.md)
    "eval/?*/loss": "nats: mean negative log-likelihood over the trained tokens of an evaluation set's rows",
    "eval/?*/rewards/?*": "mean unweighted score of a verifier, over the responses of an evaluation set that it scored",
    "eval/?*/avg@*_stderr": "standard error of avg@k, clustered by problem; NaN for a single problem",
    "eval/?*/pass@*_stderr": "standard error of pass@k, clustered by problem; NaN for a single problem",
    "eval/?*/maj@*_stderr": "standard error of maj@k, clustered by problem; NaN for a single problem",
    "eval/?*/avg@*": "mean reward over an evaluation set's problems and their k samples",
    "eval/?*/pass@*": "unbiased estimate of the probability that one of k samples of a problem passes "
    "(evaluation.pass_reward)",
    "eval/?*/maj@*": "fraction of an evaluation set's problems whose most frequent answer among k samples passes",
    "eval/?*/unscored_problems": "number of problems of an evaluation set that could not be scored",
    "eval/?*/version": "step of the oldest weights that sampled an evaluation set",
    "eval/?*/last_version": "step of the newest weights that sampled an evaluation set",
    "eval/?*/response_tokens": "tokens: mean response length over an evaluation set, in sampled tokens",
    "eval/?*/thinking_tokens": "tokens: mean thinking length over an evaluation set's responses, including the marks",
    "eval/?*/thinking_unfinished": "fraction of an evaluation set's responses that end inside their thinking",
    "eval/?*/truncated": "fraction of an evaluation set's responses truncated by a limit of tokens or turns",
    "eval/?*/turns": "mean number of turns over an evaluation set's episodes; only with environments",
}
"""Units and meanings of metrics with one instance per source, verifier or evaluation set."""
METRICS |= {
    LAST_EPOCH.format(name): f"{METRICS[name]}; of the last epoch over the batch" for name in SHOWN_OF_LAST_EPOCH
}

OF_ONE_START = frozenset(
    name
    for name in METRICS
    if name.startswith(("groups/", "window/", "publish/", "checkpoint/", "ess_stops"))
    and METRICS[name].startswith("cumulative")
) - {"groups/reissued"}
"""Counters of update rows that begin at 0 whenever the learner starts. Checkpoints and the store hold the others."""


def over_all_starts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a run's update rows, by step, with the counters of `OF_ONE_START` counted from the run's start."""
    found: list[dict[str, Any]] = []
    earlier: collections.Counter[str] = collections.Counter()
    last: Mapping[str, Any] = {}
    for row in rows:
        if last and row.get("incarnation") != last.get("incarnation"):
            earlier.update(_counters(last))
        found.append(dict(row) | {name: count + earlier[name] for name, count in _counters(row).items()})
        last = row
    return found


def _counters(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in OF_ONE_START & row.keys() if isinstance(row[name], (int, float))}


def meaning(name: str) -> str | None:
    """Returns unit and meaning of a metric, or None if the name is unknown."""
    if name in METRICS:
        return METRICS[name]
    return next((said for family, said in FAMILIES.items() if fnmatch.fnmatchcase(name, family)), None)
